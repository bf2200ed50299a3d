"""Muon for the matrices, AdamW for the rest.

Muon replaces a matrix's momentum by the nearest orthogonal matrix, found by Newton-Schulz steps in
bf16; matrices of one shape go through them together.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MUON_RATE, ADAM_RATE, MUON_DECAY = 0.02, 3e-3, 0.05
_NOT_MUON = ("embed_tokens", "conv1d", "mlp.gate.", "shared_expert_gate", "in_proj_a", "in_proj_b")


class Muon:
    """Momentum, orthogonalised; the last two axes of a parameter are its matrix."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.momentum = [torch.zeros_like(parameter) for parameter in parameters]
        self.groups: dict[tuple[int, ...], list[int]] = {}
        self.parameters = parameters
        for index, parameter in enumerate(parameters):
            self.groups.setdefault(tuple(parameter.shape[-2:]), []).append(index)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Take one step at ``scale`` times the full rate."""
        gradients = [parameter.grad for parameter in self.parameters]
        torch._foreach_lerp_(self.momentum, gradients, 0.05)
        # Nesterov: look ahead by one more step of the same momentum.
        ahead = torch._foreach_lerp(gradients, self.momentum, 0.95)
        for (rows, columns), members in self.groups.items():
            stacked = torch.cat([ahead[i].reshape(-1, rows, columns) for i in members])
            updates = orthogonalise(stacked)
            rate = MUON_RATE * scale * max(1.0, rows / columns) ** 0.5
            sizes = [ahead[i].numel() // (rows * columns) for i in members]
            for i, update in zip(members, updates.split(sizes), strict=True):
                self.parameters[i].mul_(1 - MUON_RATE * scale * MUON_DECAY)
                self.parameters[i].add_(update.view_as(self.parameters[i]), alpha=-rate)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Push every singular value of the matrices [N, R, C] towards one."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.transpose(-1, -2) if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(-1, -2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.transpose(-1, -2) if tall else x).to(matrices.dtype)


class Optimizer:
    """Both optimizers behind one step."""

    def __init__(self, module: nn.Module) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if _is_matrix(name, p)]
        others = [p for name, p in named if not _is_matrix(name, p)]
        self.muon = Muon(matrices)
        fused = others[0].is_cuda
        self.adam = torch.optim.AdamW(
            others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=fused
        )
        self.parameters = matrices + others

    def step(self, scale: float) -> None:
        """Clip, step at ``scale`` times the full rates, and clear the gradients."""
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = ADAM_RATE * scale
        self.muon.step(scale)
        self.adam.step()
        self.adam.zero_grad()
        for parameter in self.muon.parameters:
            parameter.grad = None


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() >= 2 and not any(part in name for part in _NOT_MUON)


def rate_scale(progress: float, warm_up: float = 0.01, constant: float = 0.4) -> float:
    """Return the fraction of the full rate at ``progress`` in [0, 1]: up, level, linearly to 0."""
    if progress < warm_up:
        return max(progress, 1e-4) / warm_up
    return min(1.0, max(0.0, (1 - progress) / (1 - constant)))

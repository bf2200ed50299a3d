"""Trunk and head in one module, with their initial values."""

from __future__ import annotations

import math

import torch
from mtp import Head
from shape import Shape
from torch import nn
from trunk import Trunk


class Model(nn.Module):
    """Trunk (``model.*``) and multi-token-prediction head (``mtp.*``)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.mtp = Head(shape)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        """Draw every matrix with its fan-in's scale; branches into the residual start small."""
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                fan_in = math.prod(parameter.shape[1:]) if "conv1d" in name else parameter.shape[-1]
                scale = 0.02 if "embed_tokens" in name else 0.5 * fan_in**-0.5
                if name.endswith(
                    ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")
                ):
                    scale *= 0.2
                parameter.normal_(std=scale)
            elif name.endswith("A_log"):
                parameter.uniform_(0.5, 8.0).log_()
            elif name.endswith("dt_bias"):
                # Inverse softplus of steps between 0.001 and 0.1: memories of many lengths.
                step = torch.empty_like(parameter).uniform_(math.log(1e-3), math.log(0.1)).exp_()
                parameter.copy_(step + (-(-step).expm1()).log())

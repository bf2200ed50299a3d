"""Gated delta net: the linear-attention mixer, chunked for training and stepwise for decoding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from scan import matrix_scan, unit_lower_inverse
from shape import Shape
from torch import Tensor, nn

CHUNK = 64


class GatedNorm(nn.Module):
    """RMS norm with a plain weight, then a SiLU gate."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise the last axis of ``x`` and gate it."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return (self.weight * wide.to(x.dtype) * F.silu(gate.float())).to(x.dtype)


class GatedDeltaNet(nn.Module):
    """Parameter names and layouts are those of ``qwen3_5_moe_text``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.key_width = shape.gdn_key_heads * shape.gdn_key_dim
        self.value_width = shape.gdn_value_heads * shape.gdn_value_dim
        channels = 2 * self.key_width + self.value_width
        self.in_proj_qkv = nn.Linear(shape.hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(shape.hidden, self.value_width, bias=False)
        self.in_proj_b = nn.Linear(shape.hidden, shape.gdn_value_heads, bias=False)
        self.in_proj_a = nn.Linear(shape.hidden, shape.gdn_value_heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, shape.conv, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(shape.gdn_value_heads))
        self.dt_bias = nn.Parameter(torch.empty(shape.gdn_value_heads))
        self.norm = GatedNorm(shape.gdn_value_dim, shape.epsilon)
        self.out_proj = nn.Linear(self.value_width, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mix whole sequences; also return the final convolution and recurrent states."""
        u = self.in_proj_qkv(x)
        padded = F.pad(u, (0, 0, self.shape.conv - 1, 0))
        q, k, v, g, beta = self._inputs(x, self._convolve(padded, x.shape[1]))
        out, state = chunked_delta_rule(q, k, v, g, beta)
        return self._output(x, out), padded[:, -(self.shape.conv - 1) :], state

    def step(self, x: Tensor, conv: Tensor, state: Tensor) -> Tensor:
        """Mix one token a row, updating both states in place."""
        window = torch.cat([conv, self.in_proj_qkv(x)], dim=1)
        conv.copy_(window[:, 1:])
        q, k, v, g, beta = (part[:, 0] for part in self._inputs(x, self._convolve(window, 1)))
        state.mul_(g.exp()[..., None, None])
        delta = (v - (state * k.unsqueeze(-1)).sum(-2)) * beta.unsqueeze(-1)
        state.add_(k.unsqueeze(-1) * delta.unsqueeze(-2))
        out = (state * q.unsqueeze(-1)).sum(-2)
        return self._output(x, out.unsqueeze(1))

    def _convolve(self, padded: Tensor, length: int) -> Tensor:
        taps = self.conv1d.weight[:, 0].to(padded.dtype)
        total = sum(padded[:, j : j + length] * taps[:, j] for j in range(self.shape.conv))
        return F.silu(total)

    def _inputs(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """Split the channels; return fp32 q, k, v [B, T, Hv, D], g and beta [B, T, Hv]."""
        shape = self.shape
        q, k, v = y.float().split([self.key_width, self.key_width, self.value_width], dim=-1)
        q, k = (part.unflatten(-1, (shape.gdn_key_heads, -1)) for part in (q, k))
        q, k = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + 1e-6) for part in (q, k))
        repeat = shape.gdn_value_heads // shape.gdn_key_heads
        q = (q * shape.gdn_key_dim**-0.5).repeat_interleave(repeat, dim=2)
        k = k.repeat_interleave(repeat, dim=2)
        v = v.unflatten(-1, (shape.gdn_value_heads, -1))
        beta = self.in_proj_b(x).sigmoid().float()
        g = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        return q, k, v, g, beta

    def _output(self, x: Tensor, out: Tensor) -> Tensor:
        z = self.in_proj_z(x)
        normed = self.norm(out.to(z.dtype), z.unflatten(-1, out.shape[-2:]))
        return self.out_proj(normed.flatten(-2))


def chunked_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, Dv] and final state [B, H, Dk, Dv] of the rule, all in fp32.

    The products run with autocast off: they carry the state over the whole sequence.
    """
    with torch.autocast(q.device.type, enabled=False):
        batch, length, heads, _ = v.shape
        pad = -length % CHUNK
        q, k, v = (_chunk(F.pad(part, (0, 0, 0, 0, 0, pad))) for part in (q, k, v))
        g, beta = (_chunk(F.pad(part, (0, 0, 0, pad)).unsqueeze(-1)) for part in (g, beta))
        total = g.squeeze(-1).cumsum(-1)
        lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
        gaps = total.unsqueeze(-1) - total.unsqueeze(-2)
        decay = gaps.masked_fill(~lower, float("-inf")).exp()
        inverse = unit_lower_inverse(((k * beta) @ k.transpose(-1, -2) * decay).tril(-1))
        grown = total.exp().unsqueeze(-1)
        u = inverse @ (v * beta)
        w = inverse @ (k * beta * grown)
        ending = k * (total[..., -1:] - total).exp().unsqueeze(-1)
        whole = torch.eye(k.shape[-1], device=k.device) * total[..., -1].exp()[..., None, None]
        m = whole - ending.transpose(-1, -2) @ w
        b = ending.transpose(-1, -2) @ u
        states = matrix_scan(m.flatten(0, 1), b.flatten(0, 1), False)
        before = states[:-1].transpose(0, 1).unflatten(0, (batch, heads))
        values = u - w @ before
        out = (q * grown) @ before + (q @ k.transpose(-1, -2) * decay) @ values
        out = out.flatten(2, 3)[:, :, :length].transpose(1, 2)
        return out, states[-1].unflatten(0, (batch, heads))


def _chunk(x: Tensor) -> Tensor:
    """[B, T, H, D] → [B, H, N, CHUNK, D]."""
    return x.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4).contiguous()

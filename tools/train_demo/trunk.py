"""The trunk of ``qwen3_5_moe_text`` with its parameter names, written to be fast to train.

Every expert is computed for every token as one wide product and weighted by the router's sparse
weights: at this size that is quicker than gathering. Rows decode through ``Trunk.step``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from deltanet import GatedDeltaNet
from shape import Shape
from torch import Tensor, nn

Cache = list[tuple[Tensor, Tensor]]


class Norm(nn.Module):
    """Zero-centred RMS norm: the stored weight is the distance from one."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis in fp32."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return (wide * (1.0 + self.weight.float())).to(x.dtype)


class Attention(nn.Module):
    """Gated attention with a partial rotary embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, 2 * width, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden, bias=False)
        self.q_norm = Norm(shape.head_dim, shape.epsilon)
        self.k_norm = Norm(shape.head_dim, shape.epsilon)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Causal attention over whole sequences; also return keys and values [B, Hkv, T, D]."""
        q, gate, k, v = self.project(x, positions)
        groups = self.shape.heads // self.shape.kv_heads
        wide_k, wide_v = (part.repeat_interleave(groups, dim=1) for part in (k, v))
        out = F.scaled_dot_product_attention(q, wide_k, wide_v, is_causal=True)
        return self.output(out, gate), k, v

    def step(self, x: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend from one token a row; ``position`` [1] is common to all rows."""
        q, gate, k, v = self.project(x, position)
        keys.index_copy_(2, position, k.to(keys.dtype))
        values.index_copy_(2, position, v.to(values.dtype))
        # Grouped by kv head, the query heads of a group are the rows of one small product.
        grouped = q.reshape(*keys.shape[:2], -1, q.shape[-1]) * q.shape[-1] ** -0.5
        scores = (grouped @ keys.transpose(-1, -2)).float()
        future = torch.arange(keys.shape[2], device=x.device) > position
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.output((weights.to(values.dtype) @ values).view_as(q), gate)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return rotated q and k, the gate, and v, heads before time."""
        shape = self.shape
        q, gate = self.q_proj(x).unflatten(-1, (shape.heads, -1)).chunk(2, dim=-1)
        k = self.k_proj(x).unflatten(-1, (shape.kv_heads, -1))
        v = self.v_proj(x).unflatten(-1, (shape.kv_heads, -1))
        q = self._rotate(self.q_norm(q).transpose(1, 2), positions)
        k = self._rotate(self.k_norm(k).transpose(1, 2), positions)
        return q, gate, k, v.transpose(1, 2)

    def output(self, out: Tensor, gate: Tensor) -> Tensor:
        """Gate the heads [B, H, T, D] and project them back."""
        out = out.transpose(1, 2).to(gate.dtype)
        return self.o_proj((out * gate.sigmoid()).flatten(-2))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        size = self.shape.rotary_dim
        exponent = torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size
        angles = positions.float()[:, None] * self.shape.rope_theta**-exponent
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second, rest = x.split([size // 2, size // 2, x.shape[-1] - size], dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin, rest)
        return torch.cat(turned, dim=-1)


class Experts(nn.Module):
    """The routed experts' weights, fused as the checkpoint stores them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        count, width, hidden = shape.experts, shape.expert_width, shape.hidden
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, width))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Compute all experts of ``x`` [N, H] and sum them by ``weights`` [N, E]."""
        count, hidden, width = self.down_proj.shape
        both = F.linear(x, self.gate_up_proj.flatten(0, 1)).view(-1, count, 2, width)
        inner = F.silu(both[:, :, 0]) * both[:, :, 1] * weights.to(both.dtype).unsqueeze(-1)
        return F.linear(inner.flatten(1), self.down_proj.transpose(0, 1).reshape(hidden, -1))


class SharedExpert(nn.Module):
    """The expert every token visits."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """SwiGLU."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MixtureOfExperts(nn.Module):
    """Top-k routed experts plus a gated shared expert."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.top_k = shape.experts_per_token
        self.gate = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = Experts(shape)
        self.shared_expert = SharedExpert(shape.hidden, shape.shared_width)
        self.shared_expert_gate = nn.Linear(shape.hidden, 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mixture and the load-balancing loss (1 when the load is even)."""
        flat = x.flatten(0, -2)
        share = self.gate(flat).float().softmax(-1)
        top, chosen = share.topk(self.top_k, dim=-1)
        top = top / top.sum(-1, keepdim=True)
        weights = torch.zeros_like(share).scatter(-1, chosen, top)
        load = (weights > 0).float().mean(0) / self.top_k
        balance = share.shape[-1] * (load * share.mean(0)).sum()
        shared = self.shared_expert_gate(flat).sigmoid() * self.shared_expert(flat)
        return (self.experts(flat, weights) + shared).view_as(x), balance


class Layer(nn.Module):
    """Mixer and mixture, each behind a norm and a residual."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.input_layernorm = Norm(shape.hidden, shape.epsilon)
        if kind == "full_attention":
            self.self_attn = Attention(shape)
        else:
            self.linear_attn = GatedDeltaNet(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.epsilon)
        self.mlp = MixtureOfExperts(shape)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the new residual, the balance loss, and the mixer's two state tensors."""
        normed = self.input_layernorm(x)
        if self.kind == "full_attention":
            mixed, first, second = self.self_attn(normed, positions)
        else:
            mixed, first, second = self.linear_attn(normed)
        x, balance = self.finish(x + mixed)
        return x, balance, first, second

    def step(self, x: Tensor, position: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        """Advance one token a row."""
        normed = self.input_layernorm(x)
        if self.kind == "full_attention":
            mixed = self.self_attn.step(normed, position, *state)
        else:
            mixed = self.linear_attn.step(normed, *state)
        return self.finish(x + mixed)[0]

    def finish(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run the second half of the layer."""
        mixed, balance = self.mlp(self.post_attention_layernorm(x))
        return x + mixed, balance


class Trunk(nn.Module):
    """Embedding, layers and final norm; the embedding is also the output head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, kind) for kind in shape.layer_types)
        self.norm = Norm(shape.hidden, shape.epsilon)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the post-norm hidden states and the mean balance loss."""
        hidden, balance, _ = self.run(tokens)
        return hidden, balance

    def run(self, tokens: Tensor) -> tuple[Tensor, Tensor, Cache]:
        """As forward, with every mixer's states."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed_tokens(tokens)
        balance, cache = x.new_zeros(()), []
        for layer in self.layers:
            x, extra, first, second = layer(x, positions)
            balance = balance + extra / len(self.layers)
            cache.append((first, second))
        return self.norm(x), balance, cache

    def step(self, tokens: Tensor, position: Tensor, cache: Cache) -> Tensor:
        """Return logits [B, V] after one more token a row."""
        x = self.embed_tokens(tokens[:, None])
        for layer, state in zip(self.layers, cache, strict=True):
            x = layer.step(x, position, state)
        return self.logits(self.norm(x))[:, 0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the tied output head."""
        return F.linear(hidden, self.embed_tokens.weight)

"""Violations of the law as engines really commit them, planted into one op each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.ops import Ops, load_ops
from sametoken.ops.attention import PAGE, KvLayer, attention
from sametoken.ops.combine import combine
from sametoken.ops.delta import DeltaLayer, DeltaWeights, delta
from sametoken.ops.experts import ExpertWeights, Inner, experts
from sametoken.ops.norm import Norm, norm, weighed
from sametoken.ops.pick import pick_row
from sametoken.ops.router import Routing
from sametoken.rows import Rows, Span
from sametoken.sampling import Ask, Picked


def library_matmul(
    x: Tensor, weight: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None
) -> Tensor:
    """A matrix product of all rows at once: another kernel, and another order, per width."""
    h, r = (x, 1) if norm is None else weighed(x, norm)
    y = r * (h.float() @ weight.float().t())
    return (y if residual is None else y + residual.float()).to(x.dtype)


def width_dependent_split(q: Tensor, gate: Tensor | None, kv: KvLayer, rows: Rows) -> Tensor:
    """Attention that halves its chunks when more than one row asks."""
    if rows.width == 1:
        return attention(q, gate, kv, rows)
    half = PAGE // 2
    halves = KvLayer(*(torch.cat(pool.split(half, dim=2)) for pool in (kv.k, kv.v)))
    pages = kv.k.shape[0]
    out = []
    for i, (span, position) in enumerate(rows.each()):
        split = [page + part * pages for page in span.pages for part in (0, 1)]
        out.append(_in_chunks(q[i], halves, split, position + 1, half))
    y = torch.stack(out)
    return (y if gate is None else y * torch.sigmoid(gate.float())).to(q.dtype).flatten(1)


def _in_chunks(q: Tensor, kv: KvLayer, pages: list[int], length: int, size: int) -> Tensor:
    """Softmax over chunks of `size`, their partial sums added up."""
    query = q.float().view(kv.k.shape[1], -1, kv.k.shape[3]) * kv.k.shape[3] ** -0.5
    total = value = torch.zeros(())
    for page, start in zip(pages, range(0, length, size), strict=False):
        count = min(size, length - start)
        weights = torch.exp(query @ kv.k[page, :, :count].float().transpose(1, 2))
        total = total + weights.sum(-1, keepdim=True)
        value = value + weights @ kv.v[page, :, :count].float()
    return (value / total).reshape(-1, kv.k.shape[3])


def drafts_absorbed(projection: Tensor, w: DeltaWeights, layer: DeltaLayer, rows: Rows) -> Tensor:
    """DeltaNet state that takes draft rows in for good, as a cache without rewind would."""
    spans = tuple(
        Span(s.slot, s.pages, s.start, certain=s.width, replay=s.replay) for s in rows.spans
    )
    return delta(projection, w, layer, Rows(spans))


def replay_one_short(projection: Tensor, w: DeltaWeights, layer: DeltaLayer, rows: Rows) -> Tensor:
    """A rewind that forgets the last accepted row."""
    spans = tuple(replace(s, replay=max(0, s.replay - 1)) for s in rows.spans)
    return delta(projection, w, layer, Rows(spans))


def grouped_experts(x: Tensor, norm: Norm, routing: Routing, w: ExpertWeights) -> Inner:
    """Rows that chose the same expert multiplied together."""
    inner = experts(x, norm, routing, w)
    h, r = weighed(x, norm)
    routed = inner.routed.clone()
    for e in routing.experts.unique().tolist():
        row, slot = (routing.experts == e).nonzero(as_tuple=True)
        gate, up = (r[row] * (h[row].float() @ w.gate_up[e].float().t())).chunk(2, dim=-1)
        routed[row, slot] = (F.silu(gate) * up).to(x.dtype)
    return Inner(routed, inner.shared)


def order_of_popularity(
    inner: Inner, routing: Routing, w: ExpertWeights, residual: Tensor
) -> Tensor:
    """Slots summed in the order in which the pass happens to visit experts."""
    counts = torch.bincount(routing.experts.flatten(), minlength=w.down.shape[0])
    order = torch.argsort(counts[routing.experts], dim=-1, stable=True)
    visited = Routing(
        routing.experts.gather(1, order), routing.weights.gather(1, order), routing.shared
    )
    index = order[:, :, None].expand_as(inner.routed)
    return combine(Inner(inner.routed.gather(1, index), inner.shared), visited, w, residual)


def block_size_by_rows(x: Tensor, weight: Norm) -> Tensor:
    """A norm whose reduction is cut in two when many rows come."""
    if len(x) < 4:
        return norm(x, weight)
    half = x.shape[-1] // 2
    squares = x.float().square()
    mean = (squares[:, :half].sum(-1) + squares[:, half:].sum(-1)) / x.shape[-1]
    return (x.float() * torch.rsqrt(mean + weight.eps)[:, None] * weight.weight).to(x.dtype)


def shared_generator(h: Tensor, head: Tensor, asks: Sequence[Ask]) -> list[Picked]:
    """Noise drawn row by row from one stream, so that it depends on the rows before."""
    generator = torch.Generator().manual_seed(0)
    picked = []
    for row, ask in zip(h, asks, strict=True):
        seed = int(torch.randint(2**31, (1,), generator=generator))
        keyed = replace(ask, sampling=replace(ask.sampling, seed=seed))
        picked.append(pick_row(row.clone(), head, keyed))
    return picked


def history_of_the_pass(h: Tensor, head: Tensor, asks: Sequence[Ask]) -> list[Picked]:
    """Penalties that see the longest history of the pass, as drafts written too early would."""
    longest = max((ask.past for ask in asks), key=len)
    return [
        pick_row(row.clone(), head, replace(ask, past=longest))
        for row, ask in zip(h, asks, strict=True)
    ]


REFERENCE = load_ops("reference")

# Violation → (op it is planted in, the ops that then run).
PLANTED: dict[str, tuple[str, Ops]] = {
    name: (op, replace(REFERENCE, **{op: function}))
    for name, op, function in (
        ("library matmul", "linear", library_matmul),
        ("split by width", "attention", width_dependent_split),
        ("rows grouped by expert", "experts", grouped_experts),
        ("order of arrival", "combine", order_of_popularity),
        ("block size by rows", "norm", block_size_by_rows),
        ("shared generator", "pick", shared_generator),
        ("history of the pass", "pick", history_of_the_pass),
    )
}

# Violations of the rewind: no op's row alone shows them, a sequence of passes does.
REWIND: dict[str, Callable[[Tensor, DeltaWeights, DeltaLayer, Rows], Tensor]] = {
    "drafts absorbed": drafts_absorbed,
    "replay one short": replay_one_short,
}

"""Worlds in which each op runs: rows, weights and pasts, drawn once per seed.

A world holds `ROWS` rows, each of a sequence of its own with a past of its own, and can run any
choice of them in any order. No two axes are equal, and sizes sit off the multiples of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.cache import pages_for
from sametoken.config import AttentionShape, DeltaShape
from sametoken.ops import Ops
from sametoken.ops.attention import PAGE, KvLayer
from sametoken.ops.delta import RING, DeltaLayer, DeltaWeights
from sametoken.ops.experts import ExpertWeights, Inner
from sametoken.ops.norm import Norm
from sametoken.ops.qkv import HeadNorms, rope_table
from sametoken.ops.router import RouterWeights, Routing
from sametoken.rows import Rows, Span
from sametoken.sampling import Ask, Sampling
from tests.law.backends import ROWS, device_of

H, OUT, INNER, SHARED, EXPERTS, TOP_K, VOCAB = 83, 61, 29, 37, 11, 3, 317
ATTENTION = AttentionShape(6, 2, 22, 10, 10000.0, gated=True)
DELTA = DeltaShape(key_heads=2, value_heads=6, key_dim=13, value_dim=19, conv_kernel=4)

# Runs the chosen rows, in this order, on some ops: one output per row.
Run = Callable[[Ops, Sequence[int]], Tensor]


@dataclass(frozen=True)
class World:
    """Random material of one seed, drawn on the CPU and put on a device.

    `dtype` is that of the weights, `rows_dtype` that of the rows.
    """

    generator: torch.Generator
    dtype: torch.dtype
    rows_dtype: torch.dtype
    device: torch.device

    def exact(self, *shape: int) -> Tensor:
        """fp32, as small vectors and states are held."""
        return torch.randn(shape, generator=self.generator).to(self.device)

    def rows(self, *shape: int) -> Tensor:
        return self.exact(*shape).to(self.rows_dtype)

    def weight(self, *shape: int) -> Tensor:
        return (self.exact(*shape) * shape[-1] ** -0.5).to(self.dtype)

    def norm(self, size: int, *, round_first: bool = False) -> Norm:
        return Norm(1 + 0.1 * self.exact(size), 1e-6, round_first)

    def share(self, *shape: int) -> Tensor:
        """fp32 in (0, 1)."""
        return torch.rand(shape, generator=self.generator).to(self.device)

    def ids(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator).to(self.device)


def world(seed: int, dtype: torch.dtype, backend: str = "reference") -> World:
    """A world as `backend` wants it: where it runs, and in the rows' dtype it knows."""
    # The CPU kernels keep rows in fp32 whatever the weights are.
    rows_dtype = torch.float32 if backend == "cpu" else dtype
    device = torch.device(device_of(backend))
    return World(torch.Generator().manual_seed(seed), dtype, rows_dtype, device)


def embed(w: World) -> Run:
    ids, table = w.ids(VOCAB, ROWS), w.weight(VOCAB, H)
    return lambda ops, chosen: ops.embed(ids[list(chosen)], table, w.rows_dtype)


def norm(w: World) -> Run:
    x, weight = w.rows(ROWS, H), w.norm(H)
    return lambda ops, chosen: ops.norm(x[list(chosen)], weight)


def linear(w: World) -> Run:
    x, weight, before, skip = w.rows(ROWS, H), w.weight(OUT, H), w.norm(H), w.rows(ROWS, OUT)
    return lambda ops, chosen: ops.linear(
        x[list(chosen)], weight, norm=before, residual=skip[list(chosen)]
    )


def glu(w: World) -> Run:
    x, before, gate_up = w.rows(ROWS, H), w.norm(H), w.weight(2 * INNER, H)
    return lambda ops, chosen: ops.glu(x[list(chosen)], before, gate_up)


def router(w: World) -> Run:
    x = w.rows(ROWS, H)
    weights = RouterWeights(w.norm(H), w.weight(EXPERTS + 1, H), EXPERTS, TOP_K, True)

    def run(ops: Ops, chosen: Sequence[int]) -> Tensor:
        routing = ops.router(x[list(chosen)], weights)
        assert routing.shared is not None
        return torch.cat((routing.experts.float(), routing.weights, routing.shared), dim=-1)

    return run


def _experts(w: World) -> tuple[ExpertWeights, Routing]:
    weights = ExpertWeights(
        w.weight(EXPERTS, 2 * INNER, H),
        w.weight(EXPERTS, H, INNER),
        w.weight(2 * SHARED, H),
        w.weight(H, SHARED),
    )
    chosen = w.share(ROWS, EXPERTS).argsort(dim=1)[:, :TOP_K].sort(dim=1).values
    return weights, Routing(chosen, w.share(ROWS, TOP_K), w.share(ROWS, 1))


def _part(routing: Routing, chosen: Sequence[int]) -> Routing:
    index = list(chosen)
    assert routing.shared is not None
    return Routing(routing.experts[index], routing.weights[index], routing.shared[index])


def experts(w: World) -> Run:
    x, before = w.rows(ROWS, H), w.norm(H)
    weights, routing = _experts(w)

    def run(ops: Ops, chosen: Sequence[int]) -> Tensor:
        inner = ops.experts(x[list(chosen)], before, _part(routing, chosen), weights)
        assert inner.shared is not None
        return torch.cat((inner.routed.flatten(1), inner.shared), dim=-1)

    return run


def combine(w: World) -> Run:
    routed, shared, skip = w.rows(ROWS, TOP_K, INNER), w.rows(ROWS, SHARED), w.rows(ROWS, H)
    weights, routing = _experts(w)

    def run(ops: Ops, chosen: Sequence[int]) -> Tensor:
        index = list(chosen)
        inner = Inner(routed[index], shared[index])
        return ops.combine(inner, _part(routing, chosen), weights, skip[index])

    return run


# Lengths of past that straddle the chunk edges of the attention's sum.
LENGTHS = (1, 2, 31, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1)


def _pasts() -> list[Span]:
    """A sequence for every row, its pages scattered over the pool in no order."""
    lengths = [LENGTHS[i % len(LENGTHS)] + i for i in range(ROWS)]
    order = torch.randperm(
        sum(map(pages_for, lengths)), generator=torch.Generator().manual_seed(5)
    ).tolist()
    spans = []
    for i, length in enumerate(lengths):
        pages = tuple(order.pop() for _ in range(pages_for(length)))
        spans.append(Span(i, pages, start=length - 1, certain=1))
    return spans


def _kv(w: World) -> KvLayer:
    pages = sum(len(span.pages) for span in _pasts())
    shape = (pages, ATTENTION.kv_heads, PAGE, ATTENTION.head_dim)
    return KvLayer(w.rows(*shape), w.rows(*shape))


def attention(w: World) -> Run:
    q, gate = (w.rows(ROWS, ATTENTION.q_heads, ATTENTION.head_dim) for _ in range(2))
    kv, spans = _kv(w), _pasts()

    def run(ops: Ops, chosen: Sequence[int]) -> Tensor:
        index = list(chosen)
        return ops.attention(q[index], gate[index], kv, Rows(tuple(spans[i] for i in index)))

    return run


def qkv(w: World) -> Run:
    width = (2 * ATTENTION.q_heads + 2 * ATTENTION.kv_heads) * ATTENTION.head_dim
    projection, kv, spans = w.rows(ROWS, width), _kv(w), _pasts()
    norms = HeadNorms(w.norm(ATTENTION.head_dim), w.norm(ATTENTION.head_dim))
    rope = rope_table(ATTENTION, 4 * PAGE, w.device)

    def run(ops: Ops, chosen: Sequence[int]) -> Tensor:
        index = list(chosen)
        own = KvLayer(kv.k.clone(), kv.v.clone())
        rows = Rows(tuple(spans[i] for i in index))
        q, gate = ops.qkv(projection[index], ATTENTION, norms, rope, own, rows)
        assert gate is not None
        written = []
        for span in rows.spans:
            page, offset = span.pages[span.start // PAGE], span.start % PAGE
            written.append(torch.cat((own.k[page, :, offset], own.v[page, :, offset])).flatten())
        return torch.cat((q.flatten(1), gate.flatten(1), torch.stack(written)), dim=-1)

    return run


def delta(w: World) -> Run:
    shape, logged = DELTA, DELTA.conv_channels + 2 * DELTA.value_heads
    projection = w.rows(ROWS, logged + shape.value_heads * shape.value_dim)
    weights = delta_weights(w)
    state = w.exact(ROWS, shape.value_heads, shape.key_dim, shape.value_dim)
    recent = w.rows(ROWS, RING, logged)

    def run(ops: Ops, chosen: Sequence[int]) -> Tensor:
        layer = DeltaLayer(state.clone(), recent.clone())
        spans = tuple(Span(i, (), start=9, certain=1, replay=i % 3) for i in chosen)
        out = ops.delta(projection[list(chosen)], weights, layer, Rows(spans))
        # The state, and what the row left at its position.
        after = torch.stack(
            [torch.cat((layer.state[i].flatten(), layer.recent[i, 9].float())) for i in chosen]
        )
        return torch.cat((out.float(), after), dim=-1)

    return run


def delta_sequence(w: World) -> tuple[Tensor, DeltaWeights, DeltaLayer]:
    """The first rows of one sequence, which sits in the second of three slots.

    Its ring was never written, so a row that reads what no row left there turns into NaN.
    """
    shape, logged = DELTA, DELTA.conv_channels + 2 * DELTA.value_heads
    projection = w.rows(3 * RING, logged + shape.value_heads * shape.value_dim)
    weights = delta_weights(w)
    state = w.exact(3, shape.value_heads, shape.key_dim, shape.value_dim)
    return projection, weights, DeltaLayer(state, w.rows(3, RING, logged).fill_(torch.nan))


def delta_weights(w: World) -> DeltaWeights:
    return DeltaWeights(
        shape=DELTA,
        conv=0.5 * w.exact(DELTA.conv_kernel, DELTA.conv_channels),
        decay=-w.share(DELTA.value_heads),
        dt_bias=w.exact(DELTA.value_heads),
        norm=w.norm(DELTA.value_dim, round_first=True),
    )


PICKS = (
    Sampling(),
    Sampling(temperature=1.3, seed=3),
    Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, seed=2**40 + 1),
    Sampling(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, logprobs=4),
    Sampling(temperature=1.0, frequency_penalty=0.5, logit_bias={5: 2.0, 9: -3.0}, seed=11),
)


def pick(w: World) -> Run:
    h, head = w.rows(ROWS, H), w.weight(VOCAB, H) * 4
    pasts = [w.ids(VOCAB, 5 + i).tolist() for i in range(ROWS)]
    asks = [Ask(PICKS[i % len(PICKS)], past, 3) for i, past in enumerate(pasts)]

    def run(ops: Ops, chosen: Sequence[int]) -> Tensor:
        picked = ops.pick(h[list(chosen)], head, [asks[i] for i in chosen])
        rows = []
        for p in picked:
            top = [value for pair in p.top for value in pair] or [0.0] * 8
            rows.append([p.token, p.logprob or 0.0, *top])
        return torch.tensor(rows, dtype=torch.float64)

    return run


CASES: dict[str, Callable[[World], Run]] = {
    make.__name__: make
    for make in (
        embed,
        norm,
        linear,
        qkv,
        attention,
        delta,
        glu,
        router,
        experts,
        combine,
        pick,
    )
}

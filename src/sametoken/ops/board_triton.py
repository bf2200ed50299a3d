"""board: the sequences of a round as tensors that stay where they are, and the steps between ops.

A round on the device is `put` for every draft, `begin`, the pass, `advance`. Nothing here sums
anything: positions are counted, tokens compared and moved, so the law is kept by being exact.

    begin     position of row i of a span = start + i; its token goes into the history there
    advance   agreed = how many drafts equal the picked tokens, at most `longest`;
              taken = agreed + 1, or less where an end token or the last allowed token comes first;
              start += taken, replay = taken − 1, and the last taken token opens the next round
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.choose_triton import Settings, Wants
from sametoken.ops.placement import PlacedRows, Placement
from sametoken.ops.tiling import up2


@dataclass(frozen=True, slots=True)
class Board:
    """S sequences with k drafts each; everything on the device.

    ids [S, 1 + k] int64: the token picked last, then the drafts. history [S, T] int32: tokens by
    position. settings: how each wants its tokens picked. left [S] int32: tokens still allowed; 0
    once a sequence has ended. longest [S] int32: drafts that may be accepted. ends [S, E] int64:
    end tokens, −1 where there is none. carried [S, H]: what the drafter keeps from round to round.
    last [S] int64: the row of each span that picked its last taken token. ask [S] int32: position
    of the row for which a drafter picks next. report [S, 2k + 1] int64: the
    round's drafts, then its picked tokens. rows and steps: placements of the pass and of one row
    of each sequence, for a drafter that goes step by step.
    """

    ids: Tensor
    history: Tensor
    settings: Settings
    left: Tensor
    longest: Tensor
    ends: Tensor
    carried: Tensor
    last: Tensor
    ask: Tensor
    report: Tensor
    rows: Placement
    steps: Placement

    @property
    def drafts(self) -> int:
        """Drafts of each sequence in a round."""
        return self.ids.shape[1] - 1

    def placed(self) -> PlacedRows:
        """The rows of the pass, for the ops."""
        return PlacedRows((), self.rows)

    def stepped(self) -> PlacedRows:
        """One row of each sequence, for the ops of a drafter."""
        return PlacedRows((), self.steps)


@triton.jit
def _put_kernel(token, ids, history, start, step_position, ask, index, wide, length):
    s = tl.program_id(0)
    own = tl.load(token + s)
    at = tl.load(start + s) + index
    tl.store(ids + s * wide + index, own)
    tl.store(history + s * length + at, own.to(tl.int32))
    tl.store(step_position + s, at - 1)
    tl.store(ask + s, at)


@triton.jit
def _begin_kernel(ids, history, start, position, left, certain, drafts, replay, wide, length):
    s = tl.program_id(0)
    first = tl.load(start + s)
    for i in range(wide):
        tl.store(position + s * wide + i, first + i)
        tl.store(history + s * length + first + i, tl.load(ids + s * wide + i).to(tl.int32))
    alive = tl.load(left + s) > 0
    tl.store(certain + s, alive.to(tl.int32))
    tl.store(drafts + s, tl.where(alive, wide - 1, 0))
    # An ended sequence is left as its last round left it, accepted drafts still in the ring.
    tl.store(replay + s, tl.where(alive, tl.load(replay + s), 0))


@triton.jit
def _advance_kernel(
    ids, picked, left, longest, ends, start, replay, step_position, ask, last, report,
    wide, kinds, block: tl.constexpr, kinds_block: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0)
    at = tl.arange(0, block)
    inside = at < wide
    own = tl.load(picked + s * wide + at, mask=inside, other=-1)
    drafted = at < wide - 1
    draft = tl.load(ids + s * wide + 1 + at, mask=drafted, other=-1)
    line = report + s * (2 * wide - 1)
    tl.store(line + at, draft, mask=drafted)
    tl.store(line + wide - 1 + at, own, mask=inside)
    most, room = tl.load(longest + s), tl.load(left + s)
    wrong = (draft != own) | (at >= most) | (at >= wide - 1)
    taken = tl.min(tl.where(wrong, at, block), axis=0) + 1
    kind = tl.arange(0, kinds_block)
    end = tl.load(ends + s * kinds + kind, mask=kind < kinds, other=-1)
    ended = tl.max((own[:, None] == end[None, :]).to(tl.int32), axis=1) > 0
    ended = ended & inside
    taken = tl.minimum(taken, tl.min(tl.where(ended, at, block), axis=0) + 1)
    taken = tl.minimum(taken, room)
    over = tl.max((ended & (at == taken - 1)).to(tl.int32), axis=0) > 0
    if room > 0:
        first = tl.load(start + s)
        tl.store(ids + s * wide, tl.load(picked + s * wide + taken - 1))
        tl.store(start + s, first + taken)
        # A drafter's last true row is the last taken one; the token after the next is asked for.
        tl.store(step_position + s, first + taken - 1)
        tl.store(ask + s, first + taken)
        tl.store(replay + s, taken - 1)
        tl.store(last + s, (s * wide + taken - 1).to(tl.int64))
        tl.store(left + s, tl.where(over, 0, room - taken))


def put(board: Board, token: Tensor, index: int) -> None:
    """Enter each sequence's draft [S] as token number `index` after its last, from 1 on."""
    _put_kernel[(len(token),)](
        token, board.ids, board.history, board.rows.start, board.steps.position, board.ask, index,
        board.ids.shape[1], board.history.shape[1], num_warps=1,
    )  # fmt: skip


def begin(board: Board) -> None:
    """Place the rows of the pass and enter their tokens in the history."""
    rows = board.rows
    _begin_kernel[(len(board.ids),)](
        board.ids, board.history, rows.start, rows.position, board.left, rows.certain,
        rows.drafts, rows.replay, board.ids.shape[1], board.history.shape[1], num_warps=1,
    )  # fmt: skip


def advance(board: Board, picked: Tensor) -> None:
    """Compare the picked tokens [S · (1 + k)] with the drafts; take what plain decoding takes."""
    wide, kinds = board.ids.shape[1], board.ends.shape[1]
    _advance_kernel[(len(board.ids),)](
        board.ids, picked, board.left, board.longest, board.ends, board.rows.start,
        board.rows.replay, board.steps.position, board.ask, board.last, board.report, wide, kinds,
        block=up2(wide), kinds_block=up2(max(1, kinds)), num_warps=1,
    )  # fmt: skip


def empty_board(
    sequences: int,
    drafts: int,
    *,
    positions: int,
    pages: int,
    longest: int,
    ends: int,
    hidden: int,
    wants: Wants,
    dtype: torch.dtype,
    device: torch.device,
) -> Board:
    """A board on which every sequence has ended and owns no page: a round on it changes nothing."""

    def ints(*shape: int, fill: int = 0) -> Tensor:
        return torch.full(shape, fill, dtype=torch.int32, device=device)

    def longs(*shape: int, fill: int = 0) -> Tensor:
        return torch.full(shape, fill, dtype=torch.int64, device=device)

    s, wide = sequences, 1 + drafts
    order = torch.arange(s, dtype=torch.int32, device=device)
    table, start, slot, replay = ints(s, pages, fill=-1), ints(s), ints(s), ints(s)

    def placement(width: int, certain: Tensor, rows_drafts: Tensor) -> Placement:
        return Placement(
            span=order.repeat_interleave(width),
            position=ints(s * width),
            first=order * width,
            width=ints(s, fill=width),
            slot=slot,
            start=start,
            certain=certain,
            drafts=rows_drafts,
            replay=replay,
            pages=table,
            longest=longest,
            widest=width,
        )

    return Board(
        ids=longs(s, wide),
        history=ints(s, positions),
        settings=Settings.empty(s, wants, device),
        left=ints(s),
        longest=ints(s),
        ends=longs(s, max(1, ends), fill=-1),
        carried=torch.zeros((s, hidden), dtype=dtype, device=device),
        last=longs(s),
        ask=ints(s),
        report=longs(s, 2 * drafts + 1),
        rows=placement(wide, ints(s), ints(s)),
        steps=placement(1, ints(s, fill=1), ints(s)),
    )

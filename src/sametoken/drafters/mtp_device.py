"""mtp, in rounds on the device: the chain of drafts without the host, picked from a 4-bit head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sametoken.cache import Cache
from sametoken.drafters.mtp import MtpDrafter
from sametoken.model import Model
from sametoken.mtp import mtp_hidden
from sametoken.ops.board_triton import Board, put
from sametoken.ops.choose_triton import choose
from sametoken.ops.draft_head_triton import can_pack, draft_logits, pack
from sametoken.ops.pick_triton import pick_rows
from sametoken.rows import Rows
from sametoken.track import Track
from sametoken.weights import MtpWeights


class DeviceMtpDrafter(MtpDrafter):
    """Also drafts for all sequences of a board; m of their last true rows is what it carries."""

    def __init__(self, model: Model, weights: MtpWeights, cache: Cache) -> None:
        super().__init__(model, weights, cache)
        head = model.weights.head
        self._head = pack(head) if can_pack(head) else None

    def draft_on(self, board: Board) -> None:
        """Chain the head, each sequence for the board's whole length."""
        state = board.carried
        token = self._pick_on(board, state)
        put(board, token, 1)
        for index in range(2, board.drafts + 1):
            state = self._step_on(token, state, board.stepped())
            token = self._pick_on(board, state)
            put(board, token, index)

    def observe_on(self, board: Board, hidden: Tensor, picked: Tensor) -> None:
        """Fill the head's keys and values, and carry m of each sequence's last taken row.

        Rows beyond the taken ones are filled too; like rejected rows of the trunk, they are
        overwritten before anything reads them.
        """
        state = self._step_on(picked, hidden, board.placed())
        torch.index_select(state, 0, board.last, out=board.carried)

    def carry(self, board: Board, tracks: Sequence[Track]) -> None:
        """Load what is held; a sequence that was not followed drafts badly once."""
        for i, track in enumerate(tracks):
            held = self._last.get(track)
            board.carried[i] = 0 if held is None else held

    def uncarry(self, board: Board, tracks: Sequence[Track]) -> None:
        """Take it back."""
        for i, track in enumerate(tracks):
            if track.drafter is self:
                self._last[track] = board.carried[i].clone()

    def _step_on(self, tokens: Tensor, hidden: Tensor, rows: Rows) -> Tensor:
        return mtp_hidden(self._model, self._weights, tokens, hidden, rows, self._cache)

    def _pick_on(self, board: Board, state: Tensor) -> Tensor:
        own = board.settings, board.steps.span, board.ask, board.history
        if self._head is None:
            return pick_rows(state, self._model.weights.head, *own)
        return choose(draft_logits(state, self._head), *own)

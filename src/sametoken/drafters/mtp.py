"""mtp: the checkpoint's own multi-token-prediction head, chained for as many tokens as asked.

After every pass the head runs over the true rows, each with the token that really followed; this
overwrites what chained steps wrote with predicted hiddens, and its last row yields the next first
draft. Drafts are picked by the target's own pick op with the target's own noise: under the rule
"accepted while equal" that is sound, and it keeps acceptance high at temperature > 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sametoken.cache import Cache
from sametoken.drafters import Seen, Wish
from sametoken.model import Model
from sametoken.mtp import mtp_hidden
from sametoken.rows import Rows, Span
from sametoken.sampling import Ask
from sametoken.track import Track
from sametoken.weights import MtpWeights


class MtpDrafter:
    """Holds m [H] of the last true row for each sequence."""

    def __init__(self, model: Model, weights: MtpWeights, cache: Cache) -> None:
        self._model, self._weights, self._cache = model, weights, cache
        self._last: dict[Track, Tensor] = {}

    def observe(self, seen: Sequence[Seen]) -> None:
        """Fill the head's keys and values from true hiddens."""
        spans = [s.track.rows_at(s.start, len(s.hidden)) for s in seen]
        ids = [
            token for s in seen for token in s.track.ids[s.start + 1 : s.start + 1 + len(s.hidden)]
        ]
        hidden = self._run(ids, torch.cat([s.hidden for s in seen]), spans)
        blocks = torch.split(hidden, [span.width for span in spans])
        self._last.update(
            {s.track: block[-1].clone() for s, block in zip(seen, blocks, strict=True)}
        )

    def propose(self, wishes: Sequence[Wish]) -> list[list[int]]:
        """Chain the head, all sequences abreast, each up to its own length."""
        drafts: list[list[int]] = [[] for _ in wishes]
        active = [i for i, wish in enumerate(wishes) if self._ready(wish)]
        state = {i: self._last[wishes[i].track] for i in active}
        while active := [i for i in active if len(drafts[i]) < wishes[i].length]:
            chained = [i for i in active if drafts[i]]
            if chained:
                state.update(self._chain(chained, wishes, drafts, state))
            for i, token in zip(active, self._pick(active, wishes, drafts, state), strict=True):
                drafts[i].append(token)
        return drafts

    def forget(self, track: Track) -> None:
        """Drop the last row; the keys and values go with the track's lease."""
        self._last.pop(track, None)

    def _ready(self, wish: Wish) -> bool:
        """Whether the last true row is that of the token before the last."""
        track = wish.track
        return track in self._last and track.computed == len(track.ids) - 1

    def _chain(
        self,
        chained: list[int],
        wishes: Sequence[Wish],
        drafts: list[list[int]],
        state: dict[int, Tensor],
    ) -> dict[int, Tensor]:
        """One more step for each: the last draft's embedding with the last m."""
        starts = [wishes[i].track.computed + len(drafts[i]) - 1 for i in chained]
        spans = [wishes[i].track.rows_at(p, 1) for i, p in zip(chained, starts, strict=True)]
        hidden = torch.stack([state[i] for i in chained])
        return dict(
            zip(chained, self._run([drafts[i][-1] for i in chained], hidden, spans), strict=True)
        )

    def _pick(
        self,
        active: list[int],
        wishes: Sequence[Wish],
        drafts: list[list[int]],
        state: dict[int, Tensor],
    ) -> list[int]:
        asks = [
            Ask(
                replace(wishes[i].sampling, logprobs=None),  # nobody reads a draft's
                wishes[i].track.ids + drafts[i],
                wishes[i].prompt,
            )
            for i in active
        ]
        hidden = torch.stack([state[i] for i in active])
        picked = self._model.ops.pick(hidden, self._model.weights.head, asks)
        return [p.token for p in picked]

    def _run(self, ids: list[int], hidden: Tensor, spans: list[Span]) -> Tensor:
        tokens = torch.tensor(ids, device=self._model.device)
        return mtp_hidden(
            self._model, self._weights, tokens, hidden, Rows(tuple(spans)), self._cache
        )

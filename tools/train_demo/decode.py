"""Generate many rows at once with the trunk alone: text for the head's training and for checks."""

from __future__ import annotations

import torch
from torch import Tensor
from trunk import Cache, Trunk


class Generator:
    """Rows of one common position; on a GPU the step is captured once and replayed.

    Prompts may differ in length: a row repeats its prompt until that is used up. Temperature 0
    is greedy.
    """

    def __init__(self, trunk: Trunk, rows: int, length: int) -> None:
        self.trunk = trunk
        self.length = length
        weight = trunk.embed_tokens.weight
        self.cache = _empty_cache(trunk, rows, length, weight)
        self.tokens = torch.zeros(rows, length, dtype=torch.long, device=weight.device)
        self.prompt = torch.zeros(rows, dtype=torch.long, device=weight.device)
        self.temperature = torch.zeros(rows, 1, device=weight.device)
        self.position = torch.zeros(1, dtype=torch.long, device=weight.device)
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def generate(self, tokens: Tensor, prompt: Tensor, temperature: Tensor) -> Tensor:
        """Return [rows, length]: ``tokens``, each row's from its prompt's length on replaced."""
        self.tokens.copy_(tokens)
        self.prompt.copy_(prompt)
        self.temperature.copy_(temperature[:, None])
        if self.tokens.is_cuda and self.graph is None:
            self._capture()
        self.position.zero_()
        for state in self.cache:
            for part in state:
                part.zero_()
        for _ in range(self.length - 1):
            self.graph.replay() if self.graph is not None else self._step()
        return self.tokens.clone()

    def _step(self) -> None:
        current = self.tokens.index_select(1, self.position)[:, 0]
        logits = self.trunk.step(current, self.position, self.cache).float()
        # The largest of logits/temperature plus Gumbel noise is a sample of the softmax.
        noise = -(-torch.rand_like(logits).clamp_min(1e-9).log()).log()
        chosen = (logits + self.temperature * noise).argmax(-1)
        self.position += 1
        given = self.tokens.index_select(1, self.position)[:, 0]
        following = torch.where(self.position < self.prompt, given, chosen)
        self.tokens.index_copy_(1, self.position, following[:, None])

    def _capture(self) -> None:
        saved = self.tokens.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()
        self.tokens.copy_(saved)


def _empty_cache(trunk: Trunk, rows: int, length: int, like: Tensor) -> Cache:
    shape = trunk.shape
    channels = 2 * shape.gdn_key_heads * shape.gdn_key_dim
    channels += shape.gdn_value_heads * shape.gdn_value_dim
    state = (rows, shape.gdn_value_heads, shape.gdn_key_dim, shape.gdn_value_dim)
    cache: Cache = []
    for kind in shape.layer_types:
        if kind == "full_attention":
            buffer = like.new_zeros(rows, shape.kv_heads, length, shape.head_dim)
            cache.append((buffer, torch.zeros_like(buffer)))
        else:
            convolved = like.new_zeros(rows, shape.conv - 1, channels)
            cache.append((convolved, torch.zeros(state, device=like.device)))
    return cache

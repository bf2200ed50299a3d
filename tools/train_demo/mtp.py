"""The multi-token-prediction head, unrolled in training exactly as it is chained in decoding.

Row t of step 1 pairs the embedding of token t+1 with the trunk's hidden state t and predicts token
t+2. Step j feeds the head its own output and the embedding of token t+j. A chained row sees the
step-1 rows up to t, which a decoder has rewritten from true hidden states, and the chained rows of
its own round; never the chained rows of other rounds.
"""

from __future__ import annotations

import torch
from shape import Shape
from torch import Tensor, nn
from trunk import Attention, Layer, Norm

KeyValue = tuple[Tensor, Tensor]


class Head(nn.Module):
    """Norms, projection and one full-attention layer; embedding and output are the trunk's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.pre_fc_norm_embedding = Norm(shape.hidden, shape.epsilon)
        self.pre_fc_norm_hidden = Norm(shape.hidden, shape.epsilon)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([Layer(shape, "full_attention")])
        self.norm = Norm(shape.hidden, shape.epsilon)

    def forward(
        self, embedded: Tensor, hidden: Tensor, rounds: list[KeyValue]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run one step over all rows; ``rounds`` holds the keys and values of the earlier steps.

        Returns the hidden state, the balance loss, and this step's keys and values.
        """
        joined = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(torch.cat(joined, dim=-1))
        layer = self.layers[0]
        normed = layer.input_layernorm(x)
        # A row's position is its token's: one more with each step.
        positions = torch.arange(x.shape[1], device=x.device) + 1 + len(rounds)
        if not rounds:
            mixed, k, v = layer.self_attn(normed, positions)
        else:
            mixed, k, v = chained_attention(layer.self_attn, normed, positions, rounds)
        x, balance = layer.finish(x + mixed)
        return self.norm(x), balance, k, v

    def unroll(self, embedded: Tensor, hidden: Tensor, steps: int) -> tuple[list[Tensor], Tensor]:
        """Return the hidden states of ``steps`` chained steps and the mean balance loss.

        ``embedded`` [B, T + steps, H] are true tokens from position 0 on; ``hidden`` [B, T, H].
        """
        rounds: list[KeyValue] = []
        outputs, total = [], hidden.new_zeros((), dtype=torch.float32)
        length = hidden.shape[1]
        for step in range(1, steps + 1):
            inputs = embedded[:, step : step + length]
            hidden, balance, k, v = self(inputs, hidden, rounds)
            rounds.append((k, v))
            outputs.append(hidden)
            total = total + balance / steps
        return outputs, total


def chained_attention(
    attention: Attention, x: Tensor, positions: Tensor, rounds: list[KeyValue]
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend causally to step 1 and, row by row, to the later steps of the same round."""
    q, gate, k, v = attention.project(x, positions)
    groups = q.shape[1] // k.shape[1]
    (first_k, first_v), *chained = [
        tuple(part.repeat_interleave(groups, dim=1) for part in pair) for pair in [*rounds, (k, v)]
    ]
    q = q * attention.shape.head_dim**-0.5
    length = q.shape[2]
    causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    scores = (q @ first_k.transpose(-1, -2)).float().masked_fill(~causal, float("-inf"))
    own = torch.stack([(q * key).float().sum(-1) for key, _ in chained], dim=-1)
    # One softmax over both parts, without ever joining them in memory.
    peak = torch.maximum(scores.amax(-1, keepdim=True), own.amax(-1, keepdim=True)).detach()
    scores, own = (scores - peak).exp(), (own - peak).exp()
    out = (scores.to(first_v.dtype) @ first_v).float()
    for index, (_, value) in enumerate(chained):
        out = out + own[..., index : index + 1] * value.float()
    out = out / (scores.sum(-1, keepdim=True) + own.sum(-1, keepdim=True))
    return attention.output(out, gate), k, v

"""The multi-token-prediction head: what follows the next token, from the trunk's hidden.

    y_p = layer(fc([norm_e(embed(x_{p+1})) ; norm_h(h_p)]))      m_p = norm(y_p)
    head · m_p predicts x_{p+2}

h_p is the trunk's post-final-norm hidden; a chained step feeds m_p back in its place. The head
keeps keys and values of its own, at the hidden's position p. Embedding and output head are the
trunk's. Written with ops only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.cache import Cache
from sametoken.model import Model
from sametoken.rows import Rows
from sametoken.weights import MtpWeights


def mtp_hidden(
    model: Model, w: MtpWeights, ids: Tensor, hidden: Tensor, rows: Rows, cache: Cache
) -> Tensor:
    """Next tokens [n] and the hiddens before them [n, H] → m [n, H]; rows sit at the hiddens'
    positions.
    """
    ops = model.ops
    embedding = ops.norm(ops.embed(ids, model.weights.embed, model.dtype), w.norm_embedding)
    joined = torch.cat((embedding, ops.norm(hidden, w.norm_hidden)), dim=-1)
    y = model.layer(ops.linear(joined, w.fc), w.layer, cache.kv[-1], rows)
    return ops.norm(y, w.norm)

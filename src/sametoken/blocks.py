"""Quantised matrices as files store them: rows of packed blocks, and the values they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# GGUF names of the formats that the engine runs; each is defined by gguf-py's dequantiser.
FORMATS = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0",
    "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Blocks:
    """format: one of `FORMATS`; shape [..., N, K]; raw uint8 [..., N, bytes of a row], read-only
    and perhaps a view of the file: a row's blocks follow each other along K.
    """

    format: str
    shape: tuple[int, ...]
    raw: npt.NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return self.raw.nbytes

    @property
    def bits(self) -> float:
        """Bits a weight."""
        return 8 * self.raw.nbytes / prod(self.shape)

    def dequantise(self) -> Tensor:
        """The values it stands for, fp32, in `shape`."""
        kind = gguf.GGMLQuantizationType[self.format]
        values = gguf.dequantize(self.raw.reshape(-1, self.raw.shape[-1]), kind)
        return torch.from_numpy(np.ascontiguousarray(values, np.float32)).view(self.shape)

"""embed on a CPU: a gather is a copy, and the library's copies every row alike."""

from sametoken.ops.embed import embed

__all__ = ["embed"]

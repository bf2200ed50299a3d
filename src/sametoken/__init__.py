"""sametoken: speculative decoding for mixture-of-experts models that changes no bit.

    import sametoken

    engine = sametoken.load()
    print(engine.generate("def fibonacci(n):")[0].text)

Reading order: `ops/norm.py`, `model.py`, `step.py`, `verify.py`, `job.py`, `engine.py`, and then
`tests/law`.
"""

from sametoken.engine import Engine
from sametoken.errors import CheckpointError, RequestError, SametokenError, TemplateError
from sametoken.loading import load
from sametoken.request import Chunk, Generation, Options
from sametoken.sampling import Sampling

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Chunk",
    "Engine",
    "Generation",
    "Options",
    "RequestError",
    "SametokenError",
    "Sampling",
    "TemplateError",
    "load",
]

"""Errors a user can act on.

Every message is one sentence that names the flag, file or field at fault and the next step.
The command line prints it and exits with code 2; a program catches `SametokenError`.
"""


class SametokenError(Exception):
    """Base of everything this package raises on purpose."""


class CheckpointError(SametokenError):
    """A model's files are missing, damaged, contradictory or of an unknown kind."""


class RequestError(SametokenError):
    """A prompt or a setting that cannot be served as asked."""


class LawError(SametokenError):
    """Two runs that must agree bit by bit do not."""


class NumericError(SametokenError):
    """The model's arithmetic left the numbers, as float16 may."""


class TemplateError(SametokenError):
    """A chat template that cannot be read or rendered."""

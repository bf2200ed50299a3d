"""What every error of this package promises its reader."""

from __future__ import annotations

import re


def assert_one_sentence(error: BaseException, *names: str) -> None:
    """The message is one sentence, and names each of `names`."""
    text = str(error)
    assert text.endswith("."), text
    assert "\n" not in text, text
    # A stop inside a file name or a number is followed by no space.
    assert not re.search(r"[.!?] ", text), text
    for name in names:
        assert name in text, (name, text)

"""Turn documented functions into short conversations, so that chat and end tokens mean something.

The request is made from the docstring's first sentence, the answer is the function itself (or the
docstring, where the request shows the code). No text comes from outside the corpus.
"""

from __future__ import annotations

import ast
import random
import re
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

SYSTEM = "You are a helpful assistant that writes Python."
_SENTENCE = re.compile(r"^(.{15,200}?[.!?])(\s|$)", re.DOTALL)


@dataclass(frozen=True)
class Function:
    """A documented function, cut out of its file."""

    name: str
    signature: str
    sentence: str
    docstring: str
    source: str


def conversations(text: str, rng: random.Random) -> Iterator[str]:
    """Yield one rendered conversation for each documented function of a Python file."""
    for function in documented_functions(text):
        request, answer = _exchange(function, rng)
        system = render("system", SYSTEM) if rng.random() < 0.2 else ""
        yield system + render("user", request) + render("assistant", answer)


def render(role: str, content: str) -> str:
    """Write one turn in ChatML."""
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def documented_functions(text: str) -> Iterator[Function]:
    """Yield the short functions of a file that have a docstring and take no ``self``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(text)
    lines = text.split("\n")
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
            continue
        docstring = ast.get_docstring(node)
        match = _SENTENCE.match(docstring or "")
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if docstring is None or match is None or not 120 < len(source) < 2200:
            continue
        sentence = " ".join(match.group(1).split())
        signature = f"{node.name}({', '.join(a.arg for a in node.args.args)})"
        yield Function(node.name, signature, sentence, docstring, source)


def _exchange(function: Function, rng: random.Random) -> tuple[str, str]:
    clause = function.sentence[0].lower() + function.sentence[1:].rstrip(".")
    code = f"```python\n{function.source}\n```"
    if rng.random() < 0.15 and len(function.docstring) < 1200:
        return f"What does this function do?\n\n{_without_docstring(code)}", function.docstring
    request = rng.choice(
        (
            f"Write a Python function `{function.name}` that does this: {clause}.",
            f"Write a Python function `{function.name}`. {function.sentence}",
            f"Write a function in Python. {function.sentence} Call it `{function.name}`.",
            f"Implement `{function.signature}` in Python. {function.sentence}",
            f"{function.sentence} Write this as a Python function.",
            f"Please write `{function.signature}`: {clause}.",
        )
    )
    opening = rng.choice(("", "", f"Here is `{function.name}`:\n\n"))
    return request, opening + code


def _without_docstring(code: str) -> str:
    return re.sub(r'\n\s+[rR]?("""|\'\'\').*?\1', "", code, count=1, flags=re.DOTALL)

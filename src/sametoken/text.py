"""Text ↔ token ids, and chat messages → a prompt, as the files of a checkpoint say.

The chat template is a program by a stranger: it runs in Jinja's immutable sandbox, and it is not
even compiled before the first chat, so that plain generation works beside a broken one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import tokenizers
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sametoken.checkpoint import read_json, reason_of
from sametoken.config import Json, ModelConfig
from sametoken.errors import CheckpointError, RequestError, TemplateError

Message = Mapping[str, Any]

# Roles of tokenizer_config.json that a template may use as variables.
_ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    `size` is the highest id + 1, added tokens included. Ids from there up to the model's
    vocabulary size are padding and have no text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, template: ChatTemplate) -> None:
        self._backend, self._template = backend, template
        # Files may carry settings of training, which would cut or fill what is encoded.
        backend.no_truncation()
        backend.no_padding()
        self.size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def from_folder(cls, folder: Path, config: ModelConfig) -> Tokenizer:
        """Read `tokenizer.json`, and what lies beside it.

        Raises `CheckpointError` if it is missing, damaged, or has ids that `config` lacks.
        """
        path = folder / "tokenizer.json"
        if not path.exists():
            raise CheckpointError(f"{path} is missing; re-download the model.")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(
                f"{path} cannot be read ({reason_of(error)}); re-download the model."
            ) from error
        tokenizer = cls(backend, ChatTemplate(folder))
        if tokenizer.size > config.vocab_size:
            raise CheckpointError(
                f"{path} has ids up to {tokenizer.size - 1}, but config.json says vocab_size "
                f"{config.vocab_size}; the two files do not belong together."
            )
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Ids of a text. None are added; special tokens written out in the text are parsed."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt holds {text[error.start]!r} at character {error.start}, which is no "
                "text; give it as UTF-8."
            ) from error
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text

    def token_text(self, token: int) -> str:
        """What one token stands for, for display: special tokens too, alone and out of context."""
        text: str = self._backend.decode([token], skip_special_tokens=False)
        return text

    def is_special(self, token: int) -> bool:
        """Whether a token steers the model and is not shown."""
        return token in self._special

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        **template_vars: Any,
    ) -> str:
        """The prompt of a dialogue; `template_vars` reach the template, as `tools` does.

        Raises `TemplateError` if there is no template, or it cannot be read or rendered.
        """
        names = {"tools": None, "documents": None, **template_vars}
        return self._template.render(
            messages=messages, add_generation_prompt=add_generation_prompt, **names
        )

    def chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        **template_vars: Any,
    ) -> list[int]:
        """Ids of `render_chat`."""
        text = self.render_chat(
            messages, add_generation_prompt=add_generation_prompt, **template_vars
        )
        return self.encode(text)


class ChatTemplate:
    """The template of a folder: `chat_template.jinja`, or else a key of `tokenizer_config.json`."""

    def __init__(self, folder: Path) -> None:
        self._config_path = folder / "tokenizer_config.json"
        self._path = folder / "chat_template.jinja"
        if not self._path.exists():
            self._path = self._config_path

    def render(self, **names: Any) -> str:
        """The text the template makes of `names` and of the special tokens."""
        template, roles = self._compiled, self._roles
        try:
            return template.render({**roles, **names})
        except Exception as error:  # a template can raise anything an expression can
            raise TemplateError(
                f"{self._path} cannot render this chat ({reason_of(error)}); "
                "check the messages, or use generate."
            ) from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return _environment().from_string(self._source())
        except (jinja2.TemplateError, RecursionError) as error:
            raise self._unreadable(reason_of(error)) from error

    def _source(self) -> str:
        if self._path.suffix == ".jinja":
            try:
                return self._path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise self._unreadable(reason_of(error)) from error
        found = self._config.get("chat_template")
        if isinstance(found, list):
            found = next((t.get("template") for t in found if _is_default(t)), found)
        if found is None:
            raise TemplateError(
                f"{self._path.parent} has no chat template; use generate with a plain prompt."
            )
        if not isinstance(found, str):
            raise self._unreadable("chat_template is neither a text nor a list with a default")
        return found

    @cached_property
    def _config(self) -> Json:
        return read_json(self._config_path) if self._config_path.exists() else {}

    @cached_property
    def _roles(self) -> dict[str, str]:
        """Role → text of the special tokens; older files hold an object with the text inside."""
        values = {role: self._config.get(role) for role in _ROLES}
        texts = {r: v.get("content") if isinstance(v, dict) else v for r, v in values.items()}
        return {role: text for role, text in texts.items() if isinstance(text, str)}

    def _unreadable(self, reason: str) -> TemplateError:
        return TemplateError(
            f"{self._path} holds a chat template that cannot be read ({reason}); use generate, "
            "or repair the template."
        )


def _is_default(template: Any) -> bool:
    return isinstance(template, dict) and template.get("name") == "default"


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks, for training, what a model said; here only its content counts."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the base class

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as every engine sets it up for chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    # Jinja's own filter escapes for HTML, which a model would see.
    environment.filters["tojson"] = _to_json
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )

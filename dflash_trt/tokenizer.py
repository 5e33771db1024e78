"""The tokenizer of a checkpoint or bundle: text to token ids and back, and the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.parser
import jinja2.utils
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflash_trt.errors import CheckpointError, RequestError

_CHARACTERS = 16  # per token, of a text that is tokenized at once: about four times what usual texts have


class Tokenizer:
    """`tokenizer.json` of a directory, with its chat template. Raises CheckpointError naming the file at
    fault.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: not found; a checkpoint needs the tokenizer in this one file")
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path}: not a readable tokenizer: {error}") from error
        self.backend.no_truncation()
        self.backend.no_padding()

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Token ids of `text`. Special tokens written out in the text are taken as such.

        add_special_tokens: add those the tokenizer puts around a text (a first BOS, say). Leave them out for
        the text of a chat template, which has its own.
        max_tokens: a text that is far longer is refused by RequestError before all of it is tokenized; one that is
        a little longer is not.
        """
        try:
            if max_tokens is not None:
                self._check_length(text, max_tokens)
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:  # a lone surrogate, too
            raise RequestError(f"the prompt is {text[:60]!a}, expected a valid Unicode text") from error
        except MemoryError as error:
            raise RequestError(
                f"the prompt has {len(text)} characters: no memory is left for its tokens"
            ) from error

    def most_bytes(self, tokens: int) -> int:
        """Bytes of UTF-8 that no text of so many tokens exceeds. Spaces around special tokens do not count."""
        return tokens * self._bytes_per_token

    @cached_property
    def _bytes_per_token(self) -> int:
        longest = max((len(token.encode()) for token in self.backend.get_vocab()), default=1)
        # Normalization makes a text shorter: NFC by up to 3 times, NFKC by up to 4.
        return longest if self.backend.normalizer is None else 4 * longest

    def _check_length(self, text: str, most: int) -> None:
        size, limit = len(text.encode(errors="surrogatepass")), self.most_bytes(most)
        if size > limit:
            raise RequestError(f"the prompt has {size} bytes, more than {most} tokens have (at most {limit})")
        piece = _CHARACTERS * max(most, 256)
        if len(text) <= piece:
            return
        count = 0  # piece by piece, so that neither time nor memory is spent on all of a text that is refused
        for start in range(0, len(text), piece):
            count += len(self.backend.encode(text[start : start + piece], add_special_tokens=False).ids)
            if count > 2 * most:  # a cut through a word adds a few tokens, and never doubles them
                raise RequestError(f"the prompt has {size} bytes: its beginning alone has over {most} tokens")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are not UTF-8 become U+FFFD."""
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a chat, as Transformers renders it; encode it with add_special_tokens=False.

        messages: [{"role": ..., "content": ...}, ...].  tools: JSON schemas of functions.  kwargs: further
        variables of the template (`enable_thinking=False`). Raises RequestError if the messages are malformed
        or the template refuses them, CheckpointError if there is no usable template.
        """
        _check_messages(messages)
        template = self._templates.get("tool_use" if tools else "default") or self._templates.get("default")
        if template is None:
            names = f"only {sorted(self._templates)}" if self._templates else "none"
            raise CheckpointError(
                f"{self.directory}: no default chat template (chat_template.jinja, or chat_template in "
                f"tokenizer_config.json; found {names}); give the prompt as text instead"
            )
        variables = {**self._special_tokens, **kwargs, "tools": tools, "documents": documents}
        try:
            return template.render(variables, messages=messages, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template is a program: any error of Python's may come out of it
            raise RequestError(f"{template.filename}: the template refuses the messages: {error}") from error

    @cached_property
    def _config(self) -> dict[str, Any]:
        path = self.directory / "tokenizer_config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except ValueError as error:
            raise CheckpointError(f"{path}: not valid JSON: {error}") from error
        if not isinstance(config, dict):
            raise CheckpointError(f"{path}: is a {type(config).__name__}, expected an object")
        return config

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token and the like, as text."""
        found = {name: value for name, value in self._config.items() if name.endswith("_token")}
        texts = {name: v.get("content") if isinstance(v, dict) else v for name, v in found.items()}
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    @cached_property
    def _templates(self) -> dict[str, jinja2.Template]:
        path = self.directory / "chat_template.jinja"
        sources: Any
        if path.is_file():
            sources = path.read_text(encoding="utf-8")
        else:
            path = self.directory / "tokenizer_config.json"
            sources = self._config.get("chat_template") or {}
        try:
            if isinstance(sources, str):
                sources = {"default": sources}
            elif isinstance(sources, list):
                sources = {entry["name"]: entry["template"] for entry in sources}
            return {name: _compile(source, str(path)) for name, source in sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{path}: chat template, line {error.lineno}: {error.message}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path}: chat_template is neither a text nor a list of objects with name and template"
            ) from error


def _check_messages(messages: Any) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            f'messages is {messages!r}, expected a list like [{{"role": "user", "content": "..."}}]'
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{i}] is {message!r}, expected an object with role and content")
        if not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{i}].role is {message.get('role')!r}, expected a string")
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            raise RequestError(f"messages[{i}].content is {content!r}, expected a string")


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks the assistant's part, for training; here only its content matters."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """A checkpoint's template is a stranger's program: no names that reach into Python's own objects."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} begins with an underscore")
        super().__setitem__(name, value)


def _namespace(*args: Any, **kwargs: Any) -> _Namespace:
    namespace = _Namespace()
    for name, value in dict(*args, **kwargs).items():
        namespace[name] = value
    return namespace


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _compile(source: str, path: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _dict,
        "namespace": _namespace,
    }
    template = environment.from_string(source)
    template.filename = path
    return template

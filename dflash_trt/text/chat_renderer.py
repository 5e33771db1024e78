"""Render chat templates, in a separate process: templates are programs of strangers, and messages are their data.

sandbox_process.py imports this file by path. It imports nothing of this package.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment


def answer(
    source: str, variables: dict[str, Any], characters: int, limit: Callable[[], None]
) -> dict[str, str]:
    """`text`: a template with these variables. `fault`: what an error is about, "template" or "messages"."""
    limit()
    try:
        template = _compile(source)
    except jinja2.TemplateSyntaxError as error:
        return {"fault": "template", "error": f"line {error.lineno}: {error.message}"}
    except (ValueError, SyntaxError, RecursionError) as error:  # Python's compiler refuses Jinja's code
        return {"fault": "template", "error": _described(error)}
    parts, count = [], 0
    try:
        for part in template.generate(variables):
            count += len(part)
            if count > characters:
                return {"fault": "messages", "error": f"the text has more than {characters} characters"}
            parts.append(part)
    except MemoryError:
        raise
    except Exception as error:  # a template is a program and may raise any error
        return {"fault": "messages", "error": _described(error)}
    return {"text": "".join(parts)}


def _described(error: Exception) -> str:
    return str(error)[:1000] or type(error).__name__


@lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),  # not the type, with its attributes
        "namespace": _namespace,
    }
    return environment.from_string(source)


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks the assistant's part for training. Only its content matters here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """A namespace without access to Python's own objects."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} begins with an underscore")
        super().__setitem__(name, value)


def _namespace(*args: Any, **kwargs: Any) -> _Namespace:
    namespace = _Namespace()
    for name, value in dict(*args, **kwargs).items():
        namespace[name] = value
    return namespace


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON. Jinja's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )

"""Render chat templates in a separate process: templates are programs of strangers, and messages are their data.

chat_template.py starts this file by path. It imports nothing of this package. Each line of input is a JSON object:
`source` (the template), `variables`, `seconds` (of CPU), `memory` (bytes of address space), `characters` (of output).
Each answer is a length of 8 bytes, little endian, and a JSON object. The object has `text`, or `error` and a `fault`,
"template" or "messages". The kernel ends a process that exceeds its CPU time.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

try:
    import resource
except ImportError:  # Windows has none; there only the caller's clock limits
    resource = None  # type: ignore[assignment]


def main() -> None:
    """Answer requests from standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C in a terminal
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            _limit(request["seconds"], request["memory"])
            answer = _answer(request["source"], request["variables"], request["characters"])
        except MemoryError:
            answer = {
                "fault": "messages",
                "error": f"it takes more than {request['memory'] >> 20} MiB of memory",
            }
        text = json.dumps(answer).encode()
        sys.stdout.buffer.write(len(text).to_bytes(8, "little") + text)
        sys.stdout.buffer.flush()


def _limit(seconds: int, memory: int) -> None:
    if resource is None:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    until = math.ceil(time.process_time()) + seconds
    for kind, wanted in ((resource.RLIMIT_CPU, until), (resource.RLIMIT_AS, memory)):
        _, most = resource.getrlimit(kind)
        with suppress(ValueError, OSError):  # macOS refuses a limit of the address space
            resource.setrlimit(kind, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))


def _answer(source: str, variables: dict[str, Any], characters: int) -> dict[str, str]:
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


if __name__ == "__main__":
    main()

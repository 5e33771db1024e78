"""The chat templates of a checkpoint or bundle, rendered in a process with limits on time, memory and output."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Container, Mapping
from contextlib import suppress
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import IO, Any

from dflash_trt.errors import CheckpointError, DFlashError, RequestError
from dflash_trt.files.reading import read_object, read_text

# Published templates have up to 30 kB. They render a chat of a million characters in a tenth of a second.
_TEMPLATE_BYTES = 1 << 20
_CPU_SECONDS, _MEMORY, _CHARACTERS = 5, 1 << 30, 1 << 24
# Wall time, for a system without CPU limits, or one whose CPUs are busy.
_WALL_SECONDS = 60


class ChatTemplates:
    """The templates of a directory, by name: chat_template.jinja, or the templates in tokenizer_config.json.

    files: names of the files that may be read; None allows all.

    Raises CheckpointError, naming the file, if a file is malformed.
    """

    def __init__(self, directory: Path, files: Container[str] | None = None) -> None:
        def there(path: Path) -> bool:
            return path.exists() and (files is None or path.name in files)

        self.path, config_path = directory / "chat_template.jinja", directory / "tokenizer_config.json"
        sources: object
        config = read_object(config_path) if there(config_path) else {}
        if there(self.path):
            sources = read_text(self.path, _TEMPLATE_BYTES)
        else:
            self.path, sources = config_path, config.get("chat_template")
        self.sources = self._named(sources)
        tokens = {name: value for name, value in config.items() if name.endswith("_token")}
        texts = {name: v.get("content") if isinstance(v, dict) else v for name, v in tokens.items()}
        # bos_token, eos_token and similar, as text.
        self.special_tokens = {name: text for name, text in texts.items() if isinstance(text, str)}

    def _named(self, sources: object) -> dict[str, str]:
        if sources is None:
            return {}
        if isinstance(sources, str):
            return {"default": sources}
        entries = sources if isinstance(sources, list) else [None]
        named: dict[str, str] = {}
        for entry in entries:
            name, template = map(entry.get, ("name", "template")) if isinstance(entry, dict) else (None, None)
            if not isinstance(name, str) or not isinstance(template, str):
                raise CheckpointError(
                    f"{self.path}: chat_template must be a text, or a list of objects with name and template"
                )
            named[name] = template
        return named

    def render(self, name: str, variables: Mapping[str, Any]) -> str:
        """Render a template with `variables`, which are JSON values.

        Raises RequestError if the template refuses the variables or exceeds a limit. Raises CheckpointError if the
        template is malformed.
        """
        limits = {"seconds": _CPU_SECONDS, "memory": _MEMORY, "characters": _CHARACTERS}
        request = {"source": self.sources[name], "variables": {**self.special_tokens, **variables}, **limits}
        try:
            line = json.dumps(request).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the messages are not JSON values: {error}") from None
        try:
            answer = _RENDERER.ask(line)
        except EOFError:
            raise self._refusal(
                f"rendering takes more than {_CPU_SECONDS} s of CPU time, or all memory"
            ) from None
        except TimeoutError:
            raise self._refusal(f"rendering takes more than {_WALL_SECONDS} s") from None
        if answer.get("fault") == "template":
            raise CheckpointError(f"{self.path}: malformed chat template: {answer['error']}")
        if "error" in answer:
            raise self._refusal(answer["error"])
        return str(answer["text"])

    def _refusal(self, reason: str) -> RequestError:
        return RequestError(f"{self.path.name}: the template refuses the messages: {reason}")


class _Renderer:
    """The rendering process. It starts when first needed and renders one template at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        atexit.register(self._leave)

    def ask(self, line: bytes) -> dict[str, Any]:
        """Answer one line. Raises EOFError if the process ends first, and TimeoutError if it takes too long."""
        with self._lock:
            process, deadline = self._started(), time.monotonic() + _WALL_SECONDS
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                with suppress(OSError):  # it has ended, and so will the answer
                    process.stdin.write(line)  # the process reads the whole line first
                    process.stdin.flush()
                size = int.from_bytes(_read(process.stdout, 8, deadline), "little")
                answer: dict[str, Any] = json.loads(_read(process.stdout, size, deadline))
                return answer
            except BaseException:  # also an interrupt, as what is left in the pipe would be the next answer
                self._stop(process)
                raise

    def _started(self) -> subprocess.Popen[bytes]:
        # A forked process shares the pipes of its parent and must not use them.
        if self._process is None or self._process.poll() is not None or self._owner != os.getpid():
            script = Path(__file__).with_name("chat_renderer.py")
            # -P: this package's modules must not shadow those of the standard library.
            command = [sys.executable, "-P", str(script)]
            try:
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            except OSError as error:
                raise DFlashError(
                    f"{sys.executable}: cannot be started to render chats ({error.strerror})"
                ) from None
            self._owner = os.getpid()
        return self._process

    def _leave(self) -> None:
        if self._process is not None and self._owner == os.getpid():
            self._stop(self._process)

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        self._process = None
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # unsent data is lost
                if pipe is not None:
                    pipe.close()


def _read(pipe: IO[bytes], count: int, deadline: float) -> bytes:
    data = bytearray()
    with DefaultSelector() as selector:
        selector.register(pipe, EVENT_READ)
        while len(data) < count:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            part = os.read(pipe.fileno(), count - len(data))
            if not part:
                raise EOFError
            data += part
    return bytes(data)


_RENDERER = _Renderer()

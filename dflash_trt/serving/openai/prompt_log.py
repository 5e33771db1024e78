"""The chats of requests, kept in a file for `dflash-trt fit`, if the operator asks for that."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_trt.errors import DFlashError
from dflash_trt.prompts import MOST_BYTES

if TYPE_CHECKING:
    from dflash_trt.serving.openai.protocol import ChatRequest


class PromptLog:
    """A prompt file that chats of text without tools are added to, a JSON line each; only this user may read it.

    It ends where a prompt file may be no larger, or at the first error of the disk; answers go on. `say` tells that.

    Raises DFlashError if the file cannot be written.
    """

    def __init__(self, file: Path, say: Callable[[str], None]) -> None:
        try:
            self._descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise DFlashError(f"--log-prompts {file}: cannot be written ({error.strerror})") from None
        self._file, self._say, self._size = file, say, os.fstat(self._descriptor).st_size
        self._open = True

    def add(self, body: ChatRequest, request_id: str) -> None:
        messages = body.messages
        if body.tools or not all(
            isinstance(message, dict) and isinstance(message.get("content"), str) for message in messages
        ):
            return
        kept = [{"role": message.get("role"), "content": message["content"]} for message in messages]
        line: dict[str, Any] = {"id": request_id, "category": "served", "messages": kept}
        if body.chat_template_kwargs:
            line["chat_template_kwargs"] = body.chat_template_kwargs
        data = json.dumps(line).encode() + b"\n"
        if self._open and self._size + len(data) > MOST_BYTES:
            self._end(f"{self._file} is full with {self._size} bytes")
        if self._open:
            try:
                self._size += os.write(self._descriptor, data)
            except OSError as error:
                self._end(f"{self._file} cannot be written ({error.strerror})")

    def _end(self, why: str) -> None:
        self._open = False
        os.close(self._descriptor)
        self._say(f"{why}: no further prompts are kept")

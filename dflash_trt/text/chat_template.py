"""The chat templates of a checkpoint or bundle, rendered in a process with limits on time, memory and output."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from dflash_trt.errors import CheckpointError, RequestError
from dflash_trt.files.reading import read_object, read_text
from dflash_trt.text.sandbox import LimitError, Sandbox

# Published templates have up to 30 kB. They render a chat of a million characters in a tenth of a second.
_TEMPLATE_BYTES = 1 << 20
_CHARACTERS = 1 << 24
_SANDBOX = Sandbox("chat_renderer", processes=1, seconds=5, memory=1 << 30)


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

    def prepare(self) -> None:
        """Start the process that renders, where there is a template, so that the first chat need not wait for it."""
        if self.sources:
            _SANDBOX.start()

    def render(self, name: str, variables: Mapping[str, Any]) -> str:
        """Render a template with `variables`, which are JSON values.

        Raises RequestError if the template refuses the variables or exceeds a limit. Raises CheckpointError if the
        template is malformed.
        """
        task = {
            "source": self.sources[name],
            "variables": {**self.special_tokens, **variables},
            "characters": _CHARACTERS,
        }
        try:
            answer = _SANDBOX.run(task)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the messages are not JSON values: {error}") from None
        except LimitError as error:
            raise self._refusal(f"rendering takes {error}") from None
        if answer.get("fault") == "template":
            raise CheckpointError(f"{self.path}: malformed chat template: {answer['error']}")
        if "error" in answer:
            raise self._refusal(answer["error"])
        return str(answer["text"])

    def _refusal(self, reason: str) -> RequestError:
        return RequestError(f"{self.path.name}: the template refuses the messages: {reason}")

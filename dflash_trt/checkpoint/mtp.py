"""The drafter in a target's own checkpoint: layers of multi-token prediction, tensors `mtp.*`.

Qwen3-Next, Qwen3.5 and their successors Qwen3.6 and Qwen3.8 have one. A cache keeps it as a checkpoint of its own.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.quantization import QUANT_CONFIG, SECTIONS
from dflash_trt.checkpoint.tensors import SINGLE, Checkpoint, tensor_names
from dflash_trt.checkpoint.writer import Entry, converted, write_shard
from dflash_trt.errors import CheckpointError, show
from dflash_trt.files.disk import cache_folder, own_file, stamp, write_object

MTP = "mtp"
# Of tensors. The second is that of some files; the first is what the drafter's file has.
PREFIXES = ("mtp.", "model.mtp.")
# model_type of the text model -> the drafter's architecture, as vLLM and SGLang name it.
ARCHITECTURES = {
    "qwen3_next": "Qwen3NextMTP",
    "qwen3_5_text": "Qwen3_5MTP",
    "qwen3_5_moe_text": "Qwen3_5MoeMTP",
}
_VERSION = 1  # increment when the same checkpoint gives another one
_PIECE = 1 << 24


def has_own_drafter(target: Path) -> bool:
    """Whether a target's checkpoint has layers of multi-token prediction that are read here."""
    return _architecture(_text(target)) is not None and _has_layers(tensor_names(target))


def own_drafter(target: Path, *, weights: bool = True) -> Path:
    """The directory of the drafter in a target's checkpoint: config.json and, if they are asked for, its `weights`.

    Raises CheckpointError if the checkpoint has no such drafter.
    """
    text, whole = _text(target), Fields.read(target / "config.json")
    if (architecture := _architecture(text)) is None:
        raise CheckpointError(
            f"{text.path}: {text.prefix}model_type is {show(text.get('model_type'))}, but --drafter {MTP} is for the "
            f"layers of multi-token prediction of {', '.join(ARCHITECTURES)}; give another drafter, or --no-drafter"
        )
    for key, known in (("mtp_num_hidden_layers", 1), ("mtp_use_dedicated_embeddings", False)):
        if text.get(key) not in (None, known):
            raise text.wrong(key, f"but {show(known)} is supported alone; give another drafter")
    names = tensor_names(target)
    if names and not _has_layers(names):
        raise CheckpointError(
            f"{target}: has no tensor mtp.fc.weight, so no drafter of its own: some quantizations leave it out; take "
            "a checkpoint that has it, or give another drafter than mtp"
        )
    checkpoint = Checkpoint(target) if names or weights else None
    tensors = {
        _short(name): info
        for name, info in (checkpoint.tensors.items() if checkpoint else ())
        if name.startswith(PREFIXES)
    }
    # Files of Model Optimizer have these layers in floating point without saying so.
    quantized = any(
        checkpoint and checkpoint.codes(info.name.rpartition(".")[0]) for info in tensors.values()
    )
    fields = {key: value for key, value in text.values.items() if key not in SECTIONS}
    if quantized:
        fields |= {key: value for key, value in whole.values.items() if key in SECTIONS}
    kind = {"architectures": [architecture], "model_type": f"{text.get('model_type')}_mtp"}
    rules = target / QUANT_CONFIG
    settings: dict[str, Any] = {
        "config.json": {**fields, **kind},
        **({QUANT_CONFIG: dict(Fields.read(rules).values)} if quantized and rules.is_file() else {}),
    }

    def write(work: Path) -> dict[str, Any]:
        for name, values in settings.items():
            write_object(work / name, values)
        if checkpoint is not None and weights:
            entries = [
                Entry(name, info.dtype, info.shape, _pieces(name, checkpoint.array(info.name)))
                for name, info in tensors.items()
            ]
            write_shard(work / SINGLE, entries)
        return {"source": str(target)}

    files = {own_file(target, info.file) for info in tensors.values()}
    identity = [
        _VERSION,
        weights,
        settings,
        sorted((str(file), *stamp(file.stat())) for file in files),
        sorted((name, info.file.name, info.offset) for name, info in tensors.items()),
    ]
    key = sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return converted(cache_folder() / MTP / key[:16] / target.resolve().name, key, write)


def _text(target: Path) -> Fields:
    fields = Fields.read(target / "config.json")
    return fields.section("text_config") or fields


def _architecture(text: Fields) -> str | None:
    kind = text.get("model_type")
    return ARCHITECTURES.get(kind) if isinstance(kind, str) else None


def _short(name: str) -> str:
    return name.removeprefix("model.")


def _has_layers(names: Collection[str]) -> bool:
    return any(_short(name.removeprefix("language_model.")) == "mtp.fc.weight" for name in names)


def _pieces(name: str, array: NDArray[Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    numbers = array.reshape(-1)
    for first in range(0, numbers.size, _PIECE):
        yield name, numbers[first : first + _PIECE]

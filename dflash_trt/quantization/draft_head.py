"""The rows of a target's LM head that a drafter with fewer tokens needs, as a checkpoint of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_trt.bundle.workspace import workspace
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.checkpoint.writer import Entry, write_shard
from dflash_trt.files.reading import read_object
from dflash_trt.quantization.convert import STEP_BYTES, head_weight, write_json

_TABLE = "d2t"


def draft_head(target: Checkpoint, tokens: Sequence[int], out: Path) -> Path:
    """Write `out`: the head's rows of `tokens`, as stored, and `d2t`, each token's id minus its row. Returns `out`.

    Raises BuildError if the target has no LM head.
    """
    if (out / "config.json").is_file():
        return out
    weight = head_weight(target)
    ids = np.asarray(tokens, np.int64)

    def rows() -> Iterator[tuple[str, NDArray[Any]]]:
        head = target.array(weight.name)
        step = max(1, STEP_BYTES // (head.itemsize * head.shape[1]))
        for at in range(0, len(ids), step):
            yield "lm_head.weight", head[ids[at : at + step]]

    with workspace(out) as place:
        place.empty()
        entries = [
            Entry("lm_head.weight", weight.dtype, (len(ids), weight.shape[1]), rows()),
            Entry(_TABLE, "I64", (len(ids),), [(_TABLE, ids - np.arange(len(ids)))]),
        ]
        write_shard(place.path / "model.safetensors", entries)
        config = read_object(target.directory / "config.json") | {"tie_word_embeddings": False}
        write_json(place.path / "config.json", config)
        place.publish()
    return out

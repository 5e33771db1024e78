"""The common part of a build for our own engines: both models as graphs, and the files that they refer to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import onnx_ir as ir

from dflash_trt.bundle.cache_kinds import CacheKind, most_written, rows_by_window
from dflash_trt.bundle.manifest import cache_rows, describe_file, graph_metadata
from dflash_trt.bundle.workspace import Progress
from dflash_trt.checkpoint.pair import CheckpointPair, tokenizer_files
from dflash_trt.checkpoint.schema import DecoderConfig, LayerAttention
from dflash_trt.engines.base import BuildJob, BuildSettings
from dflash_trt.files.disk import own_file
from dflash_trt.graph.dialect import Dialect
from dflash_trt.models.decoder import cache_row_bytes
from dflash_trt.models.drafters import build_drafter
from dflash_trt.models.drafters.kind import DrafterParts
from dflash_trt.models.passes import Capacity
from dflash_trt.models.target import build_target
from dflash_trt.version import __version__

_HEAD_FOLDER = "weights/head"  # for the drafter's own copy of the LM head


@dataclass(kw_only=True)
class GraphJob(BuildJob):
    """Writes `target.onnx` and, if there is a drafter, `drafter.onnx`."""

    models: Mapping[str, ir.Model]

    @classmethod
    def of(
        cls,
        pair: CheckpointPair,
        settings: BuildSettings,
        dialects: Mapping[str, Dialect],
        progress: Progress,
        *,
        chunk: int,
        unit: int = 1,
        fixed: bool = True,
        link: bool,
        **more: Any,
    ) -> Self:
        """The job of a pair. Weights are not read; their shapes and dtypes are checked against the configurations.

        chunk: the most tokens of a prompt in one pass. unit: of the cache rows of a sequence. fixed: whether the graphs
        have their number, and not an axis that is fixed at run time.
        """
        capacity = cache_rows(settings.max_seq_len, settings.block_size)
        rows = {
            role: {
                window: -(-count // unit) * unit
                for window, count in rows_by_window(
                    {None, *(layer.window for layer in side.config.attention_layers)},
                    dialects[role].window_stride(side.config.window_head_dim),
                    capacity,
                    most_written(role, chunk, settings.block_size),
                ).items()
            }
            for role, side in pair.sides.items()
        }
        models = _export(
            pair, dialects, rows if fixed else dict.fromkeys(rows, "C"), settings.tree_width, progress
        )
        return cls(
            manifest=_fields(pair, dialects, models, rows),
            files=_files(pair),
            # Of the graphs without their weights, which are external data with their own digests.
            digests={
                name: hashlib.sha256(ir.to_proto(model).SerializeToString(deterministic=True)).hexdigest()
                for name, model in models.items()
            },
            link=link,
            models=models,
            **more,
        )

    def write(
        self, work: Path, manifest: dict[str, Any], files: dict[str, dict[str, Any]], progress: Progress
    ) -> dict[str, dict[str, Any]]:
        for i, (name, model) in enumerate(self.models.items()):
            progress("write graphs", i, len(self.models))
            model.metadata_props.update(graph_metadata(manifest))
            ir.save(model, work / f"{name}.onnx")
            files[f"{name}.onnx"] = describe_file(work / f"{name}.onnx")
        progress("write graphs", len(self.models), len(self.models))
        return files


def _export(
    pair: CheckpointPair,
    dialects: Mapping[str, Dialect],
    capacities: Mapping[str, Capacity],
    width: int,
    progress: Progress,
) -> dict[str, ir.Model]:
    """The graphs.

    capacities: cache rows per sequence, by role, or the name of an axis that is fixed at run time.
    width: the candidates of the drafter for each place. With more than one, the target takes trees.
    """
    progress("export target", 0, 1)
    target = build_target(
        pair.target.config,
        pair.target.checkpoint,
        pair.draft_config.target_layer_ids if pair.draft_config else (),
        dialects["target"],
        folder=pair.target.folder,
        capacity=capacities["target"],
        trees=width > 1,
    )
    progress("export target", 1, 1)
    if pair.drafter is None:
        return {"target": target}
    progress("export drafter", 0, 1)
    parts = DrafterParts(
        pair.drafter.config,
        pair.drafter.checkpoint,
        pair.target.config,
        pair.target.checkpoint,
        dialects["drafter"],
        folder=pair.drafter.folder,
        target_folder=pair.target.folder,
        capacity=capacities["drafter"],
        features_dtype=dialects["target"].dtype,
        width=width,
        head=None if pair.head is None else (pair.head, _HEAD_FOLDER),
    )
    drafter = build_drafter(parts)
    progress("export drafter", 1, 1)
    return {"target": target, "drafter": drafter}


def _fields(
    pair: CheckpointPair,
    dialects: Mapping[str, Dialect],
    models: Mapping[str, ir.Model],
    rows: Mapping[str, Mapping[int | None, int]],
) -> dict[str, Any]:
    """The manifest's fields of a bundle with graphs."""
    tokens = len(pair.draft_tokens) if pair.draft_tokens else pair.target.config.vocab_size
    return {
        "dialect": dialects["target"].name,
        "precision": {role: dialect.dtype.name.lower() for role, dialect in dialects.items()},
        "quantization": {
            **{role: side.checkpoint.quantization.name for role, side in pair.sides.items()},
            "head": pair.head and pair.head.quantization.name,
            "cache": pair.target.checkpoint.quantization.cache,
        },
        **({"draft_vocab_size": tokens} if pair.drafter else {}),
        "caches": {
            role: [
                asdict(kind) for kind in _cache_kinds(side.config, dialects[role], models[role], rows[role])
            ]
            for role, side in pair.sides.items()
        },
        "versions": {"dflash-trt": __version__, "onnx-ir": version("onnx-ir")},
    }


def _cache_kinds(
    config: DecoderConfig, dialect: Dialect, model: ir.Model, rows: Mapping[int | None, int]
) -> list[CacheKind]:
    """The kinds of caches of a model's graph."""
    by_layer = cache_row_bytes(model)
    layers: dict[int | None, list[int]] = {}
    for i, layer in enumerate(config.layers):
        if isinstance(layer, LayerAttention):
            layers.setdefault(layer.window, []).append(i)
    return [
        CacheKind(
            window=window,
            stride=1 if window is None else dialect.window_stride(config.window_head_dim),
            rows=rows[window],
            row_bytes=sum(by_layer[i] for i in indices),
            layers=tuple(indices),
        )
        for window, indices in layers.items()
    ]


def _files(pair: CheckpointPair) -> dict[str, Path]:
    """Weights, tokenizer and configs: name in the bundle -> current path."""
    files: dict[str, Path] = {}
    for role, side in pair.sides.items():
        files |= {f"{side.folder}/{file.name}": file for file in side.checkpoint.files}
        files[f"configs/{role}.json"] = own_file(side.source.directory, side.config.path)
    files |= {f"{_HEAD_FOLDER}/{file.name}": file for file in (pair.head.files if pair.head else ())}
    return files | tokenizer_files(pair.target)

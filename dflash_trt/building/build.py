"""`dflash-trt build`: a pair of checkpoints in, an engine bundle out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import onnx_ir as ir

from dflash_trt.building.sources import Source, resolve_pair
from dflash_trt.bundle import manifest as bundle
from dflash_trt.bundle.contents import bring, describe_file, key_of, read_inputs
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.bundle.workspace import Progress, Workspace, check_out, silent, workspace
from dflash_trt.checkpoint.catalogue import known_configs
from dflash_trt.checkpoint.compatibility import check_pair, check_tokenizers
from dflash_trt.checkpoint.linears import number_formats
from dflash_trt.checkpoint.roles import parameters_of, role_of
from dflash_trt.checkpoint.schema import DrafterConfig, TargetConfig
from dflash_trt.checkpoint.tensors import Checkpoint, Outline
from dflash_trt.engines.tensorrt.flavour import FLAVOURS
from dflash_trt.engines.tensorrt.plans import FOLDER as PLANS
from dflash_trt.engines.tensorrt.plans import Options, Plans
from dflash_trt.errors import BuildError
from dflash_trt.files.disk import own_file
from dflash_trt.formats.precision import Precision
from dflash_trt.graph.dialect import Dialect
from dflash_trt.graph.onnxruntime import OnnxRuntime
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.decoder import cache_bytes_per_token
from dflash_trt.models.drafters import build_drafter
from dflash_trt.models.target import build_target
from dflash_trt.quantization.for_build import in_precision

if TYPE_CHECKING:
    from dflash_trt.trtllm.configuration import Deployment

ENGINES = ("onnxruntime", *FLAVOURS, "tensorrt-llm")
# Without --max-seq-len: what both models were made for, but no more than this (cache memory grows with it).
DEFAULT_MAX_SEQ_LEN = 8192
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)

HEAD_FOLDER = "weights/head"  # of the drafter's own copy of the LM head
# "copy": files of the bundle's own.  "link": hard links to the checkpoints' files.  "none": graphs only.
Weights = Literal["copy", "link", "none"]


@dataclass(frozen=True)
class Side:
    """One checkpoint of the pair, as found."""

    source: Source
    config: TargetConfig | DrafterConfig
    checkpoint: Checkpoint | Outline
    folder: str  # of its weights, inside the bundle

    def describe(self) -> dict[str, Any]:
        c = self.config
        weights: dict[str, dict[str, int]] = {}
        for tensor in self.checkpoint.tensors.values():
            by_dtype = weights.setdefault(role_of(tensor.name), {})
            by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.nbytes
        return {
            "name": self.source.repo or self.source.directory.resolve().name,
            "revision": self.source.revision,
            "config_sha256": bundle.digest(c.path),
            "architecture": c.architecture,
            "num_hidden_layers": c.num_hidden_layers,
            "parameters": sum(parameters_of(t) for t in self.checkpoint.tensors.values()),
            "weights": self.folder,
            "weight_bytes": {role: dict(sorted(weights[role].items())) for role in sorted(weights)},
        }


def build(
    target: str,
    drafter: str | None,
    out: str | Path,
    *,
    max_seq_len: int | None = None,
    block_size: int | None = None,
    engine: str = "onnxruntime",
    weights: Weights = "copy",
    precision: Precision | None = None,
    tensorrt: Options | None = None,
    deployment: Deployment | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Bundle:
    """Build a bundle in `out`.

    `target` and `drafter` are names of known pairs, hub repositories or directories; a known pair brings its drafter.
    `max_seq_len` is in tokens, prompt and output together. `block_size` may be smaller than the drafter's.
    `weights`: "copy" gives the bundle files of its own (which share their blocks with the checkpoints' where the file
    system can), "link" makes hard links: nothing is copied, and who writes to the checkpoint's files breaks the bundle.
    With "none" the full-size graphs are made from the configurations alone (those of known pairs come with the
    package): nothing is fetched, and the bundle can be inspected but not run.
    `precision` is what the engine computes in, float32 on ONNX Runtime, else BF16 unless it says otherwise; or what
    the weights of linear layers are quantized to on the way, where the checkpoint's are not yet.
    `tensorrt` is for the engines "tensorrt" and "tensorrt-rtx": GPUs to build for, largest batch and prompt chunk.
    `deployment` is for `engine="tensorrt-llm"` only, which needs one: GPUs, parallelism, version.
    Work happens in a sibling directory that is renamed at the end, so an interrupted build never looks finished;
    the next one continues with what is whole. A bundle of the same inputs that is already there is kept as it is.
    `force` replaces one of other inputs, or a damaged one; nothing else is ever replaced.

    Raises:
        CheckpointError, PairError: the checkpoints cannot be read or do not fit.
        BuildError: an argument is impossible, or `out` holds something else.
    """
    progress = progress or silent
    out = Path(out)
    if engine not in ENGINES:
        raise BuildError(f"--engine is {engine!r}, this version builds for: {', '.join(ENGINES)}")
    if weights not in get_args(Weights):
        raise BuildError(f"--weights is {weights!r}, expected one of: {', '.join(get_args(Weights))}")
    if tensorrt is not None and engine not in FLAVOURS:
        raise BuildError(
            f"--engine is {engine}, but --compute-capability, --max-batch-size and --prefill-chunk are for: "
            f"{', '.join(FLAVOURS)}"
        )
    check_out(out)
    if (engine == "tensorrt-llm") != (deployment is not None):
        state = "is missing" if deployment is None else "is of no use"
        raise BuildError(f"--engine is {engine}, and --gpu {state}: it is for tensorrt-llm, which needs it")
    if deployment is not None:
        if precision not in (None, Precision()):
            raise BuildError(
                f"--precision is of no use to --engine {engine}, which runs checkpoints as they are; make one in "
                "fewer bits with: dflash-trt quantize"
            )
        from dflash_trt.trtllm.build import build_deployment

        return build_deployment(
            find_sources(target, drafter, weights),
            out,
            deployment,
            max_seq_len=max_seq_len,
            block_size=block_size,
            weights=weights,
            force=force,
            progress=progress,
        )

    progress("read checkpoints", 0, 1)
    sources = find_sources(target, drafter, weights)
    target_config = read_target_config(sources[0].directory)
    drafter_config = read_drafter_config(sources[1].directory)
    check_pair(target_config, drafter_config)
    if weights != "none":
        check_tokenizers(sources[0].directory, sources[1].directory, drafter_config.mask_token_id)
    open_checkpoint = Outline if weights == "none" else Checkpoint
    sides = (
        Side(sources[0], target_config, open_checkpoint(sources[0].directory), "weights/target"),
        Side(sources[1], drafter_config, open_checkpoint(sources[1].directory), "weights/drafter"),
    )
    size, length = (
        choose_block_size(block_size, drafter_config),
        choose_max_seq_len(max_seq_len, target_config, drafter_config),
    )
    progress("read checkpoints", 1, 1)

    precision = precision or Precision()
    _check_options(precision, engine, weights)
    with workspace(out, "bundle") as place:
        sides, head = _quantized(sides, precision, place, progress, int4_by_row=engine in FLAVOURS)
        capacity = bundle.cache_rows(length, size)
        plans: Plans | None = None
        dialects: Mapping[str, Dialect] = {"target": OnnxRuntime(), "drafter": OnnxRuntime()}
        if engine in FLAVOURS:
            moe = target_config.moe
            plans = Plans(
                engine,
                tensorrt or Options(),
                precision,
                block_size=size,
                capacity=capacity,
                formats=_formats(sides, head),
                expert_formats={"mxfp4"} if moe is not None and moe.quantization else (),
            )
            dialects = plans.dialects
        models = _export(
            sides, target_config, drafter_config, dialects, head, capacity if plans else "C", progress
        )
        manifest: dict[str, Any] = {
            "format_version": bundle.FORMAT_VERSION,
            "key": "",
            "engine": engine,
            "dialect": dialects["target"].name,
            "precision": {role: dialect.dtype.name.lower() for role, dialect in dialects.items()},
            "quantization": {
                "target": sides[0].checkpoint.quantization.name,
                "drafter": sides[1].checkpoint.quantization.name,
                "head": head and head.quantization.name,
            },
            "weights": weights,
            "target": sides[0].describe(),
            "drafter": sides[1].describe(),
            "block_size": size,
            "mask_token_id": drafter_config.mask_token_id,
            "target_layer_ids": list(drafter_config.target_layer_ids),
            "hidden_size": target_config.hidden_size,
            "vocab_size": target_config.vocab_size,
            "max_seq_len": length,
            "cache_bytes_per_token": {name: cache_bytes_per_token(model) for name, model in models.items()},
            "eos_token_ids": list(target_config.eos_token_ids),
            "versions": {name: version(name) for name in ("dflash-trt", "onnx-ir")},
        }
        if plans is not None:
            manifest["tensorrt"] = plans.describe()
        inputs = read_inputs(_wanted(sides, head), place, progress)
        for side in sides:
            if isinstance(side.checkpoint, Checkpoint):
                names = [file.name for file in side.checkpoint.files]
                side.checkpoint.check_digests(
                    {name: inputs[f"{side.folder}/{name}"].sha256 for name in names}
                )
        manifest["key"] = key_of(manifest, inputs, {name: _digest(model) for name, model in models.items()})
        existing = place.existing(manifest["key"], force=force)
        if existing is not None:
            place.done = True
            return existing
        # Plans have the weights in them: for their sake none is copied.
        link = weights == "link" or plans is not None
        files = bring(inputs, place, progress, link=link, keep=PLANS if plans else "")
        for i, (name, model) in enumerate(models.items()):
            progress("write graphs", i, len(models))
            model.metadata_props.update(bundle.graph_metadata(manifest))
            ir.save(model, place.path / f"{name}.onnx")
            files[f"{name}.onnx"] = describe_file(place.path / f"{name}.onnx")
        progress("write graphs", len(models), len(models))
        if plans is not None:
            manifest["tensorrt"]["plans"], built = plans.build(place.path, models, manifest["key"], progress)
            files = {n: d for n, d in files.items() if not n.startswith("weights/")} | built
        manifest["files"] = {name: files[name] for name in sorted(files)}
        bundle.write_manifest(place.path, manifest)
        place.publish()
    return Bundle.open(out)


def _check_options(precision: Precision, engine: str, weights: Weights) -> None:
    if engine in FLAVOURS:
        if weights != "copy":
            raise BuildError(
                f"--weights is {weights}, but --engine {engine} builds plans, which hold the weights"
            )
        return
    for role in ("target", "drafter"):
        if (compute := precision.compute(role, "fp32")) != "fp32":
            raise BuildError(f"--precision is {role}={compute}, but --engine {engine} computes in fp32")


def own_files(directory: Path, names: Sequence[str]) -> dict[str, Path]:
    """Those of `names` that a checkpoint has, and where they lie."""
    return {name: own_file(directory, directory / name) for name in names if (directory / name).is_file()}


def find_sources(target: str, drafter: str | None, weights: Weights) -> tuple[Source, Source]:
    if weights == "none" and drafter is None and not Path(target).is_dir():
        directories = known_configs(target)
        return Source(directories[0], target), Source(directories[1], target)
    return resolve_pair(target, drafter)


def _export(
    sides: tuple[Side, Side],
    target: TargetConfig,
    drafter: DrafterConfig,
    dialects: Mapping[str, Dialect],
    head: Checkpoint | Outline | None,
    capacity: int | str,
    progress: Progress,
) -> dict[str, ir.Model]:
    """Both graphs. Nothing of the weights is read; shapes and dtypes are checked against the configurations."""
    progress("export target", 0, 1)
    first = build_target(
        target,
        sides[0].checkpoint,
        drafter.target_layer_ids,
        dialects["target"],
        folder=sides[0].folder,
        capacity=capacity,
    )
    progress("export target", 1, 1)
    progress("export drafter", 0, 1)
    second = build_drafter(
        drafter,
        sides[1].checkpoint,
        target,
        sides[0].checkpoint,
        dialects["drafter"],
        folder=sides[1].folder,
        target_folder=sides[0].folder,
        capacity=capacity,
        features_dtype=dialects["target"].dtype,
        head=None if head is None else (head, HEAD_FOLDER),
    )
    progress("export drafter", 1, 1)
    return {"target": first, "drafter": second}


def choose_block_size(asked: int | None, drafter: DrafterConfig) -> int:
    if asked is None:
        return drafter.block_size
    if not 2 <= asked <= drafter.block_size:
        raise BuildError(
            f"--block-size is {asked}, expected 2..{drafter.block_size}: the drafter was trained for blocks of "
            f"{drafter.block_size} ({drafter.path})"
        )
    return asked


def choose_max_seq_len(asked: int | None, target: TargetConfig, drafter: DrafterConfig) -> int:
    limit = min(target.max_position_embeddings, drafter.max_position_embeddings)
    if asked is None:
        return min(limit, DEFAULT_MAX_SEQ_LEN)
    if not 2 <= asked <= limit:
        raise BuildError(
            f"--max-seq-len is {asked}, expected 2..{limit}: max_position_embeddings is "
            f"{target.max_position_embeddings} in the target and {drafter.max_position_embeddings} in the drafter"
        )
    return asked


def _quantized(
    sides: tuple[Side, Side], precision: Precision, place: Workspace, progress: Progress, *, int4_by_row: bool
) -> tuple[tuple[Side, Side], Checkpoint | Outline | None]:
    """The sides as `precision` asks for them, and the head that it gives the drafter."""
    target, drafter, head = in_precision(
        sides[0].checkpoint,
        sides[1].checkpoint,
        precision,
        place.scratch,
        progress,
        int4_by_row=int4_by_row,
    )
    return (replace(sides[0], checkpoint=target), replace(sides[1], checkpoint=drafter)), head


def _formats(sides: tuple[Side, Side], head: Checkpoint | Outline | None) -> set[str]:
    checkpoints = [side.checkpoint for side in sides] + ([] if head is None else [head])
    return {scheme for checkpoint in checkpoints for scheme in number_formats(checkpoint)}


def _digest(model: ir.Model) -> str:
    """Of a graph without its weights, which are external data and have digests of their own."""
    return hashlib.sha256(ir.to_proto(model).SerializeToString(deterministic=True)).hexdigest()


def _wanted(sides: tuple[Side, Side], head: Checkpoint | Outline | None) -> dict[str, Path]:
    """Weights, tokenizer and configs: their names in the bundle, and where they are now."""
    wanted: dict[str, Path] = {}
    for side, role in zip(sides, ("target", "drafter"), strict=True):
        wanted |= {f"{side.folder}/{file.name}": file for file in side.checkpoint.files}
        wanted[f"configs/{role}.json"] = own_file(side.source.directory, side.config.path)
    wanted |= {f"{HEAD_FOLDER}/{file.name}": file for file in (head.files if head is not None else ())}
    directory = sides[0].source.directory
    wanted |= own_files(directory, TOKENIZER_FILES)
    if "tokenizer.json" not in wanted and isinstance(sides[0].checkpoint, Checkpoint):
        raise BuildError(
            f"{directory}: no tokenizer.json; save the tokenizer in the fast (tokenizers) format there"
        )
    return wanted

"""`dflash-trt build`: a pair of checkpoints in, an engine bundle out."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import onnx_ir as ir

from dflash_trt import bundle
from dflash_trt.bundle import Bundle
from dflash_trt.checkpoint.config import DrafterConfig, TargetConfig, read_drafter_config, read_target_config
from dflash_trt.checkpoint.pair import check_pair, check_tokenizers
from dflash_trt.checkpoint.pairs import Source, known_configs, resolve_pair
from dflash_trt.checkpoint.roles import parameters_of, role_of
from dflash_trt.checkpoint.tensors import Checkpoint, Outline
from dflash_trt.errors import BuildError, BundleError
from dflash_trt.graph.functions import OnnxRuntime
from dflash_trt.models.decoder import cache_bytes_per_token
from dflash_trt.models.drafter import build_drafter
from dflash_trt.models.target import build_target

ENGINES = ("onnxruntime",)
# Without --max-seq-len: what both models were made for, but no more than this (cache memory grows with it).
DEFAULT_MAX_SEQ_LEN = 8192
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)

# "checkpoint": the checkpoints' own files.  "none": graphs only.
Weights = Literal["checkpoint", "none"]

# Called as progress(step, done, total); units are files or bytes, whatever the step counts.
Progress = Callable[[str, int, int], None]


def _silent(step: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class _Side:
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
    weights: Weights = "checkpoint",
    force: bool = False,
    progress: Progress | None = None,
) -> Bundle:
    """Build a bundle in `out`.

    `target` and `drafter` are names of known pairs, hub repositories or directories; a known pair brings its drafter.
    `max_seq_len` is in tokens, prompt and output together. `block_size` may be smaller than the drafter's.
    With `weights="none"` the full-size graphs are made from the configurations alone (those of known pairs come with
    the package): nothing is fetched, and the bundle can be inspected but not run.
    Work happens in a sibling directory that is renamed at the end, so an interrupted build never looks finished;
    the next one continues with what is whole. A bundle of the same inputs that is already there is kept as it is.

    Raises:
        CheckpointError, PairError: the checkpoints cannot be read or do not fit.
        BuildError: an argument is impossible, or `out` holds something else (`force` replaces a bundle).
    """
    progress = progress or _silent
    out = Path(out)
    if engine not in ENGINES:
        raise BuildError(f"--engine is {engine!r}, this version builds for: {', '.join(ENGINES)}")
    if weights not in get_args(Weights):
        raise BuildError(f"--weights is {weights!r}, expected one of: {', '.join(get_args(Weights))}")
    _check_out(out)

    progress("read checkpoints", 0, 1)
    sources = _sources(target, drafter, weights)
    target_config = read_target_config(sources[0].directory)
    drafter_config = read_drafter_config(sources[1].directory)
    check_pair(target_config, drafter_config)
    if weights != "none":
        check_tokenizers(sources[0].directory, sources[1].directory)
    open_checkpoint = Outline if weights == "none" else Checkpoint
    sides = (
        _Side(sources[0], target_config, open_checkpoint(sources[0].directory), "weights/target"),
        _Side(sources[1], drafter_config, open_checkpoint(sources[1].directory), "weights/drafter"),
    )
    size, length = (
        _block_size(block_size, drafter_config),
        _max_seq_len(max_seq_len, target_config, drafter_config),
    )
    progress("read checkpoints", 1, 1)

    models = _export(sides, target_config, drafter_config, progress)
    manifest: dict[str, Any] = {
        "format_version": bundle.FORMAT_VERSION,
        "key": "",
        "engine": engine,
        "dialect": engine,
        "precision": {"target": "float32", "drafter": "float32"},
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

    with _workspace(out) as work:
        files = {name: work / name for name in _gather(sides, work, progress)}
        digests = _digests(files, work, progress)
        inputs = {name: digests[name]["sha256"] for name in sorted(files)}
        manifest["key"] = hashlib.sha256(json.dumps([manifest, inputs], sort_keys=True).encode()).hexdigest()
        existing = _existing(out)
        if existing is not None and existing.manifest["key"] == manifest["key"]:
            shutil.rmtree(work)
            return existing
        if existing is not None and not force:
            raise BuildError(
                f"{out}: holds a bundle of other inputs or options (key {existing.manifest['key'][:12]}); "
                "choose another --out, or replace it with --force"
            )
        for i, (name, model) in enumerate(models.items()):
            progress("write graphs", i, len(models))
            model.metadata_props.update(bundle.graph_metadata(manifest))
            ir.save(model, work / f"{name}.onnx")
            digests[f"{name}.onnx"] = _describe_file(work / f"{name}.onnx")
        progress("write graphs", len(models), len(models))
        manifest["files"] = {name: digests[name] for name in sorted(digests)}
        _finish(work, out, manifest)
    return Bundle.open(out)


def _sources(target: str, drafter: str | None, weights: Weights) -> tuple[Source, Source]:
    if weights == "none" and drafter is None and not Path(target).is_dir():
        directories = known_configs(target)
        return Source(directories[0], target), Source(directories[1], target)
    return resolve_pair(target, drafter)


def _export(
    sides: tuple[_Side, _Side], target: TargetConfig, drafter: DrafterConfig, progress: Progress
) -> dict[str, ir.Model]:
    """Both graphs. Nothing of the weights is read; shapes and dtypes are checked against the configurations."""
    progress("export target", 0, 1)
    first = build_target(
        target, sides[0].checkpoint, drafter.target_layer_ids, OnnxRuntime(), folder=sides[0].folder
    )
    progress("export target", 1, 1)
    progress("export drafter", 0, 1)
    second = build_drafter(
        drafter,
        sides[1].checkpoint,
        target,
        sides[0].checkpoint,
        OnnxRuntime(),
        folder=sides[1].folder,
        target_folder=sides[0].folder,
    )
    progress("export drafter", 1, 1)
    return {"target": first, "drafter": second}


def _block_size(asked: int | None, drafter: DrafterConfig) -> int:
    if asked is None:
        return drafter.block_size
    if not 2 <= asked <= drafter.block_size:
        raise BuildError(
            f"--block-size is {asked}, expected 2..{drafter.block_size}: the drafter was trained for blocks of "
            f"{drafter.block_size} ({drafter.path})"
        )
    return asked


def _max_seq_len(asked: int | None, target: TargetConfig, drafter: DrafterConfig) -> int:
    limit = min(target.max_position_embeddings, drafter.max_position_embeddings)
    if asked is None:
        return min(limit, DEFAULT_MAX_SEQ_LEN)
    if not 2 <= asked <= limit:
        raise BuildError(
            f"--max-seq-len is {asked}, expected 2..{limit}: max_position_embeddings is "
            f"{target.max_position_embeddings} in the target and {drafter.max_position_embeddings} in the drafter"
        )
    return asked


def _check_out(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise BuildError(f"{out}: is a file; choose another --out")
    if out.is_dir() and any(out.iterdir()) and not (out / bundle.MANIFEST).is_file():
        raise BuildError(f"{out}: exists, is not empty and is not a bundle; choose another --out")


def _existing(out: Path) -> Bundle | None:
    """The bundle in `out`, if it is whole; a damaged one is simply built again."""
    if not (out / bundle.MANIFEST).is_file():
        return None
    try:
        return Bundle.open(out)
    except BundleError:
        return None


@contextmanager
def _workspace(out: Path) -> Iterator[Path]:
    """`.NAME.building` beside the bundle, held by one build at a time, kept when the build is interrupted."""
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.parent / f".{out.name}.building"
    lock = out.parent / f".{out.name}.lock"
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BuildError(
                f"{out}: another build is writing this bundle; wait for it, or choose another --out"
            ) from None
        try:
            work.mkdir(exist_ok=True)
            yield work
        finally:
            lock.unlink(missing_ok=True)


def _gather(sides: tuple[_Side, _Side], work: Path, progress: Progress) -> list[str]:
    """Bring weights, tokenizer and configs into the workspace; returns their names there."""
    wanted: dict[str, Path] = {}
    for side, role in zip(sides, ("target", "drafter"), strict=True):
        wanted |= {f"{side.folder}/{file.name}": file for file in side.checkpoint.files}
        wanted[f"configs/{role}.json"] = side.config.path
    directory = sides[0].source.directory
    wanted |= {name: directory / name for name in TOKENIZER_FILES if (directory / name).is_file()}
    if "tokenizer.json" not in wanted and isinstance(sides[0].checkpoint, Checkpoint):
        raise BuildError(
            f"{directory}: no tokenizer.json; save the tokenizer in the fast (tokenizers) format there"
        )
    for i, (name, source) in enumerate(wanted.items()):
        progress("link weights", i, len(wanted))
        _bring(source.resolve(), work / name)
    progress("link weights", len(wanted), len(wanted))
    for stale in {p for p in work.rglob("*") if p.is_file()} - {work / name for name in [*wanted, _DIGESTS]}:
        stale.unlink()
    return list(wanted)


def _bring(source: Path, destination: Path) -> None:
    """Weights are hard-linked where that is possible, and copied where it is not."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    if destination.exists():
        same = destination.stat()
        origin = source.stat()
        if same.st_ino == origin.st_ino or (same.st_size, same.st_mtime_ns) == (
            origin.st_size,
            origin.st_mtime_ns,
        ):
            return
        destination.unlink()
    if source.suffix == ".safetensors":
        try:
            os.link(source, destination)
        except OSError:
            pass  # another file system, or one without links
        else:
            return
    partial = destination.with_name(destination.name + ".part")
    shutil.copyfile(source, partial)
    shutil.copystat(source, partial)
    partial.rename(destination)


_DIGESTS = "digests.json"


def _digests(files: dict[str, Path], work: Path, progress: Progress) -> dict[str, dict[str, Any]]:
    """Size and sha256 of each file; those that an interrupted build already worked out are taken over."""
    memo_file = work / _DIGESTS
    try:
        memo = json.loads(memo_file.read_text())
    except (OSError, ValueError):
        memo = {}
    total = sum(path.stat().st_size for path in files.values())
    done, found = 0, {}
    for name, path in files.items():
        progress("digest", done, total)
        stat = path.stat()
        stamp = f"{name}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ino}"
        if stamp not in memo:
            memo[stamp] = _describe_file(path)
            memo_file.write_text(json.dumps(memo))
        found[name] = memo[stamp]
        done += stat.st_size
    progress("digest", total, total)
    return found


def _describe_file(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": bundle.digest(path)}


def _finish(work: Path, out: Path, manifest: dict[str, Any]) -> None:
    (work / _DIGESTS).unlink(missing_ok=True)
    with (work / bundle.MANIFEST).open("w") as file:
        json.dump(manifest, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    if out.exists():
        old = out.parent / f".{out.name}.replaced"
        shutil.rmtree(old, ignore_errors=True)
        out.rename(old)
        work.rename(out)
        shutil.rmtree(old)
    else:
        work.rename(out)

"""`dflash-trt build`: turn a pair of checkpoints into an engine bundle."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from dflash_trt.building.defaults import (
    choose_block_size,
    choose_engine,
    choose_max_seq_len,
    choose_precision,
    choose_tree_width,
    narrow_drafter,
)
from dflash_trt.building.sources import Role, find_sources
from dflash_trt.bundle import manifest as bundle
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.bundle.workspace import (
    Progress,
    Workspace,
    bring,
    check_out,
    key_of,
    read_inputs,
    silent,
    workspace,
)
from dflash_trt.checkpoint.draft_vocabulary import FILE, read_draft_vocabulary
from dflash_trt.checkpoint.pair import CheckpointPair, Side, Source, check_tokenizers
from dflash_trt.checkpoint.tensors import Checkpoint, Outline
from dflash_trt.engines import registry
from dflash_trt.engines.base import BuildJob, BuildSettings, Engine, EngineOptions, Weights
from dflash_trt.errors import DFlashError, UsageError
from dflash_trt.formats.precision import Precision
from dflash_trt.quantization.for_build import in_precision
from dflash_trt.quantization.layers import HEAD

ALL = "all"  # of the target's tokens


def build(
    target: str,
    drafter: str | None,
    out: str | Path,
    *,
    max_seq_len: int | None = None,
    block_size: int | None = None,
    tree_width: int | None = None,
    engine: str = registry.AUTO,
    weights: Weights = "copy",
    precision: Precision | None = None,
    no_drafter: bool = False,
    draft_vocabulary: str | Path | None = None,
    drafter_window: int | None = None,
    options: EngineOptions | None = None,
    exact: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Bundle:
    """Build a bundle in `out`. docs/bundle.md describes it, and docs/cli.md the options at length.

    target, drafter: names of known pairs, hub repositories or directories; a known pair brings its drafter.
    no_drafter: the target alone, whose drafts come from each request's own text. That is the default where no drafter
        is known.
    max_seq_len: tokens of a prompt and its output together.
    block_size: tokens of a verification; may be smaller than the drafter's, and is 16 without one.
    tree_width: candidates of the drafter for each place. 1 verifies chains. By default 8 where trees were measured to
        pay (docs/cli.md, "build"), else 1.
    engine: what runs the graphs; "auto": what this machine runs best, which a line on standard error names.
    weights: "copy", "link" (hard links, where numbers are kept) or "none" (graphs from configurations alone, to
        inspect).
    precision: the dtype that the engine computes in, or a number format that the build quantizes weights to.
    draft_vocabulary: a file of the tokens that may be drafted, or "all"; by default the drafter's own file, if any.
    drafter_window: tokens that the drafter's layers see, less than they were trained for (docs/drafters.md).
    options: the engine's own: `TorchOptions`, `TensorRTOptions` or `TensorRTLLMOptions`.
    exact: the bundle opens in exact mode unless its user says otherwise.
    force: replace a bundle of other inputs, or a damaged one; nothing else is ever replaced.

    An interrupted build never looks finished. A bundle of the same inputs is kept as it is.

    Raises:
        CheckpointError, PairError: the checkpoints cannot be read or do not fit.
        BuildError: an argument is impossible, or `out` holds something else.
    """
    if engine == registry.AUTO:
        engine = choose_engine(target, weights, precision, max_seq_len, no_drafter=no_drafter)
    progress, out, entry = progress or silent, Path(out), registry.find(engine)
    _check_arguments(entry, weights, precision, options, exact)
    check_out(out)
    progress("read checkpoints", 0, 1)
    # A precision that is asked for is made of the numbers in floating point.
    asked = precision or Precision()
    stored = [role for role in get_args(Role) if entry.multiplies_integers and getattr(asked, role) is None]
    sources = find_sources(target, drafter, weights, no_drafter=no_drafter, stored=stored)
    pair = _read_pair(sources, entry, weights, drafter_window)
    configs = pair.target.config, pair.draft_config
    settings = BuildSettings(
        block_size=choose_block_size(block_size, *configs),
        tree_width=choose_tree_width(tree_width, pair, precision, entry),
        max_seq_len=choose_max_seq_len(max_seq_len, *configs),
        weights=weights,
        precision=_precision(precision, pair, entry),
        options=options,
        exact=exact,
    )
    pair = replace(pair, draft_tokens=_draft_tokens(pair, draft_vocabulary, entry))
    progress("read checkpoints", 1, 1)
    with workspace(out) as place, _sources_named(pair, place.scratch):
        return _write(pair, settings, entry, place, force, progress)


@contextmanager
def _sources_named(pair: CheckpointPair, scratch: Path) -> Iterator[None]:
    """Errors name the checkpoints that were given, not what was made of them in the work directory."""
    try:
        yield
    except DFlashError as error:
        text = str(error)
        for role, side in [*pair.sides.items(), ("head", pair.target)]:
            work = rf"{re.escape(str(scratch))}/(draft-)?{role}[\w-]*"
            text = re.sub(work, str(side.source.directory).replace("\\", r"\\"), text)
        if text == str(error):
            raise
        raise type(error)(text) from error


def _write(
    pair: CheckpointPair,
    settings: BuildSettings,
    engine: Engine,
    place: Workspace,
    force: bool,
    progress: Progress,
) -> Bundle:
    """The bundle in its place: made in the work directory, or the one of the same key that is there."""
    pair = in_precision(pair, settings.precision, place.scratch, progress, engine.weight_layout)
    job = engine.build(pair, settings, place, progress)
    manifest = _describe(pair, settings, engine, job)
    inputs = read_inputs(job.files, progress)
    manifest["key"] = key_of(manifest, inputs, job.digests)
    existing = place.existing(manifest["key"], force=force)
    if existing is not None:
        return existing
    files = bring(inputs, place, progress, link=job.link)
    files = job.write(place.path, manifest, files, progress)
    manifest["files"] = {name: files[name] for name in sorted(files)}
    bundle.write_manifest(place.path, manifest)
    place.publish()
    return Bundle.open(place.out)


def _check_arguments(
    engine: Engine,
    weights: Weights,
    precision: Precision | None,
    options: EngineOptions | None,
    exact: bool,
) -> None:
    """Refuse what no checkpoint would make possible."""
    if weights not in get_args(Weights):
        raise UsageError(f"--weights is {weights!r}, expected one of: {', '.join(get_args(Weights))}")
    if options is not None and not (engine.options and isinstance(options, engine.options)):
        names = registry.names_by_options().get(type(options), [])
        raise UsageError(
            f"--engine is {engine.name}, and options are {type(options).__name__}, which are for: {', '.join(names)}"
        )
    engine.check(precision, weights, options)
    if exact and engine.own_loop:
        raise UsageError(
            f"--exact: {engine.name} runs its passes by itself, so equal tokens cannot be promised; leave it out"
        )


def _read_pair(
    sources: tuple[Source, Source | None], engine: Engine, weights: Weights, drafter_window: int | None
) -> CheckpointPair:
    """The checkpoints, which fit each other and the engine, with the drafter's windows as asked."""
    source, drafts = sources
    target, drafter = engine.read_pair(source.directory, drafts.directory if drafts else None)
    if weights != "none":
        mask = drafter.mask_token_id if drafter and drafter.masks else None
        check_tokenizers(source.directory, drafts.directory if drafts else None, mask)
    opened = Outline if weights == "none" else Checkpoint
    side, narrow = None, narrow_drafter(drafter_window, drafter, engine)
    if drafts and narrow:
        side = Side(drafts, narrow, opened(drafts.directory), engine.folder("drafter"))
    return CheckpointPair(Side(source, target, opened(source.directory), engine.folder("target")), side)


def _precision(asked: Precision | None, pair: CheckpointPair, engine: Engine) -> Precision:
    """The precision of the build: as asked, and the engine's choice for the rest. A head that is quantized stays."""
    from dflash_trt.planning.gpus import gpu_here

    quantized = bool(pair.drafter and pair.drafter.checkpoint.quantization.algorithms)
    configs = pair.target.config, pair.draft_config
    own_head = pair.drafter is not None and f"{HEAD}.weight" in pair.drafter.checkpoint.tensors
    gpu = None if own_head or engine.fp8_head is None else gpu_here()
    chosen = choose_precision(asked, engine, *configs, quantized=quantized, gpu=gpu)
    kept = pair.target.checkpoint.quantization.algorithm(HEAD)
    return replace(chosen, head=asked.head if asked else None) if kept else chosen


def _draft_tokens(pair: CheckpointPair, asked: str | Path | None, engine: Engine) -> list[int] | None:
    """The tokens that the drafter may draft; None for all.

    Raises BuildError if `asked` is a file, and this pair or engine can only draft from all tokens.
    """
    if asked == ALL or (asked is None and pair.drafter is None):
        return None
    if pair.drafter is None:
        raise UsageError(f"--draft-vocabulary is {asked}, but there is no drafter: leave it out")
    file = pair.drafter.source.directory / FILE if asked is None else Path(asked)
    if asked is None and not file.is_file():
        return None
    reason = None
    if engine.unchanged:
        reason = f"--engine {engine.name} drafts with the target's whole head"
    elif pair.drafter.config.own_head or "lm_head.weight" in pair.drafter.checkpoint.tensors:
        reason = f"{pair.drafter.config.path} is of a drafter with its own head"
    elif not isinstance(pair.target.checkpoint, Checkpoint):
        reason = "--weights none makes the graphs without any head"
    elif (kept := pair.target.checkpoint.quantization).algorithm(HEAD) is not None and kept.method != "gguf":
        reason = f"the LM head in {pair.target.checkpoint.directory} is quantized"
    if reason is None:
        return read_draft_vocabulary(file, pair.target.config.vocab_size)
    if asked is None:
        return None
    raise UsageError(f"--draft-vocabulary is {asked}, but {reason}: leave --draft-vocabulary out")


def _describe(pair: CheckpointPair, settings: BuildSettings, engine: Engine, job: BuildJob) -> dict[str, Any]:
    """The manifest without its key and files."""
    target, drafter = pair.target.config, pair.draft_config
    return {
        "format_version": bundle.FORMAT_VERSION,
        "key": "",
        "engine": engine.name,
        "weights": settings.weights,
        "target": pair.target.describe(),
        "drafter": pair.drafter and pair.drafter.describe(),
        "block_size": settings.block_size,
        "tree_width": settings.tree_width,
        "mask_token_id": drafter and drafter.mask_token_id,
        "target_layer_ids": list(drafter.target_layer_ids) if drafter else [],
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "max_seq_len": settings.max_seq_len,
        "eos_token_ids": list(target.eos_token_ids),
        **({"exact": True} if settings.exact else {}),
        **job.manifest,
    }

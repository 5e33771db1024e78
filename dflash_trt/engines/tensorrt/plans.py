"""TensorRT's part of a build: graphs as for ONNX Runtime, and from them one plan per graph and compute capability."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
from dflash_plugins import compiled, compiler
from dflash_plugins.dialect import TensorRTLayerPlugins, TensorRTPlugins
from dflash_plugins.kernel_specs import round_uses
from dflash_plugins.plugins import VERSION as PLUGIN_VERSION

from dflash_trt.bundle.manifest import cache_rows, describe_file
from dflash_trt.bundle.workspace import PLANS, Progress
from dflash_trt.checkpoint.linears import number_formats
from dflash_trt.checkpoint.pair import CheckpointPair
from dflash_trt.checkpoint.schema import TargetConfig
from dflash_trt.engines.base import PREFILL_CHUNK, BuildSettings
from dflash_trt.engines.device.sizes import ROW_UNIT
from dflash_trt.engines.graph_job import GraphJob
from dflash_trt.engines.tensorrt.builder import TIMINGS, Profile, build_plan, has_operator, weight_bytes
from dflash_trt.engines.tensorrt.options import FLAVOURS, TensorRTOptions, needs_plugins
from dflash_trt.errors import BuildError, UsageError
from dflash_trt.files.reading import read_file
from dflash_trt.formats.precision import Precision
from dflash_trt.graph.builder import COMPUTE
from dflash_trt.graph.tensorrt import TensorRT
from dflash_trt.hardware import compute_capabilities
from dflash_trt.logs import warn_once

_log = logging.getLogger(__name__)
# Their names in Triton.
_TYPES = {dtype: name for name, dtype in COMPUTE.items()}
_TIMING_BYTES = 1 << 30


@dataclass(frozen=True)
class PlanLimits:
    """The limits of a plan: sequences at a time, prompt tokens per pass, tokens per block, cache rows."""

    max_batch_size: int
    prefill_chunk: int
    block_size: int
    capacity: int

    def __post_init__(self) -> None:
        if self.max_batch_size < 1:
            raise UsageError(f"--max-batch-size is {self.max_batch_size}, expected 1 or more")
        if self.prefill_chunk < self.block_size:
            raise UsageError(
                f"--prefill-chunk is {self.prefill_chunk}, expected {self.block_size} (the block size) or more"
            )
        most = self.capacity - self.block_size - 1
        if self.prefill_chunk > most:
            raise UsageError(
                f"--prefill-chunk is {self.prefill_chunk}, but the cache has {self.capacity} rows, and a pass can fill "
                f"{most} of them: lower it, or build with a larger --max-seq-len"
            )


def profiles(role: str, limits: PlanLimits) -> tuple[Profile, Profile]:
    """The profiles of "target" or "drafter", in the order PREFILL, DECODE."""
    batch, chunk, block = limits.max_batch_size, limits.prefill_chunk, limits.block_size
    one, batches, chunks = (1, 1, 1), (1, max(1, batch // 2), batch), (1, chunk, chunk)
    if role == "target":
        decode = {"B": batches, "S": (1, block, block), "R": (1, block, block)}
        return Profile("prefill", {"B": one, "S": chunks, "R": one}), Profile("verify", decode)
    # The features for the drafter are in a buffer with one block per sequence, and are passed in together.
    decode = {"B": batches, "S": (block, block, block), "K": (2, block, block)}
    return Profile("prefill", {"B": one, "S": chunks, "K": (2, 2, 2)}), Profile("draft", decode)


@dataclass(kw_only=True)
class PlanJob(GraphJob):
    """Writes the graphs and, from them, one plan per graph and compute capability."""

    plans: Plans

    def write(
        self, work: Path, manifest: dict[str, Any], files: dict[str, dict[str, Any]], progress: Progress
    ) -> dict[str, dict[str, Any]]:
        files = super().write(work, manifest, files, progress)
        manifest["tensorrt"]["plans"], built = self.plans.build(work, self.models, manifest["key"], progress)
        return {name: entry for name, entry in files.items() if not name.startswith("weights/")} | built


def plan_job(engine: str, pair: CheckpointPair, settings: BuildSettings, progress: Progress) -> PlanJob:
    """The part of a flavour in a build. Raises BuildError for what is impossible."""
    checkpoints = [side.checkpoint for side in pair.sides.values()] + ([pair.head] if pair.head else [])
    plans = Plans(
        engine,
        settings.options or TensorRTOptions(),
        settings.precision,
        pair.target.config,
        roles=pair.sides,
        block_size=settings.block_size,
        capacity=cache_rows(settings.max_seq_len, settings.block_size),
        formats={scheme for checkpoint in checkpoints for scheme in number_formats(checkpoint)},
    )
    job = PlanJob.of(
        *(pair, settings, plans.dialects, progress),
        # Beside a pass that filled a slot, other passes write a block there while it is idle (rounds.py).
        chunk=plans.limits.prefill_chunk + settings.block_size,
        unit=ROW_UNIT,
        link=True,  # plans contain the weights, so no copies are made for them
        plans=plans,
    )
    plans.compile_kernels(job.models)
    job.manifest["tensorrt"] = plans.describe()
    return job


class Plans:
    """The plans of a build: options are checked, then plans are built.

    plugins: the models whose plans have plugins.

    Raises BuildError if the package is missing or too old, or an option is impossible.
    """

    def __init__(
        self,
        engine: str,
        options: TensorRTOptions,
        precision: Precision,
        target: TargetConfig,
        *,
        roles: Collection[str],
        block_size: int,
        capacity: int,
        formats: Iterable[str],
    ) -> None:
        self.flavour = FLAVOURS[engine]
        self.module = self.flavour.load()
        self.capabilities = self.flavour.check_capabilities(
            options.capabilities, compute_capabilities(), formats=formats
        )
        chunk = options.prefill_chunk
        if chunk is None:
            chunk = max(1, min(PREFILL_CHUNK, capacity - block_size - 1))
        self.limits = PlanLimits(options.max_batch_size, chunk, block_size, capacity)
        dtypes = {role: COMPUTE[precision.compute(role, "bf16")] for role in roles}
        self._roles = roles
        self.kernels: dict[str, compiled.Compiled] = {}  # between passes, by digest
        if options.timing_cache is not None and self.flavour.ahead:
            raise UsageError(
                f"--timing-cache: {self.flavour.label} builds without timing anything; leave it out"
            )
        self._timings = {} if options.timing_cache is None else self._read_timings(options.timing_cache)
        self.plugins = self._plugged(options, target, dtypes)
        fused = has_operator(self.module, "TRT_Attention") and has_operator(self.module, "TRT_KVCacheUpdate")
        self.dialects = {
            role: self._dialect(role, dtype)(dtype, trt_operators=fused) for role, dtype in dtypes.items()
        }

    def _plugged(
        self, options: TensorRTOptions, target: TargetConfig, dtypes: Mapping[str, ir.DataType]
    ) -> set[str]:
        """The models that get plugins. Raises BuildError for a target that needs them where there are none."""
        usable = set(self.capabilities) <= self.flavour.plugin_capabilities and options.plugins == "auto"
        missing = compiler.no_compiler() if usable else None
        plugged = set(dtypes) if self.flavour.plugins == "all" and usable and missing is None else set()
        plugged -= {role for role, dtype in dtypes.items() if dtype == ir.DataType.FLOAT}
        if not (needing := needs_plugins(target)):
            return plugged
        if reason := self.flavour.refuses(target, self.capabilities):
            raise BuildError(reason)
        if options.plugins == "none":
            reason = "--plugins none leaves them out: leave it out, or use --engine torch"
        elif missing is not None:
            reason = missing
        elif target.moe is not None and target.moe.quantization and dtypes["target"] == ir.DataType.FLOAT:
            reason = "they compute in BF16 and FP16: leave --precision target=fp32 out, or use --engine torch"
        if reason:
            raise BuildError(
                f"{target.path}: --engine {self.flavour.name} computes {needing} by plugins only, and {reason}"
            )
        return {*plugged, "target"}

    def _dialect(self, role: str, dtype: ir.DataType) -> type[TensorRT]:
        """The recurrence of Gated DeltaNet alone has a plugin in FP32, too."""
        if role not in self.plugins:
            return TensorRT
        every = self.flavour.plugins == "all" and dtype != ir.DataType.FLOAT
        return TensorRTPlugins if every else TensorRTLayerPlugins

    def compile_kernels(self, models: Mapping[str, ir.Model]) -> None:
        """Compile the kernels between the passes of these models. If that fails, a warning says why."""
        outputs = {value.name: value for value in models["target"].graph.outputs}
        vocab, width = (int(str([*(outputs[name].shape or ())][-1])) for name in ("logits", "features"))
        dtype = _TYPES[self.dialects["target"].dtype]
        try:
            self.kernels = compiler.compile_round(round_uses(vocab, width, dtype, self.limits.block_size))
        except BuildError as error:
            warn_once(
                _log,
                f"{error}. The bundle gets no kernels: torch's operators run between passes, and the host samples",
            )

    def _read_timings(self, bundle: Path) -> dict[str, bytes]:
        """The timing caches of a bundle's plans, by folder and role."""
        names = [f"sm{capability}/{role}" for capability in self.capabilities for role in self._roles]
        return {
            name: read_file(bundle / PLANS / f"{name}{TIMINGS}", _TIMING_BYTES, BuildError) for name in names
        }

    def describe(self) -> dict[str, Any]:
        """The manifest's `tensorrt` before plans exist. Through it, the key covers the inputs of the plans."""
        described: dict[str, Any] = {
            "version": self.module.__version__,
            "compute_capabilities": list(self.capabilities),
            "max_batch_size": self.limits.max_batch_size,
            "prefill_chunk": self.limits.prefill_chunk,
        }
        if self.kernels:
            described["kernels"] = {"version": PLUGIN_VERSION}
        if self._timings:
            described["timing_cache"] = {
                name: hashlib.sha256(times).hexdigest() for name, times in self._timings.items()
            }
        if self.plugins:
            described["plugins"] = {"version": PLUGIN_VERSION, "source_sha256": compiler.source_digest()}
        return described

    def build(
        self, work: Path, models: Mapping[str, ir.Model], key: str, progress: Progress
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Build the plans that an interrupted build of the same key did not finish.

        Returns the plans as the manifest lists them, and their files with size and digest.
        """
        for folder in (work / PLANS).glob("*"):
            if folder.name not in {f"sm{capability}" for capability in self.capabilities}:
                shutil.rmtree(folder)
        plans: dict[str, Any] = {}
        files: dict[str, dict[str, Any]] = {}
        for capability in self.capabilities:
            folder = work / PLANS / f"sm{capability}"
            plans[str(capability)] = {}
            for role, model in models.items():
                plan, memo = folder / f"{role}.plan", folder / f"{role}.json"
                entry = _finished(memo, plan, key)
                if entry is None:
                    ranges = profiles(role, self.limits)
                    entry = {
                        "key": key,
                        "weight_bytes": weight_bytes(model),
                        **build_plan(
                            *(self.flavour, work / f"{role}.onnx", plan, ranges, capability, progress),
                            plugins=role in self.plugins,
                            timings=self._timings.get(f"sm{capability}/{role}", b""),
                        ),
                    }
                    memo.write_text(json.dumps(entry))
                name = str(plan.relative_to(work))
                files[name] = entry.pop("file")
                del entry["key"]
                plans[str(capability)][role] = {"plan": name, **entry}
        if self.kernels:
            compiled.write(work / compiled.FILE, self.kernels)
            files[compiled.FILE] = describe_file(work / compiled.FILE)
        for memo in (work / PLANS).rglob("*.json"):
            memo.unlink()
        for pattern in ("*.log", f"*{TIMINGS}"):
            for file in (work / PLANS).rglob(pattern):
                files[str(file.relative_to(work))] = describe_file(file)
        # The plans contain the weights now. The graphs stay for inspection.
        shutil.rmtree(work / "weights")
        return plans, files


def _finished(memo: Path, plan: Path, key: str) -> dict[str, Any] | None:
    """The record of a plan that an interrupted build of the same key finished."""
    try:
        entry: dict[str, Any] = json.loads(memo.read_text())
        if entry["key"] == key and plan.stat().st_size == entry["file"]["size"]:
            return entry
    except (OSError, ValueError, KeyError):
        pass
    return None

"""TensorRT's part of a build: options and their limits, dialects, and one plan per graph and compute capability."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
from dflash_plugins import compiled
from dflash_plugins.dialect import TensorRTLayerPlugins, TensorRTPlugins
from dflash_plugins.kernel_specs import round_uses
from dflash_plugins.version import VERSION as PLUGIN_VERSION

from dflash_trt.bundle.contents import describe_file
from dflash_trt.bundle.workspace import Progress
from dflash_trt.engines.base import PREFILL_CHUNK
from dflash_trt.engines.tensorrt.builder import TIMINGS, build_plan, has_operator, weight_bytes
from dflash_trt.engines.tensorrt.flavour import FLAVOURS
from dflash_trt.engines.tensorrt.options import TensorRTOptions
from dflash_trt.engines.tensorrt.profiles import PlanLimits, profiles
from dflash_trt.errors import BuildError, UsageError
from dflash_trt.files.reading import read_file
from dflash_trt.formats.precision import Precision
from dflash_trt.graph.tensorrt import TensorRT
from dflash_trt.hardware import compute_capabilities
from dflash_trt.logs import warn_once

_log = logging.getLogger(__name__)
DTYPES = {"bf16": ir.DataType.BFLOAT16, "fp16": ir.DataType.FLOAT16, "fp32": ir.DataType.FLOAT}
# Their names in Triton.
_TYPES = {dtype: name for name, dtype in DTYPES.items()}
FOLDER = "plans"
_TIMING_BYTES = 1 << 30


class Plans:
    """The plans of a build: options are checked, then plans are built.

    Raises BuildError if the package is missing or too old, or an option is impossible.
    """

    def __init__(
        self,
        engine: str,
        options: TensorRTOptions,
        precision: Precision,
        *,
        roles: Collection[str],
        block_size: int,
        capacity: int,
        formats: Iterable[str],
        expert_formats: Collection[str],
        recurrent: bool,
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
        dtypes = {role: DTYPES[precision.compute(role, "bf16")] for role in roles}
        usable = (
            options.plugins == "auto"
            and set(self.capabilities) <= self.flavour.plugin_capabilities
            and compiled.no_compiler() is None
        )
        plugged = set(roles) if self.flavour.plugins == "all" else set[str]()
        if expert_formats or recurrent:
            plugged.add("target")
        self._roles = roles
        self.kernels: dict[str, compiled.Compiled] = {}  # between passes, by digest
        if options.timing_cache is not None and self.flavour.ahead:
            raise UsageError(
                f"--timing-cache: {self.flavour.label} builds without timing anything; leave it out"
            )
        self._timings = {} if options.timing_cache is None else self._read_timings(options.timing_cache)
        # The models whose plans have plugins.
        self.plugins = {role for role in plugged if usable and dtypes[role] != ir.DataType.FLOAT}
        if "target" not in self.plugins:
            self.flavour.check_capabilities(self.capabilities, self.capabilities, formats=expert_formats)
        with_plugins = TensorRTPlugins if self.flavour.plugins == "all" else TensorRTLayerPlugins
        fused = has_operator(self.module, "TRT_Attention") and has_operator(self.module, "TRT_KVCacheUpdate")
        self.dialects = {
            role: (with_plugins if role in self.plugins else TensorRT)(dtype, trt_operators=fused)
            for role, dtype in dtypes.items()
        }

    def compile_kernels(self, models: Mapping[str, ir.Model]) -> None:
        """Compile the kernels between the passes of these models. If that fails, a warning says why."""
        (logits,) = (v for v in models["target"].graph.outputs if v.name == "logits")
        drafter = models.get("drafter")
        values = models["target"].graph.outputs if drafter is None else drafter.graph.inputs
        (features,) = (v for v in values if v.name == "features")
        assert logits.shape is not None
        assert features.shape is not None
        assert features.dtype is not None
        sizes = int(str(logits.shape[-1])), int(str(features.shape[-1]))
        try:
            self.kernels = compiled.compile_round(
                round_uses(*sizes, _TYPES[features.dtype], self.limits.block_size)
            )
        except BuildError as error:
            warn_once(
                _log,
                f"{error}. The bundle gets no kernels: torch's operators run between passes, and the host samples",
            )

    def _read_timings(self, bundle: Path) -> dict[str, bytes]:
        """The timing caches of a bundle's plans, by folder and role."""
        names = [f"sm{capability}/{role}" for capability in self.capabilities for role in self._roles]
        return {
            name: read_file(bundle / FOLDER / f"{name}{TIMINGS}", _TIMING_BYTES, BuildError) for name in names
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
            from dflash_plugins.compiler import source_digest

            described["plugins"] = {"version": PLUGIN_VERSION, "source_sha256": source_digest()}
        return described

    def build(
        self, work: Path, models: Mapping[str, ir.Model], key: str, progress: Progress
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Build the plans that an interrupted build of the same key did not finish.

        Returns the plans as the manifest lists them, and their files with size and digest.
        """
        for folder in (work / FOLDER).glob("*"):
            if folder.name not in {f"sm{capability}" for capability in self.capabilities}:
                shutil.rmtree(folder)
        plans: dict[str, Any] = {}
        files: dict[str, dict[str, Any]] = {}
        for capability in self.capabilities:
            folder = work / FOLDER / f"sm{capability}"
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
        for memo in (work / FOLDER).rglob("*.json"):
            memo.unlink()
        for pattern in ("*.log", f"*{TIMINGS}"):
            for file in (work / FOLDER).rglob(pattern):
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

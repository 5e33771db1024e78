"""What TensorRT and TensorRT-RTX differ in, and the options of a build for either: for which GPUs and shapes."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dflash_plugins.kernel_specs import TARGETS

from dflash_trt.engines.base import EngineOptions
from dflash_trt.errors import BuildError, UsageError
from dflash_trt.extras import install
from dflash_trt.options import option

if TYPE_CHECKING:
    from dflash_trt.checkpoint.schema import TargetConfig


@dataclass(frozen=True)
class Flavour:
    """`capabilities`: the GPUs it supports; 120 is 12.0. `ahead`: whether it builds for GPUs that are not present."""

    name: str  # the value of --engine, and the name of the extra that installs it
    label: str
    module: str
    capabilities: tuple[int, ...]
    ahead: bool
    oldest: tuple[int, int]
    # What has our kernels: MXFP4 experts and Gated DeltaNet, or attention, taps and acceptance too.
    plugins: Literal["layers", "all"]

    @property
    def wheel(self) -> str:
        """The package that pip installs."""
        return f"{self.module.replace('_', '-')}-cu13"

    @property
    def plugin_capabilities(self) -> frozenset[int]:
        """The GPUs that plugins are compiled for."""
        return frozenset(self.capabilities if self.plugins == "layers" else TARGETS)

    def refuses(self, target: TargetConfig, capabilities: Iterable[int]) -> str:
        """Why a target that only plugins compute cannot be built for these GPUs; empty if it can, or needs none."""
        needing, lacking = needs_plugins(target), sorted(set(capabilities) - self.plugin_capabilities)
        if not needing or not lacking:
            return ""
        return (
            f"--compute-capability {lacking[0]}: {self.label} computes {needing} by plugins only, which are for "
            f"{', '.join(map(str, sorted(self.plugin_capabilities)))}; use --engine torch"
        )

    def load(self) -> Any:
        """The module. Raises BuildError if it is missing, broken or too old."""
        try:
            module = importlib.import_module(self.module)
        except ImportError as error:
            raise BuildError(
                f"--engine {self.name} needs the Python package {self.module}, which cannot be imported ({error}); "
                f"install it with: {install(f'{self.name}:tensorrt')} (NVIDIA publishes it as a wheel, "
                f"{self.wheel}, for Linux and Windows)"
            ) from None
        if tuple(int(n) for n in module.__version__.split(".")[:2]) < self.oldest:
            raise BuildError(
                f"{self.label} {module.__version__} is installed, expected {'.'.join(map(str, self.oldest))} or newer: "
                f"{install(f'{self.name}:tensorrt').replace('install', 'install --upgrade', 1)}"
            )
        return module

    def check_capabilities(
        self, asked: Sequence[int], present: Sequence[int], *, formats: Iterable[str]
    ) -> tuple[int, ...]:
        """The capabilities to build for: the requested ones, or those of the GPUs that are `present`.

        Raises BuildError for a capability that this flavour does not support, naming the one that does. Also for a
        capability without arithmetic in one of the weights' `formats`.
        """
        from dflash_trt.formats import FORMATS  # imports NumPy, which a list of the engines does without

        wanted = tuple(dict.fromkeys(asked or present))
        if not wanted:
            hint = (
                "say which GPU to build for: --compute-capability 120" if self.ahead else "build where one is"
            )
            raise BuildError(f"--engine {self.name}: nvidia-smi shows no GPU here; {hint}")
        for capability in wanted:
            if capability not in self.capabilities:
                others = [f for f in FLAVOURS.values() if f is not self and capability in f.capabilities]
                serves = ", ".join(map(str, self.capabilities))
                use = f"use --engine {others[0].name}" if others else "no TensorRT flavour is known to"
                raise UsageError(
                    f"--compute-capability {capability}: {self.label} serves {serves}; for {capability} {use}"
                )
            if not self.ahead and capability not in present:
                here = ", ".join(map(str, present)) or "none"
                rtx = FLAVOURS["tensorrt-rtx"]
                hint = f", or use --engine {rtx.name}" if capability in rtx.capabilities else ""
                raise BuildError(
                    f"--compute-capability {capability}: {self.label} builds for the GPUs it finds ({here}); build "
                    f"on such a machine{hint}"
                )
            for scheme in sorted(formats):
                having = FORMATS[scheme].capabilities
                if having is not None and capability not in having:
                    raise UsageError(
                        f"--compute-capability {capability}: has no {scheme.upper()} arithmetic, which the weights of "
                        f"this pair need; GPUs that have it: {', '.join(map(str, having))}. For this GPU, build from "
                        "the unquantized checkpoint with --precision target=int4"
                    )
        return wanted


def needs_plugins(target: TargetConfig) -> str:
    """What of a target TensorRT has no fitting operators for; empty if it has all."""
    if target.moe is not None and target.moe.quantization:
        return "experts in MXFP4"
    return "Gated DeltaNet" if target.delta_layers else ""


FLAVOURS: Mapping[str, Flavour] = {
    flavour.name: flavour
    for flavour in (
        Flavour(
            "tensorrt-rtx",
            "TensorRT-RTX",
            "tensorrt_rtx",
            (80, 86, 89, 120, 121),
            ahead=True,
            oldest=(1, 7),
            plugins="layers",
        ),
        Flavour(
            "tensorrt",
            "TensorRT",
            "tensorrt",
            (80, 86, 87, 89, 90, 100, 103, 110, 120, 121),
            ahead=False,
            oldest=(10, 15),
            plugins="all",
        ),
    )
}


def parse_capability(text: str) -> int:
    """`120`, `12.0` or `sm120`, as 120. Raises ArgumentTypeError for anything else."""
    match = re.fullmatch(r"(?:sm_?)?(\d{1,2})\.?(\d)", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no compute capability such as 120 (or 12.0)")
    return int(match[1] + match[2])


@dataclass(frozen=True)
class TensorRTOptions(EngineOptions):
    """Options of a TensorRT build.

    capabilities: the GPUs to build for; 120 is 12.0. Empty: the GPUs of this machine.
    prefill_chunk: prompt tokens per pass. None is 512, or less with a small cache.
    plugins: "auto" uses our kernels for attention, taps, acceptance, MXFP4 experts and Gated DeltaNet if the engine,
        the GPU and the installed packages support them (`plugins/`). "none" uses standard operators. The result is the
        same but for rounding.
    timing_cache: a bundle whose timing caches the build reads, to choose the same tactics again.
    """

    title = "TensorRT"
    batch = "8"

    capabilities: tuple[int, ...] = option(
        "of the GPUs to build for, such as 89 120 (default: of this machine's GPUs)",
        "CC",
        flag="--compute-capability",
        parse=parse_capability,
        default=(),
    )
    max_batch_size: int = 8
    prefill_chunk: int | None = option(
        "most prompt tokens per pass (default: 512)", "N", least=1, default=None
    )
    timing_cache: Path | None = option(
        "choose the kernels that this bundle's build chose, on the same GPU with the same version",
        "BUNDLE",
        default=None,
    )
    plugins: Literal["auto", "none"] = option(
        "auto: our kernels for attention, taps, acceptance, MXFP4 experts and Gated DeltaNet, where supported "
        "(default)",
        default="auto",
    )

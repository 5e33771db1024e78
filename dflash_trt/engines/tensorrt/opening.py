"""From a bundle to a pair that is ready: its plan for this GPU, memory, and passes of every size that will come."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from dflash_plugins import rtx
from dflash_plugins.kernel_specs import round_uses
from dflash_plugins.launch import TYPE_NAMES
from dflash_plugins.version import check as check_plugins

from dflash_trt.bundle.manifest import Bundle
from dflash_trt.decoding.pair import Pair
from dflash_trt.engines.tensorrt.device_arrays import DeviceArrays
from dflash_trt.engines.tensorrt.engine import TensorRTEngine
from dflash_trt.engines.tensorrt.flavour import FLAVOURS
from dflash_trt.engines.tensorrt.profiles import pass_sizes, prefill_lengths
from dflash_trt.engines.tensorrt.round_kernels import kernels_of
from dflash_trt.engines.tensorrt.runtime_config import captures_by_itself, kernel_cache
from dflash_trt.errors import BuildError, BundleError

if TYPE_CHECKING:
    from dflash_trt.bundle.workspace import Progress

_log = logging.getLogger(__name__)
DEVICE = "cuda"
# TensorRT-RTX compiles in the first pass of a shape, captures the second one, and replays from the third on. The engine
# captures full TensorRT's first pass itself.
_RUNS = 3
STEP = "warm up"


def open_pair(bundle: Bundle, *, slots: int, prefill_chunk: int, progress: Progress) -> Pair:
    """The bundle's plans for the GPU of this process, with `slots` cache slots, ready for the passes that will come.

    Raises BundleError if the package or a GPU is missing, or if no plan fits. A plan does not fit if it is for another
    GPU, or was built with another version of the package or the plugins.
    """
    manifest = bundle.manifest
    check_plugins(manifest, str(bundle.path))
    trt = _module(bundle)
    plans = _plans(bundle)
    kernels = kernel_cache(trt, bundle.path, torch.cuda.get_device_name())
    chunk, stream = min(prefill_chunk, manifest["tensorrt"]["prefill_chunk"]), torch.cuda.Stream()
    # Only this stream fills memory. torch's default stream is not ordered with it.
    with torch.cuda.stream(stream):
        target, drafter = (
            TensorRTEngine(
                *(trt, bundle.path / plans[role]["plan"]),
                slots=slots,
                stream=stream,
                device=torch.device(DEVICE),
                kernels=kernels,
                kinds=bundle.cache_kinds(role),
            )
            for role in ("target", "drafter")
        )
        arrays = _arrays(bundle, target, drafter, slots, chunk)
    pair = Pair(
        target,
        drafter,
        arrays,
        slots=slots,
        capacity=bundle.capacity,
        mask_token_id=manifest["mask_token_id"],
        vocab_size=manifest["vocab_size"],
        prefill_chunk=chunk,
        trees=manifest["tree_width"] > 1,
        chunks_differ=arrays.chunks_differ,
    )
    warm_up(pair, manifest["block_size"], progress, runs=_RUNS if captures_by_itself(trt) else 1)
    if kernels is not None:
        kernels.save()
    return pair


def _module(bundle: Bundle) -> Any:
    """TensorRT's module in the version that built the plans, with our plugins registered."""
    built, flavour = bundle.manifest["tensorrt"], FLAVOURS[bundle.manifest["engine"]]
    try:
        trt = flavour.load()
    except BuildError as error:
        raise BundleError(f"{bundle.path}: was built for {flavour.label}, and {error}") from None
    if trt.__version__ != built["version"]:
        raise BundleError(
            f"{bundle.path}: its plans were built with {flavour.label} {built['version']}, but {trt.__version__} is "
            "installed, and plans work only with the version that built them: install that one, or build again"
        )
    if not torch.cuda.is_available():
        raise BundleError(
            f"{bundle.path}: {flavour.label} needs an NVIDIA GPU and a torch that sees it (torch {torch.__version__})"
        )
    if "plugins" in built and flavour.plugins == "layers":
        rtx.register(trt)
    return trt


def _plans(bundle: Bundle) -> Mapping[str, Any]:
    """The manifest's entries of the plans for this GPU, by role."""
    major, minor = torch.cuda.get_device_capability()
    built = bundle.manifest["tensorrt"]["plans"]
    plans: Mapping[str, Any] | None = built.get(f"{major}{minor}")
    if plans is None:
        raise BundleError(
            f"{bundle.path}: has plans for compute capability {', '.join(built)}, but this GPU has "
            f"{major}{minor}; build with --compute-capability {major}{minor}"
        )
    return plans


def _arrays(
    bundle: Bundle, target: TensorRTEngine, drafter: TensorRTEngine, slots: int, chunk: int
) -> DeviceArrays:
    manifest, taps = bundle.manifest, len(bundle.manifest["target_layer_ids"])
    vocab, hidden, block_size = manifest["vocab_size"], manifest["hidden_size"], manifest["block_size"]
    dtype = TYPE_NAMES[drafter.dtypes["features"]]
    return DeviceArrays(
        target,
        drafter,
        slots=slots,
        capacity=bundle.capacity,
        prefill_chunk=chunk,
        block_size=block_size,
        taps=taps,
        hidden_size=hidden,
        vocab_size=vocab,
        tree_width=manifest["tree_width"],
        chunks_differ=manifest["tensorrt"].get("mxfp8_rows") == chunk,
        run=kernels_of(bundle, round_uses(vocab, taps * hidden, dtype, block_size)),
    )


def warm_up(pair: Pair, block_size: int, progress: Progress, *, runs: int) -> int:
    """Run passes of both models in every size that requests can bring. Returns the number of sizes.

    runs: of each size of decoding passes. All slots are clear then, as after opening.
    """
    begin, passes = perf_counter(), list(_passes(pair, block_size, runs))
    for done, run in enumerate(passes, 1):
        run()
        progress(STEP, done, len(passes))
    for slot in range(pair.slots):
        pair.clear(slot)
    pair.arrays.wait()
    _log.info("ran passes of %d sizes in %.1f s", len(passes), perf_counter() - begin)
    return len(passes)


def _passes(pair: Pair, block_size: int, runs: int) -> Iterator[Callable[[], object]]:
    for length in reversed(prefill_lengths(pair.prefill_chunk, apart=pair.chunks_differ)):
        yield partial(pair.prefill, [0] * length, 0, 0, draft=True)
    for batch in pass_sizes(pair.slots):
        for length in pass_sizes(block_size):
            yield partial(_repeated, pair.dummy_verify, batch, length, runs)
            if length > 1:
                yield partial(_repeated, pair.dummy_draft, batch, length, runs)


def _repeated(run: Callable[[int, int], object], batch: int, length: int, runs: int) -> None:
    for _ in range(runs):
        run(batch, length)

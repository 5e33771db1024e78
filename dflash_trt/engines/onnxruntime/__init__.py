"""ONNX Runtime as an engine: graphs with cache rows fixed at run time, computed in float32 on the CPU."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dflash_trt import hardware
from dflash_trt.engines.base import (
    PREFILL_CHUNK,
    Availability,
    BuildSettings,
    Engine,
    RunSettings,
    Weights,
    describe_caches,
)
from dflash_trt.errors import BundleError, UsageError
from dflash_trt.logs import warn_once

if TYPE_CHECKING:
    from dflash_trt.bundle.manifest import Bundle
    from dflash_trt.bundle.workspace import Progress, Workspace
    from dflash_trt.checkpoint.pair import CheckpointPair
    from dflash_trt.decoding.scheduler import Scheduler
    from dflash_trt.engines.graph_job import GraphJob
    from dflash_trt.formats.precision import Precision
    from dflash_trt.graph.dialect import Dialect

# Most tokens of a prompt in one pass. With 512, attention computes more scores that are masked, and they leave the
# processor's caches: a prompt of 512 tokens took 1.04 (float32), 1.12 (INT8) and 1.05 (INT4) of the time. With 128, one
# of 2,048 tokens took 1.04 to 1.06.
PROMPT_PASS = 256
# Passes of 32 rows in INT8 took 1.09 of the time of float32 on a processor with AVX2 alone, and of 64 rows 1.28.
_MANY_SLOTS = 32
_WITHOUT_VNNI = ("AVX2", "AVX-512")


def check(precision: Precision | None, weights: Weights, options: None) -> None:
    for role in ("target", "drafter"):
        if precision is not None and (compute := precision.compute(role, "fp32")) != "fp32":
            raise UsageError(f"--precision is {role}={compute}, but --engine onnxruntime computes in fp32")


def build(pair: CheckpointPair, settings: BuildSettings, place: Workspace, progress: Progress) -> GraphJob:
    from dflash_trt.engines.graph_job import GraphJob
    from dflash_trt.graph.onnxruntime import OnnxRuntime
    from dflash_trt.graph.quantized import CHANNELS

    dialects: dict[str, Dialect] = {role: OnnxRuntime() for role in pair.sides}
    link = settings.weights == "link"
    job = GraphJob.of(pair, settings, dialects, progress, chunk=PREFILL_CHUNK, fixed=False, link=link)
    # The bits of the weights that the target multiplies as integers, and whether bytes are multiplied with bytes,
    # which not every processor adds exactly.
    integers = (node for node in job.models["target"].graph if node.op_type == "MatMulNBits")
    job.manifest["integer_bits"] = sorted({node.attributes["bits"].as_int() for node in integers})
    operators = {node.op_type for model in job.models.values() for node in model.graph}
    job.manifest["exact_bytes"] = CHANNELS in operators
    return job


def open(bundle: Bundle, settings: RunSettings) -> Scheduler:
    from dflash_trt.decoding.arrays import HostArrays
    from dflash_trt.decoding.pair import Pair
    from dflash_trt.decoding.scheduler import Scheduler
    from dflash_trt.engines.onnxruntime.runner import OnnxRuntimeRunner

    least_rows = _fewest_rows(bundle)
    manifest, slots = bundle.manifest, settings.max_batch_size
    if manifest["integer_bits"] and slots >= _MANY_SLOTS and hardware.instructions() in _WITHOUT_VNNI:
        warn_once(
            logging.getLogger(__name__),
            f"{bundle.path}: multiplies integers, but this processor has no VNNI: with many requests at a time "
            "float32 is faster (build with --precision target=fp32)",
        )
    kinds = {role: bundle.cache_kinds(role) for role in bundle.roles}
    whole = all(kind.window is None for kind in kinds.get("drafter", ()))
    runners = {
        role: OnnxRuntimeRunner(
            bundle.listed(f"{role}.onnx"),
            slots=slots,
            capacity=bundle.capacity,
            kinds=kinds[role],
            threads=settings.threads,
            deferred=role == "drafter",  # until a draft is asked for
        )
        for role in bundle.roles
    }
    target = runners["target"]
    pair = Pair(
        target,
        runners.get("drafter"),
        HostArrays(
            slots=slots,
            feature_size=bundle.feature_size,
            most_unread=(1 + whole) * settings.prefill_chunk,
            prompts_wait=whole,
            **({"most_prompt_rows": target.most_pending} if target.most_pending else {}),
        ),
        slots=slots,
        capacity=bundle.capacity,
        mask_token_id=manifest["mask_token_id"],
        vocab_size=manifest["vocab_size"],
        prefill_chunk=settings.prefill_chunk,
        prompt_pass=min(settings.prefill_chunk, PROMPT_PASS),
        trees=manifest["tree_width"] > 1,
        least_rows=least_rows,
    )
    return Scheduler(pair, settings.prefix_cache_bytes, settings.prompt_delay)


def describe(bundle: Bundle) -> dict[str, Any]:
    """The rows of its caches, and the fewest rows of a pass with weights in so many bits on this processor."""
    from dflash_trt.engines.onnxruntime.products import fewest_rows

    bits = bundle.manifest["integer_bits"]
    return describe_caches(bundle) | ({"fewest_rows": {n: fewest_rows(n) for n in bits}} if bits else {})


def _fewest_rows(bundle: Bundle) -> int:
    """The fewest rows of the target's passes for which a row has the same bits in all of them. Raises BundleError if
    this processor's products of integers depend on the number of rows above that too, or are not added exactly.
    """
    from dflash_trt.engines.onnxruntime.products import bytes_are_exact, fewest_rows

    fewest = {bits: fewest_rows(bits) for bits in bundle.manifest["integer_bits"]}
    for bits, least in fewest.items():
        if least is None:
            raise BundleError(
                f"{bundle.path}: the target has layers of {bits}-bit integers. This processor rounds a row of their "
                "product by the number of rows, so drafts would change the tokens; build the bundle on this machine"
            )
    if bundle.manifest["exact_bytes"] and not bytes_are_exact():
        raise BundleError(
            f"{bundle.path}: has INT8 layers with one scale for each output, built on a processor with AMX. This "
            "processor's sums of such products saturate (it has no VNNI); build the bundle on this machine"
        )
    return max((least for least in fewest.values() if least is not None), default=1)


ENGINE = Engine(
    name="onnxruntime",
    check=check,
    build=build,
    open=open,
    describe=describe,
    available=lambda capabilities: Availability(build=True, run=True, note="on the CPU"),
    modules=("onnxruntime",),
    needed=("onnxruntime",),
    weight_layout="blocks",
    equal_rows=True,  # tests/models/test_widths.py
)

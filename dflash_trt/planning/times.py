"""The time of a pass and of a round on one GPU, from bytes, operations and fixed costs.

pass: layers * layer_seconds + (memory^3 + compute^3)^(1/3).
plain: a pass of the target with a row per request + request_seconds * requests.
round: passes of target and drafter with a block per request + round_seconds + request_seconds * requests.

memory: weights, the experts that the rows reach, and the caches, at `bandwidth_share` of the GPU's bandwidth. compute:
operations at `compute_share` of its peak. Rows of one block share experts: n rows of blocks reach as many experts as
n^union rows of different texts. A kernel computes `tile` rows for each expert at least, half of them for nothing.

The constants were fitted to a published table (build_scripts/bench/fit_times.py), and confirmed on that kind of GPU
alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.planning.gpus import Gpu
from dflash_trt.planning.work import Work

_CONSTANTS = json.loads(Path(__file__).with_name("times.json").read_text())
MEDIAN_ERROR: float = _CONSTANTS["median_error"]
GPU: str = _CONSTANTS["gpu"]  # the kind on which published tables agree with the model
SOURCE = f"constants fitted to {_CONSTANTS['source']}; median error there {MEDIAN_ERROR:.0%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The constants of the model. Times are in seconds; `union` is an exponent, `tile` a number of rows."""

    layer_seconds: float
    bandwidth_share: float
    compute_share: float
    round_seconds: float
    request_seconds: float
    union: float
    tile: float


def built_in() -> Constants:
    """The fitted constants."""
    return Constants(**_CONSTANTS["constants"])


def pass_seconds(
    work: Work, gpu: Gpu, constants: Constants, *, requests: float, width: int, context: int
) -> float:
    """The time of a pass with `width` rows for each request, each after `context` rows of cache."""
    c, rows = constants, requests * width
    data = work.dense_bytes + requests * work.cache_bytes(context)
    busy = rows * work.dense_operations / work.dense_rate
    if work.experts:
        reached = experts_reached(work, rows**c.union if width > 1 else rows)
        data += reached * work.expert_bytes
        padded = rows * work.experts_per_token + reached * c.tile / 2
        busy += padded * work.expert_operations / work.expert_rate
    memory = data / (c.bandwidth_share * gpu.bandwidth)
    compute = busy / c.compute_share
    overlapped: float = (memory**3 + compute**3) ** (1 / 3)
    return work.layers * c.layer_seconds + overlapped


def experts_reached(work: Work, rows: float) -> float:
    """The number of experts per layer that this many independent rows reach, if each expert is as likely."""
    missed: float = (1 - work.experts_per_token / work.experts) ** max(1.0, rows)
    return work.experts * (1 - missed)


def plain_seconds(target: Work, gpu: Gpu, constants: Constants, *, requests: float, context: int) -> float:
    """The time of a step of plain decoding: one token for each request."""
    step = pass_seconds(target, gpu, constants, requests=requests, width=1, context=context)
    return step + constants.request_seconds * requests


def round_seconds(
    target: Work,
    drafter: Work,
    gpu: Gpu,
    constants: Constants,
    *,
    requests: float,
    width: int,
    context: int,
) -> float:
    """The time of a round: the drafter's block of `width` rows for each request, and its verification."""
    verify = pass_seconds(target, gpu, constants, requests=requests, width=width, context=context)
    draft = pass_seconds(drafter, gpu, constants, requests=requests, width=width, context=context)
    return verify + draft + constants.round_seconds + constants.request_seconds * requests

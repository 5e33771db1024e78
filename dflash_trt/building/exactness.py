"""Exact mode: the rule of a bundle on this machine, measured once and kept.

Which passes agree depends on the processor or GPU, on the engine's version and on the limits that a bundle was opened
with. So a measurement is kept for all of these, in the cache, and not in the bundle, which may move.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Self

from dflash_trt import hardware
from dflash_trt.building.progress import say
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.bundle.workspace import Progress
from dflash_trt.decoding.pair import FREE, Pair, PassRule
from dflash_trt.decoding.widths import KINDS, READ_AGAIN, Outcome, find_rule, measure, ways
from dflash_trt.engines import registry
from dflash_trt.engines.base import Engine
from dflash_trt.errors import BundleError, DFlashError
from dflash_trt.files.disk import cache_folder, whole_file
from dflash_trt.files.reading import read_object
from dflash_trt.logs import warn_once

_log = logging.getLogger(__name__)
STEP = "compare passes"
# Below this cost, exact mode is on where it has been measured.
FREE_COST = 1.05
# What is measured at first use: answers of so many tokens; where only the GPU is in doubt, of fewer.
TOKENS, LOOK = 48, 16
_BYTES, _TIMED = 1 << 20, 15


@dataclass(frozen=True)
class Exactness:
    """What a measurement found for a bundle on a machine.

    rule: under which a row's bits never depend on its pass; None if there is none.
    cost: the time of a plain pass under the rule, as a share of one without it, for one sequence or for all.
    rows, flips: rows compared without the rule, and the greedy tokens among them that changed, in the worst way.
    most: the rows of the widest pass.
    sequences: the most sequences of a pass.
    """

    rule: PassRule | None
    cost: float
    rows: int
    flips: int
    most: int
    sequences: int

    @property
    def free(self) -> bool:
        """Whether the rule costs next to nothing."""
        rule = self.rule
        return (
            rule is not None and rule.any_batch and rule.any_cut and rule.any_tree and self.cost < FREE_COST
        )

    def describe(self) -> str:
        """The promise and its price, in a line."""
        if self.rule is None:
            return "not possible, as a row's bits depend on more than the width of its pass"
        rule, parts = self.rule, []
        if 0 < len(rule.widths) < self.most:
            parts.append(f"passes of {', '.join(map(str, rule.widths))} rows, others are padded")
        parts += ["one sequence at a time"] * (not rule.any_batch)
        parts += ["reuse of whole prompt chunks only"] * (not rule.any_cut) + ["chains only"] * (
            not rule.any_tree
        )
        parts.append(f"a plain pass takes {self.cost:.2f} times as long")
        return "; ".join(parts if len(parts) > 1 else ["every pass agrees", *parts])

    @classmethod
    def read(cls, values: dict[str, Any]) -> Self:
        """The one of these fields, from JSON. Raises DFlashError for anything else."""
        try:
            rule = None if values["rule"] is None else PassRule.read(values["rule"])
            counts = [int(values[name]) for name in ("rows", "flips", "most", "sequences")]
            return cls(rule, float(values["cost"]), *counts)
        except (KeyError, TypeError, ValueError) as error:
            raise DFlashError(f"a measurement lacks a field or has a wrong one: {error}") from error


def kept(bundle: Bundle, pair: Pair, threads: int | None) -> Exactness | None:
    """The measurement of this bundle on this machine, for at least as many sequences, if there is one."""
    place = place_of(bundle, pair, threads)
    if not place.exists():
        return None
    try:
        measured = Exactness.read(read_object(place, _BYTES, DFlashError)["found"])
        return measured if measured.sequences >= pair.slots else None
    except (DFlashError, KeyError) as error:
        warn_once(_log, f"{place}: {error}; exact mode measures again")
        return None


def settle(
    bundle: Bundle,
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    raw: Sequence[Outcome],
    *,
    threads: int | None,
    tokens: int,
) -> Exactness:
    """Find the rule from a measurement without one (`find_rule`), and keep it.

    tokens: the most tokens of an answer, where it is measured again.
    """
    rule = find_rule(pair, prompts, raw, bundle.manifest, tokens)
    worst = max(raw, key=lambda outcome: outcome.flips / outcome.rows)
    most = bundle.manifest["block_size"]
    measured = Exactness(rule, _cost(pair, rule or FREE), worst.rows, worst.flips, most, pair.slots)
    for slot in range(pair.slots):
        pair.clear(slot)
    document = {"machine": _machine(bundle, pair, threads), "found": asdict(measured)}
    _keep(place_of(bundle, pair, threads), document)
    return measured


def _keep(place: Path, document: Any) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(place) as file:
            file.write(json.dumps(document, indent=1).encode() + b"\n")
    except OSError as error:
        warn_once(_log, f"{place}: cannot be written ({error.strerror}); each process measures again")


def rows_agree(bundle: Bundle, pair: Pair, prompt: Sequence[int], threads: int | None) -> bool:
    """Whether a row has the same bits in every decoding pass: by its kernels, and, as a few passes showed once on this
    machine, by the GPU that runs them.
    """
    if not pair.equal_rows:
        return False
    place = place_of(bundle, pair, threads, "rows")
    with suppress(DFlashError, KeyError, OSError):
        return bool(read_object(place, _BYTES, DFlashError)["equal"])
    widths, kinds = (1, bundle.manifest["block_size"]), ("widths", "batches")
    outcomes = list(measure(pair, [prompt], widths, LOOK, bundle.manifest, kinds=kinds))
    equal = all(outcome.equal == outcome.rows for outcome in outcomes)
    for slot in range(pair.slots):
        pair.clear(slot)
    _keep(place, {"machine": _machine(bundle, pair, threads), "equal": equal})
    return equal


def exactness(
    bundle: Bundle,
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    *,
    threads: int | None,
    progress: Progress,
) -> Exactness:
    """The kept measurement, or a new one, with these prompts. Raises BundleError where exact mode cannot promise."""
    measured = kept(bundle, pair, threads)
    if measured is None:
        begin, most = perf_counter(), bundle.manifest["block_size"]
        say("comparing the passes of this bundle on this machine (once)")
        kinds = READ_AGAIN if rows_agree(bundle, pair, prompts[-1], threads) else KINDS
        widths, outcomes = range(1, most + 1), list[Outcome]()
        steps = len(ways(widths, pair, kinds))
        for outcome in measure(pair, prompts, widths, TOKENS, bundle.manifest, kinds=kinds):
            outcomes.append(outcome)
            progress(STEP, len(outcomes), steps)
        measured = settle(bundle, pair, prompts, outcomes, threads=threads, tokens=TOKENS)
        _log.info(
            "compared the passes of %s in %.1f s: %s",
            bundle.path,
            perf_counter() - begin,
            measured.describe(),
        )
    if measured.rule is None:
        raise BundleError(
            f"{bundle.path}: exact mode is not possible on this machine, as a row's bits depend on more than the width "
            f"of its pass ({measured.flips} of {measured.rows} greedy tokens changed without it); open it without exact"
        )
    return measured


def _cost(pair: Pair, rule: PassRule) -> float:
    """The time of a plain pass under the rule, as a share of one without it: of one sequence, or of as many as there
    are if that is more. Overwrites rows of every slot.
    """
    if rule.padded(1) == 1:
        return 1.0
    shares = []
    for batch in {1, pair.slots if rule.any_batch else 1}:
        seconds: dict[PassRule, list[float]] = {FREE: [], rule: []}
        for _ in range(_TIMED + 1):
            for tried_rule, times in seconds.items():
                pair.rule, begin = tried_rule, perf_counter()
                pair.dummy_verify(batch, 1)
                times.append(perf_counter() - begin)
        shares.append(median(seconds[rule][1:]) / median(seconds[FREE][1:]))
    pair.rule = FREE
    return max(shares)


def place_of(bundle: Bundle, pair: Pair, threads: int | None, kind: str = "exact") -> Path:
    """The file in the cache for what was measured of a bundle on this machine with so many threads."""
    text = json.dumps(_machine(bundle, pair, threads), sort_keys=True)
    name = f"{bundle.manifest['key'][:16]}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    return cache_folder() / kind / name


def threads_of(engine: Engine, asked: int | None) -> int:
    """The threads of passes on the host, of a bundle that was opened with so many. torch's are the process's: as its
    environment says, or as the latest bundle was opened.
    """
    torch = sys.modules.get("torch") if "torch" in engine.modules else None
    return int(torch.get_num_threads()) if torch else asked or hardware.cores() or 1


def _machine(bundle: Bundle, pair: Pair, threads: int | None) -> dict[str, Any]:
    """All that the bits of a pass may depend on."""
    engine = registry.engine_of(bundle)
    names = ("dflash_trt", "numpy", *engine.modules)
    gpus = hardware.gpus() if "torch" in engine.modules else []
    versions = {n: getattr(sys.modules.get(n), "__version__", None) for n in names if n in sys.modules}
    return {
        "bundle": bundle.manifest["manifest_sha256"],
        "processor": hardware.processor_name(),
        "threads": threads_of(engine, threads),
        "gpus": [[gpu.get("name"), gpu.get("driver_version")] for gpu in gpus],
        "versions": versions,
        "prefill_chunk": pair.prefill_chunk,
        "products": [*pair.products],
    }

"""The setting that serves the most tokens at a given speed per user, and the file that `build --from-plan` reads.

docs/planning.md describes the file. plan.schema.json is its JSON schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_trt.errors import RequestError, UsageError, quoted, show
from dflash_trt.files.reading import read_object
from dflash_trt.planning.acceptance import Acceptance
from dflash_trt.planning.curve import Layout, Point, batches

FORMAT, VERSION = "dflash-trt plan", 1
_EXPECTED = "expected tpot=MILLISECONDS, such as tpot=12.5"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A setting: `batch` requests at a time on each group of `gpus` GPUs.

    precision: as for `build`; None: as stored. block_size: of the build. schedule: numbers of active requests, each
    with the block length up to it; the last is `batch`. A block length of 1 is plain decoding. speed: tokens per second
    of one user, with `batch` of them. throughput: tokens per second of one GPU. users: on a whole node.
    """

    precision: str | None
    gpus: int
    batch: int
    block_size: int
    schedule: tuple[tuple[int, int], ...]
    speed: float
    throughput: float
    users: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer to an SLO: for which pair, engine and machine, and what was chosen.

    gpu: a name of `plan --gpus`, or None for a machine without GPUs. context: rows behind each request.
    """

    target: str
    drafter: str | None
    engine: str
    gpu: str | None
    tpot: float
    context: int
    times: str
    acceptance: str
    choice: Choice

    def to_dict(self) -> dict[str, Any]:
        """The content of the plan's file. Times are in milliseconds."""
        choice = asdict(self.choice)
        speeds = {name: round(choice.pop(name), 2) for name in ("speed", "throughput")}
        choice["schedule"] = [{"requests": n, "block": block} for n, block in self.choice.schedule]
        return {
            "format": FORMAT,
            "version": VERSION,
            "target": self.target,
            "drafter": self.drafter,
            "engine": self.engine,
            "gpu": self.gpu,
            "slo": {"tpot_ms": self.tpot},
            "context": self.context,
            "times": self.times,
            "acceptance": self.acceptance,
            "choice": {
                **choice,
                "tokens_per_second_per_user": speeds["speed"],
                "tokens_per_second_per_gpu": speeds["throughput"],
            },
        }


def parse_slo(text: str) -> float:
    """`tpot=12.5`: the most milliseconds per output token. Raises RequestError for anything else."""
    name, _, value = text.strip().lower().partition("=")
    if name == "ttft":
        raise UsageError(
            f"--slo {show(text)}: the model of times has no prefill, so it cannot plan a time to the first token; "
            f"{_EXPECTED}"
        )
    try:
        tpot = float(value.removesuffix("ms"))
    except ValueError:
        tpot = 0.0
    if name != "tpot" or not 0 < tpot < 1e6:
        raise UsageError(f"--slo {show(text)}: {_EXPECTED}")
    return tpot


def choose(
    layouts: Sequence[Layout],
    acceptance: Acceptance,
    *,
    blocks: Sequence[int],
    tpot: float,
    node: int,
    precision: str | None,
) -> Choice | None:
    """The setting with the highest throughput per GPU among those that take at most `tpot` milliseconds a token.

    None where no setting is that fast.
    """
    best: tuple[float, Layout, Point] | None = None
    for layout in layouts:
        for batch in batches(layout.most):
            found = fastest(layout, acceptance, batch, blocks)
            if found is None or found[1] * tpot < 1e3:
                continue
            block, speed = found
            throughput = batch * speed / layout.gpus
            if best is None or throughput > best[0]:
                point = Point(
                    method=str(block), gpus=layout.gpus, batch=batch, speed=speed, throughput=throughput
                )
                best = throughput, layout, point
    if best is None:
        return None
    _, layout, point = best
    schedule = block_schedule(layout, acceptance, point.batch, blocks)
    return Choice(
        precision=precision,
        gpus=point.gpus,
        batch=point.batch,
        block_size=max(schedule[0][1], min(blocks)),
        schedule=schedule,
        speed=point.speed,
        throughput=point.throughput,
        users=point.batch * (node // point.gpus),
    )


def fastest(
    layout: Layout, acceptance: Acceptance, batch: int, blocks: Sequence[int]
) -> tuple[int, float] | None:
    """The block length with the most tokens per second and user at this batch, and that speed; 1 is plain decoding."""
    speeds = {1: _speed(1.0, layout.plain(batch))}
    speeds |= {block: _speed(acceptance.length(block), layout.round(batch, block)) for block in blocks}
    block = max(speeds, key=lambda name: speeds[name])
    return (block, speeds[block]) if speeds[block] > 0 else None


def block_schedule(
    layout: Layout, acceptance: Acceptance, most: int, blocks: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """The best block length by the number of active requests, as steps (up to so many requests, block length).

    It never rises with the number: TensorRT-LLM's schedule begins with the longest drafts.
    """
    steps: list[tuple[int, int]] = []
    allowed = list(blocks)
    for batch in range(1, most + 1):
        found = fastest(layout, acceptance, batch, allowed)
        block = found[0] if found is not None else 1
        allowed = [each for each in allowed if each <= block]
        if steps and steps[-1][1] == block:
            steps.pop()
        steps.append((batch, block))
    return tuple(steps)


def _speed(tokens: float, seconds: float | None) -> float:
    return 0.0 if seconds is None else tokens / seconds


def read_plan(path: Path) -> Plan:
    """Read the file that `plan --slo --json` writes. Raises RequestError that names the file and the field."""
    values = read_object(path, kind=RequestError)
    if values.get("format") != FORMAT:
        raise RequestError(
            f"{path}: format is {quoted(values.get('format'))}, expected {FORMAT!r}; "
            "`dflash-trt plan --slo tpot=12.5 --json ...` writes such a file"
        )
    if values.get("version") != VERSION:
        raise RequestError(
            f"{path}: version is {quoted(values.get('version'))}, but this program reads version {VERSION}; make the "
            "plan again"
        )
    fields = _Fields(path, "", values)
    choice = _Fields(path, "choice.", fields.take("choice", dict))
    steps = [
        _Fields(path, f"choice.schedule[{i}].", row) for i, row in enumerate(choice.take("schedule", list))
    ]
    schedule = tuple((step.number("requests"), step.number("block")) for step in steps)
    batch, block_size = choice.number("batch"), choice.number("block_size", least=2)
    counts, lengths = [n for n, _ in schedule], [block for _, block in schedule]
    if not schedule or counts != sorted(set(counts)) or counts[-1] != batch:
        raise RequestError(
            f"{path}: choice.schedule has {counts or 'no'} requests, expected rising numbers up to {batch}"
        )
    if lengths != sorted(lengths, reverse=True) or lengths[0] > block_size:
        raise RequestError(
            f"{path}: choice.schedule has blocks of {lengths}, expected falling ones of at most {block_size}"
        )
    slo = _Fields(path, "slo.", fields.take("slo", dict))
    return Plan(
        target=fields.take("target", str),
        drafter=fields.take("drafter", str, type(None)),
        engine=fields.take("engine", str),
        gpu=fields.take("gpu", str, type(None)),
        tpot=slo.take("tpot_ms", int, float),
        context=fields.number("context"),
        times=fields.take("times", str),
        acceptance=fields.take("acceptance", str),
        choice=Choice(
            precision=choice.take("precision", str, type(None)),
            gpus=choice.number("gpus"),
            batch=batch,
            block_size=block_size,
            schedule=schedule,
            speed=choice.take("tokens_per_second_per_user", int, float),
            throughput=choice.take("tokens_per_second_per_gpu", int, float),
            users=choice.number("users"),
        ),
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of an object in a file, by their kinds."""

    path: Path
    place: str
    values: Any

    def take(self, name: str, *kinds: type) -> Any:
        value = self.values.get(name, ...) if isinstance(self.values, Mapping) else ...
        if type(value) not in kinds:
            shown = "missing" if value is ... else quoted(value)
            raise RequestError(f"{self.path}: {self.place}{name} is {shown}; make the plan again")
        return value

    def number(self, name: str, least: int = 1) -> int:
        value = self.take(name, int)
        if value < least:
            raise RequestError(f"{self.path}: {self.place}{name} is {value}, expected {least} or more")
        return int(value)

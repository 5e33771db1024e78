"""Several drafters for one target: what each drafts, what that costs, and how fast the pair is."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

from dflash_trt.building.build import build
from dflash_trt.building.sources import resolve_pair
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.bundle.workspace import Progress, silent
from dflash_trt.decoding.options import DraftingOptions
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.statistics import Statistics
from dflash_trt.errors import RequestError, UsageError
from dflash_trt.files.reading import parse_object, read_text
from dflash_trt.hardware import processor
from dflash_trt.llm import LLM
from dflash_trt.prompts import Prompt

_WARM_UP_TOKENS = 4
_ANSWERS_BYTES = 1 << 30
# The ways to decode with a drafter, and how tables and charts call them.
WHOLE, ADAPTIVE, TREE, ADAPTIVE_TREE = "whole", "adaptive", "tree", "adaptive_tree"
TITLES = {
    WHOLE: "whole blocks",
    ADAPTIVE: "adaptive length",
    TREE: "trees",
    ADAPTIVE_TREE: "adaptive trees",
}


@dataclass
class Method:
    """One way to decode at one temperature: plain, or with a drafter."""

    name: str
    temperature: float
    way: str = ""  # a key of TITLES; empty: plain
    options: DraftingOptions = field(default_factory=DraftingOptions)
    statistics: list[tuple[str, Statistics]] = field(default_factory=list)  # by prompt, with its category
    tokens: list[Sequence[int]] = field(default_factory=list)

    def figures(self, places: int, category: str | None = None) -> dict[str, Any]:
        """Figures of a category, or of all: the speed after the first token, and milliseconds of a round's parts."""
        total = Statistics.merge(s for c, s in self.statistics if category in (None, c))
        later = total.num_generation_tokens - total.num_requests
        rounds = max(1, sum(total.block_length_histogram))
        parts = {"draft": total.draft_time, "verify": total.verify_time, "host": total.host_time}
        accepted = total.num_accepted_tokens_per_pos[:places]
        return {
            "tokens_per_second": round(later / total.generation_time, 1) if total.generation_time else 0.0,
            "acceptance_length": round(total.mean_acceptance_length, 3),
            "acceptance_by_place": [round(count / max(total.num_drafts, 1), 3) for count in accepted],
            "round_ms": {name: round(1e3 * seconds / rounds, 3) for name, seconds in parts.items()},
            "tokens": total.num_generation_tokens,
            "rounds": sum(total.block_length_histogram),
            "trees": total.num_trees,
            "mean_tree_nodes": round(total.mean_tree_nodes, 1),
        }


class Answers:
    """The answers of a comparison so far, in `decoded.jsonl` of its directory.

    The first line says what was asked for, and of which bundles. Each further line has the answers to one prompt: the
    statistics and the tokens of every method.
    """

    def __init__(self, work: Path, bundles: Sequence[Bundle], asked_for: Sequence[str]) -> None:
        """`work` exists. Raises RequestError if it has answers of other bundles, or to other questions."""
        self._file = work / "decoded.jsonl"
        self._lines: list[dict[str, Any]] = []
        keys = [bundle.manifest["key"] for bundle in bundles]
        head = json.dumps({"asked_for": sha256("\0".join([*keys, *asked_for]).encode()).hexdigest()})
        if not self._file.exists():
            self._file.write_text(head + "\n", encoding="utf-8")
            return
        first, *lines = read_text(self._file, _ANSWERS_BYTES, RequestError).split("\n")
        if first != head:
            raise RequestError(
                f"{work}: holds a comparison of other checkpoints, prompts or options; choose another directory"
            )
        self._lines = [parse_object(line, str(self._file), RequestError) for line in lines[:-1]]
        if cut := len(lines[-1].encode()):  # a line that is not ended was cut off
            os.truncate(self._file, self._file.stat().st_size - cut)

    def give(self, methods: Sequence[Method], prompts: Sequence[Prompt]) -> None:
        """Give the methods what they answered."""
        for line, prompt in zip(self._lines, prompts, strict=False):
            for method, (statistics, tokens) in zip(methods, line["answers"], strict=True):
                method.statistics.append((prompt.category, Statistics(**statistics)))
                method.tokens.append(tokens)

    def add(self, methods: Sequence[Method]) -> None:
        """Note the last answer of each method."""
        last = [[asdict(method.statistics[-1][1]), list(method.tokens[-1])] for method in methods]
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"answers": last}) + "\n")


def compare(
    target: str,
    drafters: Sequence[str],
    prompts: Sequence[Prompt],
    work: Path,
    *,
    max_tokens: int,
    temperatures: Sequence[float] = (0.0,),
    tree_width: int | None = None,
    tree_nodes: int = 0,
    threads: int | None = None,
    seconds: float = inf,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Build every pair in `work` and decode every prompt by every method, one after the other on ONNX Runtime.

    After `seconds` of decoding no further prompt begins. The next call with the same arguments and `work` continues
    from there, and its figures are of all prompts so far.

    tree_width: the candidates for each place. With more than one, the drafters are compared with trees too, of
    `tree_nodes` nodes and of the number that is expected to be fastest. Their chains come from the same bundles.

    The methods take turns at each prompt, in another order each time. So a slow moment of the machine meets all of
    them. Prompt i has seed i. Returns the figures for JSON, with an entry of "runs" for each temperature.

    Raises RequestError if two drafters have one name, or if `work` has answers of other arguments, and any error of
    the builds.
    """
    bundles = _build(target, drafters, work, tree_width, progress)
    asked_for = [max_tokens, *temperatures, tree_nodes, threads, *(f"{p.id} {p.content}" for p in prompts)]
    answers = Answers(work, list(bundles.values()), [*map(str, asked_for)])
    kinds = {name: _kind(bundle.manifest) for name, bundle in bundles.items()}
    methods = [each for t in temperatures for each in _methods(kinds, t, tree_nodes)]
    with ExitStack() as stack:
        opened = {
            name: LLM(bundle.path, max_batch_size=1, prefix_cache_bytes=0, threads=threads)
            for name, bundle in bundles.items()
        }
        llms = {name: stack.enter_context(llm) for name, llm in opened.items()}
        first = next(iter(llms.values()))
        asked = [p.content if isinstance(p.content, str) else first.chat_prompt(p.content) for p in prompts]
        done = decode(
            methods, llms, prompts, asked, answers, max_tokens=max_tokens, seconds=seconds, progress=progress
        )
    runs = [_run([m for m in methods if m.temperature == t], kinds, prompts[:done]) for t in temperatures]
    return {
        "target": resolve_pair(target, drafters[0])[0].directory.name if Path(target).is_dir() else target,
        "processor": processor(),
        "prompts": done,
        "max_tokens": max_tokens,
        "tree_nodes": tree_nodes,
        "same_tokens": all(run["same_tokens"] for run in runs),
        "runs": runs,
    }


def _build(
    target: str, drafters: Sequence[str], work: Path, tree_width: int | None, progress: Progress
) -> dict[str, Bundle]:
    """A bundle of the target with each drafter, by the drafters' names."""
    bundles: dict[str, Bundle] = {}
    for number, (name, drafter) in enumerate(zip(_names(drafters), drafters, strict=True)):
        progress("build pairs", number, len(drafters))
        place = work / f"bundle{number}"
        bundles[name] = build(target, drafter, place, weights="link", tree_width=tree_width, force=True)
    progress("build pairs", len(drafters), len(drafters))
    return bundles


def _kind(manifest: Mapping[str, Any]) -> dict[str, Any]:
    drafter = manifest["drafter"]
    shown = {name: drafter[name] for name in ("architecture", "parameters")}
    return {"drafter": drafter["name"], **shown, "block_size": manifest["block_size"]}


def decode(
    methods: Sequence[Method],
    llms: Mapping[str, LLM],
    prompts: Sequence[Prompt],
    asked: Sequence[str | list[int]],
    answers: Answers,
    *,
    max_tokens: int,
    seconds: float = inf,
    progress: Progress = silent,
) -> int:
    """Decode prompts by every method in turn, after those that `answers` has. Returns the number of prompts so far.

    llms: by the methods' names. asked: the prompts as `LLM.generate` takes them. See `compare`.
    """
    answers.give(methods, prompts)
    done = first = len(methods[0].statistics)
    warm_up = SamplingParams(max_tokens=_WARM_UP_TOKENS, ignore_eos=True)
    for each in methods if first < len(prompts) else ():
        llms[each.name].generate(asked[0], warm_up, **each.options)
    begin = perf_counter()
    while done < len(prompts) and (done == first or perf_counter() - begin <= seconds):
        progress("decode", done, len(prompts))
        for each in _turned(methods, done):
            params = SamplingParams(max_tokens=max_tokens, temperature=each.temperature, seed=done)
            answer = llms[each.name].generate(asked[done], params, **each.options)
            each.statistics.append((prompts[done].category, answer.statistics))
            each.tokens.append(answer.token_ids)
        answers.add(methods)
        done += 1
    progress("decode", done, len(prompts))
    return done


def _methods(kinds: Mapping[str, Mapping[str, Any]], temperature: float, tree_nodes: int) -> Iterator[Method]:
    """Plain decoding, and every way with every drafter."""
    yield Method(next(iter(kinds)), temperature, options={"speculate": False})
    for name, kind in kinds.items():
        ways: dict[str, DraftingOptions] = {
            WHOLE: {"block_length": kind["block_size"], "tree_nodes": 0},
            ADAPTIVE: {"tree_nodes": 0},
        }
        if tree_nodes:
            ways |= {TREE: {"tree_nodes": tree_nodes}, ADAPTIVE_TREE: {}}
        for way, options in ways.items():
            yield Method(name, temperature, way, options)


def _run(
    methods: Sequence[Method], kinds: Mapping[str, Mapping[str, Any]], prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """The figures of one temperature."""
    plain = methods[0].figures(0)
    categories = list(dict.fromkeys(prompt.category for prompt in prompts))
    drafters = []
    for name, kind in kinds.items():
        places = kind["block_size"] - 1
        drafters.append({"name": name, **kind})
        for each in methods:
            if each.name == name and each.way:
                by_category = {category: each.figures(places, category) for category in categories}
                drafters[-1][each.way] = {**each.figures(places), "categories": by_category}
    return {
        "temperature": methods[0].temperature,
        "same_tokens": all(each.tokens == methods[0].tokens for each in methods),
        "plain": {name: plain[name] for name in ("tokens_per_second", "tokens", "round_ms")},
        "drafters": drafters,
    }


def _names(drafters: Sequence[str]) -> list[str]:
    """The shortest ends of the paths that differ."""
    for count in range(1, max(len(Path(each).parts) for each in drafters) + 1):
        names = ["/".join(Path(each).parts[-count:]) for each in drafters]
        if len(set(names)) == len(names):
            return names
    raise UsageError(f"--drafter names one drafter twice: {', '.join(drafters)}")


def _turned(methods: Sequence[Method], number: int) -> Iterator[Method]:
    """The methods, begun with another one each time."""
    begin = number % len(methods)
    yield from (*methods[begin:], *methods[:begin])


def rows_of(run: Mapping[str, Any]) -> list[list[str]]:
    """The table of one temperature: acceptance, costs and speeds, against plain decoding."""
    plain = run["plain"]
    speed = plain["tokens_per_second"]
    heading = ["drafter", "drafts", "tokens per pass", "draft ms", "verify ms", "tokens/s", "by place"]
    rows = [heading, ["(none)", "", "1.00", "", f"{plain['round_ms']['verify']:.1f}", f"{speed:.1f}", ""]]
    for each in run["drafters"]:
        for way, title in TITLES.items():
            if way not in each:
                continue
            figures = each[way]
            drafted = figures["tokens_per_second"]
            if way == TREE:
                title = f"{title} of {figures['mean_tree_nodes']:.0f}"
            times = [f"{figures['round_ms'][part]:.1f}" for part in ("draft", "verify")]
            relative = f"{drafted:.1f} ({drafted / speed:.2f}x)" if speed else f"{drafted:.1f}"
            row = [title, f"{figures['acceptance_length']:.2f}", *times, relative]
            places = " ".join(f"{share:.2f}" for share in figures["acceptance_by_place"])
            rows.append([each["name"], *row, places] if way == WHOLE else ["", *row, ""])
    return rows


def categories_of(run: Mapping[str, Any]) -> list[list[str]]:
    """The table of tokens per pass by category: in whole blocks, and with trees."""
    columns = [
        (each["name"] if way == WHOLE else f"{each['name']}, trees", each[way]["categories"])
        for each in run["drafters"]
        for way in (WHOLE, TREE)
        if way in each
    ]
    rows = [["category", *(name for name, _ in columns)]]
    for category in columns[0][1]:
        figures = [categories[category]["acceptance_length"] for _, categories in columns]
        rows.append([category, *(f"{length:.2f}" for length in figures)])
    return rows


def chart_of(result: Mapping[str, Any]) -> str:
    """An SVG of two panels: tokens per pass, and tokens per second against plain decoding, of the first temperature.

    The groups of the first are the categories, those of the second the ways to decode.
    """
    from dflash_trt.reports.charts import bars_chart

    run = result["runs"][0]
    each, plain = run["drafters"], run["plain"]["tokens_per_second"]
    accepted = {
        category: {d["name"]: d[WHOLE]["categories"][category]["acceptance_length"] for d in each}
        for category in each[0][WHOLE]["categories"]
    }
    speeds = {
        title: {d["name"]: d[way]["tokens_per_second"] / plain for d in each}
        for way, title in TITLES.items()
        if plain and all(way in d for d in each)
    }
    return bars_chart(
        {"tokens per pass": accepted, "times plain decoding": speeds},
        title=f"Drafters of {result['target']}, temperature {run['temperature']:g}",
    )

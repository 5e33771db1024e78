"""Several drafters for one target: what each drafts, what that costs, and how fast the pair is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_trt.building.build import build
from dflash_trt.building.sources import resolve_pair
from dflash_trt.bundle.workspace import Progress, silent
from dflash_trt.decoding.params import Completion, SamplingParams
from dflash_trt.decoding.statistics import Statistics
from dflash_trt.errors import RequestError
from dflash_trt.hardware import processor
from dflash_trt.llm import LLM
from dflash_trt.prompts import Prompt

_WARM_UP_TOKENS = 16
WHOLE, ADAPTIVE = "whole", "adaptive"


@dataclass
class Method:
    """One way to decode: plain, or with a drafter, in whole blocks or in blocks of adaptive length."""

    name: str
    length: str = ""  # WHOLE or ADAPTIVE; empty: plain
    found: list[tuple[str, Statistics]] = field(default_factory=list)  # by prompt, with its category
    tokens: list[Sequence[int]] = field(default_factory=list)

    def run(self, llm: LLM, prompt: str | list[int], params: SamplingParams) -> Completion:
        if not self.length:
            return llm.generate(prompt, params, speculate=False)
        return llm.generate(prompt, params, block_length=llm.block_size if self.length == WHOLE else None)

    def figures(self, category: str | None = None) -> dict[str, Any]:
        """Figures of a category, or of all: the speed behind the first token, and milliseconds of a round's parts."""
        total = Statistics.merge(s for c, s in self.found if category in (None, c))
        later = total.num_generation_tokens - total.num_requests
        rounds = max(1, sum(total.block_length_histogram))
        parts = {"draft": total.draft_time, "verify": total.verify_time, "host": total.host_time}
        return {
            "tokens_per_second": round(later / total.generation_time, 1) if total.generation_time else 0.0,
            "acceptance_length": round(total.mean_acceptance_length, 3),
            "acceptance_by_place": [
                round(count / max(total.num_drafts, 1), 3) for count in total.num_accepted_tokens_per_pos
            ],
            "round_ms": {name: round(1e3 * seconds / rounds, 3) for name, seconds in parts.items()},
            "tokens": total.num_generation_tokens,
            "rounds": sum(total.block_length_histogram),
        }


def compare(
    target: str,
    drafters: Sequence[str],
    prompts: Sequence[Prompt],
    work: Path,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    threads: int | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Build every pair in `work` and decode every prompt by every method, one after the other on ONNX Runtime.

    The methods take turns at each prompt, in another order each time. So a slow moment of the machine meets all of
    them. Prompt i has seed i. Returns the figures for JSON.

    Raises RequestError if two drafters have one name, and any error of the builds.
    """
    names = _names(drafters)
    with ExitStack() as stack:
        llms: dict[str, LLM] = {}
        kinds: dict[str, Any] = {}
        for number, (name, drafter) in enumerate(zip(names, drafters, strict=True)):
            progress("build pairs", number, len(names))
            bundle = build(target, drafter, work / f"bundle{number}", weights="link")
            manifest = bundle.manifest
            kinds[name] = {
                "drafter": manifest["drafter"]["name"],
                "architecture": manifest["drafter"]["architecture"],
                "parameters": manifest["drafter"]["parameters"],
                "block_size": manifest["block_size"],
            }
            llm = LLM(bundle.path, max_batch_size=1, prefix_cache_bytes=0, threads=threads)
            llms[name] = stack.enter_context(llm)
        progress("build pairs", len(names), len(names))
        methods = [Method(names[0])]
        methods += [Method(name, length) for name in names for length in (WHOLE, ADAPTIVE)]
        first = llms[names[0]]
        asked = [p.content if isinstance(p.content, str) else first.chat_prompt(p.content) for p in prompts]
        for method in methods:
            method.run(
                llms[method.name], asked[0], SamplingParams(max_tokens=_WARM_UP_TOKENS, ignore_eos=True)
            )
        for number, (prompt, text) in enumerate(zip(prompts, asked, strict=True)):
            progress("decode", number, len(prompts))
            params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=number)
            for method in _turned(methods, number):
                answer = method.run(llms[method.name], text, params)
                method.found.append((prompt.category, answer.statistics))
                method.tokens.append(answer.token_ids)
        progress("decode", len(prompts), len(prompts))
    categories = list(dict.fromkeys(prompt.category for prompt in prompts))
    plain = methods[0].figures()
    return {
        "target": resolve_pair(target, drafters[0])[0].directory.name if Path(target).is_dir() else target,
        "processor": processor(),
        "prompts": len(prompts),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "same_tokens": all(method.tokens == methods[0].tokens for method in methods),
        "plain": {name: plain[name] for name in ("tokens_per_second", "tokens", "round_ms")},
        "drafters": [
            {
                "name": name,
                **kinds[name],
                **{
                    method.length: {
                        **method.figures(),
                        "categories": {category: method.figures(category) for category in categories},
                    }
                    for method in methods
                    if method.name == name and method.length
                },
            }
            for name in names
        ],
    }


def _names(drafters: Sequence[str]) -> list[str]:
    """The shortest ends of the paths that differ."""
    for count in range(1, max(len(Path(each).parts) for each in drafters) + 1):
        names = ["/".join(Path(each).parts[-count:]) for each in drafters]
        if len(set(names)) == len(names):
            return names
    raise RequestError(f"--drafter names one drafter twice: {', '.join(drafters)}")


def _turned(methods: Sequence[Method], number: int) -> Iterator[Method]:
    """The methods, begun with another one each time."""
    begin = number % len(methods)
    yield from (*methods[begin:], *methods[:begin])


def rows_of(result: Mapping[str, Any]) -> list[list[str]]:
    """The table: acceptance and costs of whole blocks, and speeds against plain decoding."""
    plain = result["plain"]
    speed = plain["tokens_per_second"]
    heading = [
        "drafter",
        "tokens per pass",
        "draft ms",
        "verify ms",
        "tokens/s",
        "adaptive tokens/s",
        "by place",
    ]
    rows = [heading, ["(none)", "1.00", "", f"{plain['round_ms']['verify']:.1f}", f"{speed:.0f}", "", ""]]
    for each in result["drafters"]:
        whole, adaptive = each[WHOLE], each[ADAPTIVE]

        def against(figures: Mapping[str, Any]) -> str:
            found = figures["tokens_per_second"]
            return f"{found:.0f} ({found / speed:.2f}x)" if speed else f"{found:.0f}"

        rows.append(
            [
                each["name"],
                f"{whole['acceptance_length']:.2f}",
                f"{whole['round_ms']['draft']:.1f}",
                f"{whole['round_ms']['verify']:.1f}",
                against(whole),
                against(adaptive),
                " ".join(f"{share:.2f}" for share in whole["acceptance_by_place"]),
            ]
        )
    return rows


def categories_of(result: Mapping[str, Any]) -> list[list[str]]:
    """The table of tokens per pass by category, in whole blocks."""
    each = result["drafters"]
    categories = list(each[0][WHOLE]["categories"])
    rows = [["category", *(drafter["name"] for drafter in each)]]
    for category in categories:
        figures = [drafter[WHOLE]["categories"][category] for drafter in each]
        rows.append([category, *(f"{part['acceptance_length']:.2f}" for part in figures)])
    return rows


def chart_of(result: Mapping[str, Any]) -> str:
    """An SVG of two panels: tokens per pass by category, and tokens per second."""
    from dflash_trt.reports.charts import bars_chart

    each = result["drafters"]
    categories = list(each[0][WHOLE]["categories"])
    accepted = {
        category: {d["name"]: d[WHOLE]["categories"][category]["acceptance_length"] for d in each}
        for category in categories
    }
    speeds: dict[str, dict[str, float]] = {
        "plain": {d["name"]: result["plain"]["tokens_per_second"] for d in each}
    }
    for length in (WHOLE, ADAPTIVE):
        speeds[length] = {d["name"]: d[length]["tokens_per_second"] for d in each}
    return bars_chart(
        {"tokens per pass": accepted, "tokens per second": speeds}, title=f"Drafters of {result['target']}"
    )

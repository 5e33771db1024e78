"""Other programs on the same GPU, in turn with this package: a pair of a known one's shape with random weights.

    python -m build_scripts.bench.gpu_peers [--pair qwen3-8b] [--layers 36] [--tokens 64] [--requests 1,32]

A line for each way, as it is known, with the milliseconds of a target's pass, drafts between passes included, and the
tokens per second: this package, plain and with whole blocks; Transformers' `generate`, by itself and with static
caches, which it compiles on a GPU; its continuous batching; its DFlash, in its one class of such drafters; and z-lab's
`dflash`. Random drafts are wrong, so a round gives one token. What is not installed, or fails, says so. The last line
is one JSON document. Without a GPU, one layer of qwen3-4b runs in float32.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from build_scripts import harness
from build_scripts.random_pair import write_pair
from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.cli.options import at_least, list_of
from dflash_trt.formats.precision import parse_precision

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
# Passes and tokens of a call.
Counted = tuple[int, int]
PROMPT = [1] * 16


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--pair", default="qwen3-8b" if GPU else "qwen3-4b")
    parser.add_argument("--layers", type=at_least(1), default=36 if GPU else 1)
    parser.add_argument("--tokens", type=at_least(2), default=64 if GPU else 2)
    parser.add_argument("--requests", type=list_of(at_least(1)), default=[1, 32] if GPU else [1, 2])
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        write_pair(Path(folder), args.pair, args.layers, None)
        for ways in (_ours, _transformers, _zlab):
            try:
                for name, way in ways(Path(folder), args.tokens, args.requests):
                    found.append(_timed(name, way))
            except Exception as error:  # of another program, or it is not there
                found.append(
                    {"way": ways.__name__.strip("_"), "failed": f"{type(error).__name__}: {error}"[:300]}
                )
                print(json.dumps(found[-1]), flush=True)
    device = torch.cuda.get_device_name() if GPU else "CPU"
    print(json.dumps({"device": device, "pair": args.pair, "layers": args.layers, "ways": found}))


def _timed(name: str, way: Callable[[], Counted]) -> dict[str, Any]:
    """Its second call: the first one compiles."""
    row: dict[str, Any] = {"way": name}
    try:
        way()
        begin = perf_counter()
        passes, tokens = way()
        taken = perf_counter() - begin
        row |= {"ms of a pass": round(1e3 * taken / passes, 3), "tokens/s": round(tokens / taken, 1)}
    except Exception as error:  # another way may work
        row["failed"] = f"{type(error).__name__}: {error}"[:300]
    print(json.dumps(row), flush=True)
    return row


Ways = Iterator[tuple[str, Callable[[], Counted]]]


def _ours(folder: Path, tokens: int, requests: Sequence[int]) -> Ways:
    precision = "target=bf16,drafter=bf16" if GPU else "target=fp32,drafter=fp32"
    bundle = build(
        *(str(folder / "target"), str(folder / "drafter"), folder / "bundle"),
        engine="torch",
        weights="link",
        max_seq_len=512,
        precision=parse_precision(precision),
    )
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    with LLM(bundle.path, max_batch_size=max(requests), prefix_cache_bytes=0) as llm:

        def answered(count: int, length: int) -> Counted:
            done = llm.generate([PROMPT] * count, params, block_length=length)
            most = max(sum(each.statistics.block_length_histogram) for each in done)
            return most + 1, sum(len(each.token_ids) for each in done)

        for count in requests:
            yield f"dflash-trt, plain, {count}", partial(answered, count, 1)
            yield f"dflash-trt, drafts, {count}", partial(answered, count, llm.block_size)


def _model(folder: Path) -> tuple[Any, Any]:
    """The target in Transformers, and a prompt."""
    model: Any = import_module("transformers").AutoModelForCausalLM.from_pretrained(
        folder / "target", dtype=DTYPE
    )
    return model.to(DEVICE).eval(), torch.tensor([PROMPT], device=DEVICE)


def _transformers(folder: Path, tokens: int, requests: Sequence[int]) -> Ways:
    transformers: Any = import_module("transformers")
    model, ids = _model(folder)
    common = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}

    def generated(**options: Any) -> Counted:
        done = model.generate(ids, attention_mask=torch.ones_like(ids), **common, **options)
        made = done.shape[1] - ids.shape[1]
        return made, made  # random drafts are wrong

    yield "Transformers, plain, 1", generated
    yield "Transformers, static caches, 1", partial(generated, cache_implementation="static")
    config = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1)
    for count in requests:

        def batched(count: int = count) -> Counted:
            done = model.generate_batch([PROMPT] * count, generation_config=config)
            return tokens, sum(len(each.generated_tokens) for each in done.values())

        yield f"Transformers, continuous batching, {count}", batched
    fields = json.loads((folder / "drafter" / "config.json").read_text())
    fields |= fields["dflash_config"] | {"sliding_window": (fields.get("sliding_window") or 2) - 1}
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": fields["rope_theta"]}
    names = {n: v for n, v in fields.items() if n not in ("model_type", "dflash_config", "rope_scaling")}
    assistant = transformers.MuseGlimmerAssistantModel(transformers.MuseGlimmerAssistantConfig(**names))
    assistant = assistant.to(DEVICE, DTYPE).eval()
    yield "Transformers, DFlash, 1", partial(generated, assistant_model=assistant, speculation_type="dflash")


def _zlab(folder: Path, tokens: int, requests: Sequence[int]) -> Ways:
    zlab: Any = import_module("dflash.model")
    model, ids = _model(folder)
    drafter = zlab.DFlashDraftModel.from_pretrained(folder / "drafter", dtype=DTYPE).to(DEVICE).eval()

    def drafted() -> Counted:
        found = zlab.dflash_generate(drafter, model, ids, tokens, None)
        made = found.shape[1] - ids.shape[1]
        return made, made  # random drafts are wrong

    yield "z-lab's dflash, 1", drafted


if __name__ == "__main__":
    main()

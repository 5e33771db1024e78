"""Time of passes of a hybrid target, against a target of the same size in which every layer is attention.

    python -m build_scripts.bench.hybrid [--contexts 128,1024,4096] [--rows 1,4,8,16] [--rounds 8] [--threads 2]

Both targets are random, in float32 on ONNX Runtime: 8 layers of 1,024 numbers. The hybrid has 6 layers of Gated
DeltaNet with states of 8 x 128 x 128, and 2 of attention. A pass of it first replays half of its rows, as after a block
of which half was accepted. Passes of both targets take turns. Times are in milliseconds, the least of all rounds.
Tokens are random. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.engines.onnxruntime import OnnxRuntimeEngine
from dflash_trt.engines.onnxruntime_states import POSITION, HybridCaches
from dflash_trt.graph.onnxruntime import OnnxRuntime
from dflash_trt.models.configs import read_target_config
from dflash_trt.models.target import build_target

COMMON: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "max_position_embeddings": 8192,
}
ATTENTION: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 3072,
}
HYBRID: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "intermediate_size": 3200,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", default="128,1024,4096", help="tokens before the pass")
    parser.add_argument("--rows", default="1,4,8,16", help="rows of a pass")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    contexts, rows = ([int(n) for n in text.split(",")] for text in (args.contexts, args.rows))
    torch.manual_seed(0)
    models = {
        "attention": Qwen3ForCausalLM(Qwen3Config(**COMMON, **ATTENTION)),
        "hybrid": Qwen3_5ForCausalLM(Qwen3_5TextConfig(**COMMON, **HYBRID)),
    }
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    with tempfile.TemporaryDirectory() as folder:
        engines = {}
        for name in list(models):
            directory = Path(folder) / name
            models.pop(name).save_pretrained(directory)
            engines[name] = load(directory, max(contexts) + max(rows) + 1, args.threads)
        found = [
            {"context": context, "rows": n, **measure(engines, context, n, args.rounds)}
            for context in contexts
            for n in rows
        ]
    print("context  rows  attention  hybrid  hybrid / attention")
    for each in found:
        times = each["attention"], each["hybrid"]
        print(
            f"{each['context']:7} {each['rows']:5} {times[0]:10.2f} {times[1]:7.2f} {times[1] / times[0]:8.2f}"
        )
    print(json.dumps({"parameters": sizes, "threads": args.threads, "rounds": args.rounds, "found": found}))
    return 0


def load(directory: Path, capacity: int, threads: int) -> OnnxRuntimeEngine:
    model = build_target(
        read_target_config(directory), Checkpoint(directory), (1, 6), OnnxRuntime(), folder="."
    )
    ir.save(model, directory / "target.onnx")
    return OnnxRuntimeEngine(directory / "target.onnx", slots=1, capacity=capacity, threads=threads)


def measure(engines: dict[str, OnnxRuntimeEngine], context: int, rows: int, rounds: int) -> dict[str, float]:
    """The least time of a pass by target, in milliseconds."""
    rng, times = np.random.default_rng(0), dict[str, list[float]]()
    feeds = {"start": np.array([context]), "rows": np.arange(rows)[None]}
    for _ in range(rounds):
        feeds["tokens"] = rng.integers(0, COMMON["vocab_size"], (1, rows))
        for name, engine in engines.items():
            if isinstance(engine.caches, HybridCaches):
                engine.caches.states[POSITION][0] = context - (rows + 1) // 2
            begin = perf_counter()
            engine.run(feeds)
            times.setdefault(name, []).append(1e3 * (perf_counter() - begin))
    return {name: min(each[1:]) for name, each in times.items()}


if __name__ == "__main__":
    raise SystemExit(main())

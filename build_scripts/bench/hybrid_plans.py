"""Plans of the first layers of a hybrid target at full width: bytes, scratch memory and time, as a table.

    python -m build_scripts.bench.hybrid_plans [--pair qwen3.5-4b] [--layers 4] [--vocabulary 8192] \
        [--precision bf16 fp8 nvfp4] [--compute-capability 89 120] [--dir DIR]

The checkpoint is generated noise with the names and shapes of the pair, quantized or not. Its vocabulary is cut, so
that the plan consists of the layers. Profiles: batches up to 8, blocks of 16 tokens, chunks of 512, 4,096 tokens. Needs
no GPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import onnx_ir as ir

from build_scripts.bench.plans import write_noise
from dflash_trt.bundle.workspace import silent
from dflash_trt.checkpoint.catalogue import known_configs
from dflash_trt.checkpoint.tensors import Checkpoint, Outline
from dflash_trt.engines.tensorrt.builder import build_plan, weight_bytes
from dflash_trt.engines.tensorrt.flavour import FLAVOURS
from dflash_trt.engines.tensorrt.profiles import Limits, profiles
from dflash_trt.graph.tensorrt import TensorRT
from dflash_trt.hardware import processor
from dflash_trt.models.configs import read_target_config
from dflash_trt.models.target import build_target
from dflash_trt.quantization.convert import data_free

LIMITS = Limits(max_batch_size=8, prefill_chunk=512, block_size=16, capacity=4096 + 2 * 16 + 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", default="qwen3.5-4b", help="a known pair with a hybrid target")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=8192, help="tokens")
    parser.add_argument("--precision", nargs="+", default=["bf16", "fp8", "nvfp4"])
    parser.add_argument("--compute-capability", type=int, nargs="+", default=[89, 120])
    parser.add_argument("--dir", type=Path, help="working directory (default: a temporary directory)")
    args = parser.parse_args()
    print(processor())
    print("| precision | capability | weights | plan | scratch memory | time |\n|---|---|---|---|---|---|")
    for precision in args.precision:
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            place = write_target(Path(folder), args.pair, args.layers, args.vocabulary, precision)
            for row in built(place, args.compute_capability):
                print(f"| {precision} | {row}", flush=True)


def write_target(place: Path, pair: str, layers: int, vocabulary: int, precision: str) -> Path:
    config = json.loads((known_configs(pair)[0] / "config.json").read_text())
    text = config.get("text_config", config)
    text |= {"num_hidden_layers": layers, "layer_types": text["layer_types"][:layers]}
    text |= {"vocab_size": vocabulary, "eos_token_id": 0}
    if precision != "bf16":
        algorithm = data_free(precision)
        config["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": algorithm.name,
            "ignore": ["lm_head"],
            **({"group_size": algorithm.group_size} if algorithm.group_size else {}),
        }
    (place / "config.json").write_text(json.dumps(config))
    outline = Outline(place)
    export(place, outline)
    write_noise(place / "model.safetensors", outline)
    return place


def export(place: Path, checkpoint: Checkpoint | Outline) -> ir.Model:
    dialect = TensorRT(ir.DataType.BFLOAT16)
    config = read_target_config(place)
    return build_target(config, checkpoint, [1], dialect, folder=".", capacity=LIMITS.capacity)


def built(place: Path, capabilities: list[int]) -> Iterator[str]:
    """The plans of the checkpoint in `place`, one row of the table each."""
    model = export(place, Checkpoint(place))
    weights = sum(weight_bytes(model).values())
    ir.save(model, place / "target.onnx")
    for capability in capabilities:
        begin, plan = perf_counter(), place / "target.plan"
        found = build_plan(
            *(FLAVOURS["tensorrt-rtx"], place / "target.onnx", plan, profiles("target", LIMITS), capability),
            silent,
        )
        seconds = perf_counter() - begin
        sizes = weights, found["file"]["size"], found["activation_bytes"]
        plan.unlink()
        yield f"{capability} | {' | '.join(f'{n / 1e6:,.0f} MB' for n in sizes)} | {seconds:.0f} s |"


if __name__ == "__main__":
    main()

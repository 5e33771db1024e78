"""The bytes that a target's experts read, and the time of a pass, by the number of experts in use.

    python -m build_scripts.bench.experts [BUNDLE] [--layers 12] [--texts 6] [--rounds 3] [--threads N] [--dir DIR]

BUNDLE is a bundle whose target has experts. Its passes read the shipped prompts. Without BUNDLE, the target is a
generated gpt-oss with 32 experts in MXFP4 (about 300M parameters), and the tokens are random. Both ways to run
experts are measured (graph/experts.py): "in use" widens the chosen experts in every pass, "resident" widens all at
load time.

Bytes are computed from the shapes of the experts in use, and measured: the sizes of the gathered tensors in ONNX
Runtime's profile. Passes of all lengths over all texts take turns, `--rounds` times. The fastest of each counts, and
the table gives medians over texts. Each mode has its own process, for its own peak memory. The last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from dflash_trt.bundle.manifest import Bundle
from dflash_trt.checkpoint.schema import TargetConfig
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.engines.onnxruntime import OnnxRuntimeEngine
from dflash_trt.graph import onnxruntime as functions
from dflash_trt.models.configs import read_target_config
from dflash_trt.models.target import build_target
from dflash_trt.prompts import read_prompts
from dflash_trt.text.tokenizer import Tokenizer

Array = np.ndarray[Any, Any]
LENGTHS = (1, 2, 4, 8, 16)
CONTEXT = 64  # rows already in the cache
MODES = {"in use": 0, "resident": 1 << 62}  # RESIDENT_EXPERT_BYTES
KNOWN = (
    Path(functions.__file__).parent.parent / "checkpoint" / "known" / "gpt-oss-20b" / "target" / "config.json"
)


@dataclass
class LayerPass:
    """One expert layer in one pass."""

    tokens: int
    distinct: int
    gathered: int  # bytes
    microseconds: float  # from the choice of experts to the result of the operator


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", nargs="?", type=Path, help="default: a generated checkpoint")
    parser.add_argument("--layers", type=int, default=12, help="of the generated one")
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dir", type=Path, help="working directory (default: a temporary directory)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        work = Path(folder)
        if args.bundle is None:
            generate(work / "target", args.layers)
        else:
            open_bundle(args.bundle, work / "target")
        config, checkpoint = read_target_config(work / "target"), Checkpoint(work / "target")
        if config.moe is None:
            parser.error(f"{args.bundle}: its target, {config.architecture}, has no experts")
        texts = sequences(args.bundle, config, args.texts)
        for mode, limit in MODES.items():
            functions.RESIDENT_EXPERT_BYTES = limit
            model = build_target(config, checkpoint, (0,), functions.OnnxRuntime(), folder="target")
            ir.save(model, work / f"{mode}.onnx")
        timed, profiled = {}, {}
        for mode in MODES:
            graph = work / f"{mode}.onnx"
            timed[mode] = alone(passes, graph, texts, args.rounds, args.threads)
            profiled[mode] = profile(graph, config, texts, args.rounds, args.threads)
        report(args, config, checkpoint, profiled, timed)


def generate(directory: Path, layers: int) -> None:
    """A gpt-oss in its published form with random weights, written tensor by tensor."""
    hidden, inner, experts, heads, kv_heads, size, vocab = 512, 512, 32, 8, 4, 64, 8192
    config = json.loads(KNOWN.read_text()) | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(layers)],
        "num_local_experts": experts,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "vocab_size": vocab,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for i in range(layers):
        layer = f"model.layers.{i}"
        attention = {
            "q": (heads * size, hidden),
            "k": (kv_heads * size, hidden),
            "v": (kv_heads * size, hidden),
        }
        for name, shape in {**attention, "o": (hidden, heads * size)}.items():
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = shape
            shapes[f"{layer}.self_attn.{name}_proj.bias"] = shape[:1]
        shapes[f"{layer}.self_attn.sinks"] = (heads,)
        shapes[f"{layer}.input_layernorm.weight"] = shapes[f"{layer}.post_attention_layernorm.weight"] = (
            hidden,
        )
        shapes[f"{layer}.mlp.router.weight"] = (experts, hidden)
        shapes[f"{layer}.mlp.router.bias"] = (experts,)
        for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            shapes[f"{layer}.mlp.experts.{name}_blocks"] = (experts, rows, columns // 32, 16)
            shapes[f"{layer}.mlp.experts.{name}_scales"] = (experts, rows, columns // 32)
            shapes[f"{layer}.mlp.experts.{name}_bias"] = (experts, rows)
    write_safetensors(directory / "model.safetensors", shapes)


def write_safetensors(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Random tensors that keep the scale of the activations. One at a time is in memory."""
    header, offset, rng = {}, 0, np.random.default_rng(0)
    for name, shape in shapes.items():
        packed = name.endswith(("_blocks", "_scales"))
        nbytes = int(np.prod(shape)) * (1 if packed else 2)
        header[name] = {
            "dtype": "U8" if packed else "BF16",
            "shape": list(shape),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            if name.endswith("_blocks"):
                array = rng.integers(0, 256, shape, np.uint8)
            elif name.endswith(
                "_scales"
            ):  # E2M1 numbers have a root mean square of 3: 3 * 2**-6 is 512**-0.5
                array = np.full(shape, 127 - 6, np.uint8)
            elif name.endswith("norm.weight"):
                array = np.ones(shape, ml_dtypes.bfloat16)
            else:
                scale = 1.0 if "embed" in name else shape[-1] ** -0.5 if len(shape) > 1 else 0.1
                array = (scale * rng.standard_normal(shape, np.float32)).astype(ml_dtypes.bfloat16)
            out.write(array.tobytes())


def open_bundle(path: Path, directory: Path) -> None:
    """A checkpoint directory with the weights of a bundle's target."""
    bundle = Bundle.open(path)
    directory.mkdir(parents=True)
    shutil.copy(bundle.path / "configs" / "target.json", directory / "config.json")
    for file in (bundle.path / "weights" / "target").iterdir():
        shutil.copy(file, directory)  # ONNX Runtime follows no link that leads out of the graph's directory


def sequences(bundle: Path | None, config: TargetConfig, count: int) -> list[Array]:
    """Token ids [CONTEXT + longest pass], from different places of the prompts."""
    length = CONTEXT + max(LENGTHS)
    if bundle is None:
        rng = np.random.default_rng(1)
        return [rng.integers(0, config.vocab_size, length) for _ in range(count)]
    tokenizer = Tokenizer(bundle)
    contents = (prompt.content for prompt in read_prompts(None, 0))
    text = "\n".join(c if isinstance(c, str) else "\n".join(m["content"] for m in c) for c in contents)
    ids = np.array(tokenizer.encode(text))
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return [ids[start : start + length] for start in starts]


def feeds_of(text: Array, tokens: int) -> dict[str, Array]:
    return {
        "tokens": text[None, CONTEXT : CONTEXT + tokens],
        "start": np.array([CONTEXT]),
        "rows": np.arange(tokens)[None],
    }


def context_of(text: Array) -> dict[str, Array]:
    return {"tokens": text[None, :CONTEXT], "start": np.array([0]), "rows": np.array([[CONTEXT - 1]])}


def alone(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """The function's result, from its own process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def passes(graph: Path, texts: list[Array], rounds: int, threads: int) -> dict[str, Any]:
    """Milliseconds by pass length for each text; time and peak memory of loading; peak memory after the passes."""
    begin = time.perf_counter()
    engine = OnnxRuntimeEngine(graph, slots=1, capacity=CONTEXT + 32, threads=threads)
    load, loaded = time.perf_counter() - begin, peak_bytes()
    milliseconds = {tokens: [float("inf")] * len(texts) for tokens in LENGTHS}
    for _ in range(rounds):
        for i, text in enumerate(texts):
            engine.run(context_of(text))
            for tokens in LENGTHS:
                begin = time.perf_counter()
                engine.run(feeds_of(text, tokens))
                taken = 1e3 * (time.perf_counter() - begin)
                milliseconds[tokens][i] = min(taken, milliseconds[tokens][i])
    engine.close()
    return {"load": load, "loaded_bytes": loaded, "peak_bytes": peak_bytes(), "ms": milliseconds}


def peak_bytes() -> int:
    """Peak memory of this program alone: ru_maxrss would include its parent's."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def profile(
    graph: Path, config: TargetConfig, texts: list[Array], rounds: int, threads: int
) -> list[LayerPass]:
    """Every expert layer of every pass, from ONNX Runtime's profile. A resident layer gathers nothing."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    options.enable_profiling, options.profile_file_prefix = True, str(graph.with_suffix(""))
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # as in the engine
    run = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    caches = {
        i.name: np.zeros((1, CONTEXT + 32, i.shape[2]), np.float32)
        for i in run.get_inputs()
        if "_cache." in i.name
    }
    names = [o.name for o in run.get_outputs()]
    for text in texts * rounds:
        filled = dict(zip(names, run.run(None, context_of(text) | caches), strict=True))
        context = {name: filled[name.replace("_cache.", "_cache_out.")] for name in caches}
        for tokens in LENGTHS:
            run.run(["logits"], feeds_of(text, tokens) | context)
    events = json.loads(Path(run.end_profiling()).read_text())
    layers = list(_layers(event for event in events if event["name"].endswith("_kernel_time")))
    assert config.moe is not None
    sparse, lengths = sum(config.moe.sparse_layers), [0, *LENGTHS] * len(texts)
    size = sparse * len(lengths)
    assert len(layers) == size * rounds, "one record per expert layer and pass"
    result = []
    for i, layer in enumerate(layers[:size]):
        layer.tokens = lengths[i // sparse]
        layer.microseconds = min(again.microseconds for again in layers[i::size])
        if layer.tokens:
            result.append(layer)
    return result


def _layers(events: Iterator[dict[str, Any]]) -> Iterator[LayerPass]:
    """The profile's events by expert layer. The events from the choice of experts to the operator belong to one
    layer.
    """
    layer = LayerPass(0, 0, 0, 0.0)
    for event in events:
        kind, name, size = event["args"]["op_name"], event["name"], int(event["args"]["output_size"])
        if kind == "Unique":
            layer = LayerPass(0, size // 8, 0, 0.0)
        if kind == "Gather" and "_active" in name and "router" not in name:
            layer.gathered += size
        layer.microseconds += event["dur"]
        if kind == "MoE":
            yield LayerPass(
                0, layer.distinct, layer.gathered, layer.microseconds if layer.distinct else event["dur"]
            )
            layer = LayerPass(0, 0, 0, 0.0)


def report(
    args: argparse.Namespace,
    config: TargetConfig,
    checkpoint: Checkpoint,
    profiled: dict[str, list[LayerPass]],
    timed: dict[str, dict[str, Any]],
) -> None:
    assert config.moe is not None
    layers, total = sum(config.moe.sparse_layers), config.moe.num_experts
    # Weights and scales are gathered as stored. Biases are gathered after widening, which happens at load time.
    tensors = [t for t in checkpoint.tensors.values() if ".experts." in t.name]
    nbytes = sum(t.nbytes if not t.name.endswith("_bias") else 4 * int(np.prod(t.shape)) for t in tensors)
    to_read = nbytes // (layers * total)
    widened = 4 * 3 * config.hidden_size * config.moe.intermediate_size
    parameters = 3 * config.hidden_size * config.moe.intermediate_size * total * layers
    print(
        f"{layers} expert layers of {total} experts, {config.moe.experts_per_token} a token, "
        f"{parameters / 1e6:.0f}M parameters in them; an expert: {to_read / 1e3:.1f} kB to read, "
        f"{widened / 1e3:.1f} kB in float32"
    )
    print(
        f"{args.threads} threads, {len(os.sched_getaffinity(0))} cores, load average {os.getloadavg()[0]:.1f}"
    )
    for mode, result in timed.items():
        print(
            f"{mode}: loads in {result['load']:.1f} s; peak memory of the process "
            f"{result['loaded_bytes'] / 1e6:.0f} MB after that, {result['peak_bytes'] / 1e6:.0f} MB after the passes"
        )

    by_length, in_use = [], profiled["in use"]
    print(
        "\ntokens  distinct   MB read per pass    MB widened   ms in use    ms resident   ratios to one token"
    )
    print(
        "        per layer  computed  measured                 median       median        in use   resident"
    )
    for tokens in LENGTHS:
        these = [layer for layer in in_use if layer.tokens == tokens]
        distinct = mean(layer.distinct for layer in these)
        row = {
            "tokens": tokens,
            "distinct_per_layer": round(distinct, 2),
            "computed_bytes": round(distinct * to_read * layers),
            "measured_bytes": round(mean(layer.gathered for layer in these) * layers),
            "widened_bytes": round(distinct * widened * layers),
        }
        for mode in MODES:
            times, key = timed[mode]["ms"], mode.replace(" ", "_")
            row[f"{key}_ms"] = round(median(times[tokens]), 3)
            row[f"{key}_ratio"] = round(median(times[tokens]) / median(times[1]), 2)
        by_length.append(row)
        print(
            f"{tokens:6} {distinct:9.1f} {row['computed_bytes'] / 1e6:10.2f} {row['measured_bytes'] / 1e6:9.2f} "
            f"{row['widened_bytes'] / 1e6:12.1f} {row['in_use_ms']:11.2f} {row['resident_ms']:14.2f} "
            f"{row['in_use_ratio']:12.2f} {row['resident_ratio']:8.2f}"
        )

    by_distinct = []
    print("\none layer's experts, by their number in use")
    print("distinct  kB read: computed  measured   us in use   us resident   samples")
    for count in sorted({layer.distinct for layer in in_use}):
        samples = [i for i, layer in enumerate(in_use) if layer.distinct == count]
        sample = {
            "distinct": count,
            "computed_bytes": count * to_read,
            "measured_bytes": round(mean(in_use[i].gathered for i in samples)),
            "in_use_us": round(median(in_use[i].microseconds for i in samples), 1),
            "resident_us": round(median(profiled["resident"][i].microseconds for i in samples), 1),
            "samples": len(samples),
        }
        by_distinct.append(sample)
        print(
            f"{count:8} {sample['computed_bytes'] / 1e3:18.1f} {sample['measured_bytes'] / 1e3:9.1f} "
            f"{sample['in_use_us']:11.0f} {sample['resident_us']:13.0f} {len(samples):9}"
        )
    result = {
        "target": str(args.bundle.name) if args.bundle else "generated",
        "expert_parameters": parameters,
        "experts": total,
        "experts_per_token": config.moe.experts_per_token,
        "expert_layers": layers,
        "read_bytes_per_expert": to_read,
        "widened_bytes_per_expert": widened,
        "passes": by_length,
        "layer": by_distinct,
        "load_seconds": {mode: round(r["load"], 2) for mode, r in timed.items()},
        "loaded_bytes": {mode: r["loaded_bytes"] for mode, r in timed.items()},
        "peak_bytes": {mode: r["peak_bytes"] for mode, r in timed.items()},
        "texts": args.texts,
        "rounds": args.rounds,
        "threads": args.threads,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "processor": platform.processor() or platform.machine(),
        "versions": {name: version(name) for name in ("dflash-trt", "onnxruntime", "numpy")},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

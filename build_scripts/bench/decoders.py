"""The decoders that `build_scripts.bench.natural` compares, each in a process of its own.

    python -m build_scripts.bench.decoders NAME MODELS BATCH CAPACITY THREADS

reads tasks (JSON, one a line) from its input and writes one answer for each. A name is KIND:WEIGHTS:

    plain, adaptive     this package, on the bundle MODELS/bundles/WEIGHTS
    llama.cpp, openvino llama-cpp-python and openvino-genai, on MODELS/gguf/WEIGHTS.gguf
    genai               onnxruntime-genai, on MODELS/genai/WEIGHTS

Every decoder takes the same token ids and gives token ids, decoded greedily.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

GGUF = {"BF16": 32, "F32": 0, "F16": 1, "Q8_0": 7, "Q4_0": 2}  # llama_ftype in llama.h
_PASS = 512  # prompt tokens in a pass, the default of llama.cpp and of this package
_KEPT: list[Any] = []  # callbacks, of which C keeps only the address


@dataclass
class Task:
    """Prompts to complete at the same time. `stop`: token ids that end a text."""

    prompts: list[list[int]]
    max_tokens: int
    stop: list[int]


@dataclass
class Decoded:
    """Tokens of each prompt, and seconds from the start to the first token and to the last.

    `rounds` are verification passes with drafts, `accepted` the drafts that were right in them.
    """

    tokens: list[list[int]]
    first: float
    seconds: float
    rounds: int = 0
    accepted: int = 0


Decoder = Callable[[Task], Decoded]


def ours(kind: str, bundle: Path, batch: int, threads: int) -> Decoder:
    """This package, from Python."""
    from dflash_trt import LLM, SamplingParams
    from dflash_trt.decoding.results import Statistics

    llm = LLM(bundle, max_batch_size=batch, prefix_cache_bytes=0, threads=threads)

    def run(task: Task) -> Decoded:
        params = SamplingParams(max_tokens=task.max_tokens, stop_token_ids=task.stop)
        began = perf_counter()
        done = llm.generate(task.prompts, params, speculate=kind != "plain")
        seconds, counts = perf_counter() - began, Statistics.merge(answer.statistics for answer in done)
        tokens, first = [answer.token_ids for answer in done], done[0].statistics.time_to_first_token
        return Decoded(tokens, first, seconds, counts.num_drafts, counts.num_accepted_tokens)

    return run


def llama_cpp(file: Path, batch: int, capacity: int, threads: int) -> Decoder:
    """llama.cpp by its C interface, so that no Python stands between two passes but this loop."""
    import llama_cpp as lib

    _KEPT.append(lib.llama_log_callback(lambda *_: None))
    lib.llama_log_set(_KEPT[-1], None)
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(str(file).encode(), lib.llama_model_default_params())
    options = lib.llama_context_default_params()
    options.n_ctx, options.n_seq_max, options.n_batch = capacity * batch, batch, _PASS
    options.n_threads = options.n_threads_batch = threads
    context, rows_of_a_pass = lib.llama_init_from_model(model, options), lib.llama_batch_init(_PASS, 0, 1)
    greedy = lib.llama_sampler_init_greedy()

    def one_pass(rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """Rows: token, position, sequence, and whether logits are wanted."""
        rows_of_a_pass.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            rows_of_a_pass.token[i], rows_of_a_pass.pos[i] = token, position
            rows_of_a_pass.logits[i], rows_of_a_pass.n_seq_id[i] = wanted, 1
            rows_of_a_pass.seq_id[i][0] = sequence
        if status := lib.llama_decode(context, rows_of_a_pass):
            raise RuntimeError(f"llama_decode: {status}")

    def run(task: Task) -> Decoded:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        tokens, first, began = list[list[int]](), 0.0, perf_counter()
        for sequence, prompt in enumerate(task.prompts):
            for start in range(0, len(prompt), _PASS):
                piece = enumerate(prompt[start : start + _PASS], start)
                one_pass([(token, i, sequence, i + 1 == len(prompt)) for i, token in piece])
            tokens.append([lib.llama_sampler_sample(greedy, context, -1)])
            first = first or perf_counter() - began
        while active := [i for i, out in enumerate(tokens) if not _ended(out, task)]:
            one_pass([(tokens[i][-1], len(task.prompts[i]) + len(tokens[i]) - 1, i, True) for i in active])
            for row, i in enumerate(active):
                tokens[i].append(lib.llama_sampler_sample(greedy, context, row))
        return Decoded(tokens, first, perf_counter() - began)

    return run


def genai(model: Path, threads: int) -> Decoder:
    """onnxruntime-genai. Prompts of a batch are padded on the left."""
    import onnxruntime_genai as lib

    config = lib.Config(str(model))
    session = {"session_options": {"intra_op_num_threads": threads}}
    config.overlay(json.dumps({"model": {"decoder": session}}))
    loaded = lib.Model(config)

    def run(task: Task) -> Decoded:
        prompts, _ = _padded(task, np.int32)
        count, longest = prompts.shape
        tokens: list[list[int]] = [[] for _ in task.prompts]
        first, began, params = 0.0, perf_counter(), lib.GeneratorParams(loaded)
        params.set_search_options(max_length=longest + task.max_tokens, batch_size=count)
        generator = lib.Generator(loaded, params)
        generator.append_tokens(prompts if count > 1 else prompts[0])
        while not generator.is_done():
            generator.generate_next_token()
            for out, token in zip(tokens, generator.get_next_tokens(), strict=True):
                out.append(int(token))
            first = first or perf_counter() - began
        seconds = perf_counter() - began
        return Decoded([_until(answer, task.stop) for answer in tokens], first, seconds)

    return run


def openvino(file: Path, threads: int) -> Decoder:
    """The pipeline of openvino-genai, which reads GGUF files. Prompts of a batch are padded on the left."""
    import openvino_genai as lib
    from openvino import Tensor

    pipeline = lib.LLMPipeline(str(file), "CPU", INFERENCE_NUM_THREADS=threads)

    def run(task: Task) -> Decoded:
        config = lib.GenerationConfig()
        config.max_new_tokens, config.stop_token_ids = task.max_tokens, set(task.stop)
        config.do_sample = False
        ids, mask = (Tensor(array) for array in _padded(task, np.int64))
        began = perf_counter()
        done = pipeline.generate(lib.TokenizedInputs(ids, mask), config)
        seconds = perf_counter() - began
        tokens = [_until(list(row), task.stop) for row in done.tokens]
        return Decoded(tokens, done.perf_metrics.get_ttft().mean / 1e3, seconds)

    return run


# The package that each kind needs, and where it reads weights of this name from.
KINDS = {
    "plain": ("onnxruntime", "bundles/{}"), "adaptive": ("onnxruntime", "bundles/{}"),
    "llama.cpp": ("llama_cpp", "gguf/{}.gguf"), "openvino": ("openvino_genai", "gguf/{}.gguf"),
    "genai": ("onnxruntime_genai", "genai/{}"),
}  # fmt: skip


def installed(name: str) -> bool:
    """Whether the decoder's package is here. Exits where the name is of none."""
    kind, _, weights = name.partition(":")
    if kind not in KINDS or not weights:
        raise SystemExit(f"{name!r} is no KIND:WEIGHTS; kinds: {', '.join(KINDS)}")
    return find_spec(KINDS[kind][0]) is not None


def load(name: str, models: Path, batch: int, capacity: int, threads: int) -> Decoder:
    """`capacity`: most tokens of a prompt and its answer."""
    kind, _, weights = name.partition(":")
    place = models / KINDS[kind][1].format(weights)
    if kind == "llama.cpp":
        return llama_cpp(place, batch, capacity, threads)
    if kind in ("openvino", "genai"):
        return {"openvino": openvino, "genai": genai}[kind](place, threads)
    return ours(kind, place, batch, threads)


def make_model(name: str, target: str, models: Path) -> None:
    """What a decoder reads. A file of another program that is there is kept."""
    kind, _, weights = name.partition(":")
    place = models / KINDS[kind][1].format(weights)
    if kind in ("llama.cpp", "openvino"):
        _make_gguf(target, place)
    elif kind == "genai":
        _make_genai(target, place)
    else:
        from dflash_trt.building.build import build  # which the processes of decoders do not need
        from dflash_trt.formats.precision import parse_precision

        precision = parse_precision(None if weights == "default" else weights)
        build(target, None, place, precision=precision, force=True)


def _make_gguf(target: str, file: Path) -> None:
    """By llama.cpp's own quantization: BF16 has the weights that `build` converts, and the others come from it."""
    import llama_cpp

    from dflash_trt.checkpoint.gguf import packaged_target

    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    source = packaged_target(target)
    if file.stem != "BF16":
        _make_gguf(target, source := file.with_stem("BF16"))
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = GGUF[file.stem], True
    work = file.with_suffix(".part")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(work).encode(), ctypes.byref(params)):
        raise SystemExit(f"{source}: llama.cpp could not make {file.stem} of it")
    work.rename(file)


def _make_genai(target: str, directory: Path) -> None:
    """By the builder of onnxruntime-genai, from the checkpoint that `build` converts."""
    from dflash_trt.building.sources import resolve

    if directory.exists():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as work:
        places = [
            "-i", str(resolve(target, "target").directory), "-o", f"{work}/model", "-c", f"{work}/cache",
        ]  # fmt: skip
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-e", "cpu"]
        subprocess.run([*command, *places, "-p", directory.name], check=True, stdout=sys.stderr)
        Path(work, "model").rename(directory)


def _ended(tokens: list[int], task: Task) -> bool:
    return len(tokens) >= task.max_tokens or tokens[-1] in task.stop


def _padded(task: Task, dtype: Any) -> tuple[Any, Any]:
    """The prompts, [n, longest], and the mask of their own tokens."""
    longest = max(map(len, task.prompts))
    rows = [[task.stop[0]] * (longest - len(prompt)) + prompt for prompt in task.prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in task.prompts]
    return np.array(rows, dtype), np.array(mask, dtype)


def _until(tokens: list[int], stop: list[int]) -> list[int]:
    """Tokens up to the first that ends a text, that one included."""
    ends = (i for i, token in enumerate(tokens) if token in stop)
    return tokens[: next(ends, len(tokens)) + 1]


def main() -> None:
    """Answer the tasks. Prints of libraries go to standard error."""
    name, models, *numbers = sys.argv[1:]
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        decoder = load(name, Path(models), *map(int, numbers))
        print(json.dumps({"ready": name}), file=out, flush=True)
        for line in sys.stdin:
            answer = asdict(decoder(Task(**json.loads(line))))
            # Not ru_maxrss, which has the memory of the process that started this one.
            peak = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
            answer["peak_mb"] = int(peak[1]) / 1000 if peak else 0.0
            print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()

"""One request never affects another in `LLM` and `AsyncLLM`: errors, closing, Ctrl-C, the interpreter's end."""

from __future__ import annotations

import asyncio
import linecache
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt import LLM, AsyncLLM, Completion, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.errors import DecodingError, DFlashError, EngineError, NonFiniteError
from tests.decoding.test_faults import Panic
from tests.doubles.checkpoints import VOCAB, make_drafter, make_target
from tests.doubles.family_checkpoints import make_gpt_oss, make_gpt_oss_drafter

# The token whose embedding is NaN. Neither random pair chooses it by itself.
SPOILT = 7
KINDS = [
    {},
    {"temperature": 0.8},
    {"repetition_penalty": 1.3},
    {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.3},
]
PARAMS = [SamplingParams(max_tokens=20, seed=i, ignore_eos=True, **k) for i, k in enumerate(KINDS)]


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(SPOILT + 1, VOCAB - 80, length).tolist()


def spoilt_prompt(length: int, seed: int = 0) -> list[int]:
    tokens = prompt(length, seed)
    return [*tokens[: length // 2], SPOILT, *tokens[length // 2 :]]


def spoil(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][SPOILT] = torch.nan
    save_file(weights, path, metadata={"format": "pt"})


@pytest.fixture(scope="module", params=["dense", "experts"])
def spoilt(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("spoilt")
    if request.param == "dense":
        target = make_target(directory / "target", favourites=6, layers=3, sliding_window=20)
        drafter = make_drafter(directory / "drafter", target)
    else:
        target = make_gpt_oss(directory / "target", favourites=6)
        drafter = make_gpt_oss_drafter(directory / "drafter", target, block_size=6, layers=2)
    spoil(target)
    return build(str(target), str(drafter), directory / "bundle", max_seq_len=200).path


def caches_are_finite(llm: LLM | AsyncLLM) -> bool:
    pair: Any = llm.runtime.pair
    caches = [*pair.target.caches.arrays.values(), *pair.drafter.caches.arrays.values()]
    return all(np.isfinite(rows).all() for rows in caches)


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Pairs by the target's layers that see everything: none, or the second. The others drop rows by 128."""
    directory, paths = tmp_path_factory.mktemp("sliding"), {}
    windowed: dict[str, Any] = {"sliding_window": 20, "head_dim": 128}
    for whole in (0, 1):
        layers = "sliding_attention", "full_attention" if whole else "sliding_attention"
        target = make_target(
            directory / f"target{whole}",
            favourites=6,
            layers=2,
            layer_types=layers,
            max_position_embeddings=1024,
            **windowed,
        )
        window: dict[str, Any] = {"layer_types": ("sliding_attention",) * 2, **windowed}
        drafter = make_drafter(directory / f"drafter{whole}", target, taps=(0, 1), **window)
        spoil(target)
        paths[whole] = build(str(target), str(drafter), directory / f"bundle{whole}", max_seq_len=400).path
    return paths


@pytest.mark.parametrize("whole", [0, 1])
@pytest.mark.parametrize("at", [5, 200])
@pytest.mark.parametrize("chunk", [64, 512])
def test_a_slot_serves_on_after_numbers_that_a_window_dropped(
    sliding: dict[int, Path], whole: int, at: int, chunk: int
) -> None:
    """One spoilt token of 257: neither model sees its rows again, whether or not the last row saw them."""
    bad = spoilt_prompt(257)
    bad[bad.index(SPOILT)], bad[at] = bad[at], SPOILT
    short, long = prompt(3), prompt(140)
    with LLM(sliding[whole], max_batch_size=1, prefill_chunk=chunk, prefix_cache_bytes=0, threads=1) as llm:

        def answers() -> list[Any]:
            found = [llm.generate(each, PARAMS[0], block_length=4) for each in (short, long)]
            return [(each.token_ids, each.statistics.acceptance_histogram) for each in found]

        before = answers()
        with pytest.raises(NonFiniteError):
            llm.generate(bad, PARAMS[0])
        assert caches_are_finite(llm)
        llm.logits(bad)
        assert caches_are_finite(llm)
        assert answers() == before


@pytest.mark.parametrize("at", [5, 199])
@pytest.mark.parametrize("chunk", [64, 512])
def test_features_that_are_not_finite_are_found_however_they_are_read(
    sliding: dict[int, Path], at: int, chunk: int
) -> None:
    with LLM(sliding[1], max_batch_size=1, prefill_chunk=chunk, threads=1) as llm:
        pair: Any = llm.runtime.pair
        features = np.zeros((200, pair.arrays.unread_features([1]).shape[2]), np.float32)
        features[at] = np.nan
        pair.drafter.add_features(0, features[None], range(200))
        assert not pair.drafter.catch_up(0)
        pair.drafter.clear(0)
        assert caches_are_finite(llm)
        assert pair.drafter.catch_up(0)


def test_requests_in_flight_go_on_where_one_fails(spoilt: Path) -> None:
    """Numbers that are not finite, an error of the host's code, a panic: each reaches only its own stream."""
    with LLM(spoilt, max_batch_size=1, prefix_cache_bytes=0, threads=1) as llm:
        alone = [llm.generate(prompt(9 + i, i), params).token_ids for i, params in enumerate(PARAMS)]

    async def main() -> None:
        async with AsyncLLM(spoilt, max_batch_size=4, prefill_chunk=16, threads=1) as llm:
            make = llm.runtime.request
            errors = {91: ValueError("of one request"), 92: Panic("of one request")}

            def request(tokens: Any, *given: Any, **options: Any) -> Any:
                made = make(tokens, *given, **options)
                if error := errors.get(tokens[0]):
                    push, left = made.stop.push, iter(range(3))

                    def failing(run: Any) -> Any:
                        if next(left, None) is None:
                            raise error
                        return push(run)

                    made.stop.push = failing
                return made

            llm.runtime.request = request  # type: ignore[method-assign]
            asked = [(prompt(9 + i, i), params) for i, params in enumerate(PARAMS)]
            wrong = [
                (spoilt_prompt(30), PARAMS[0]),
                ([91, *prompt(5)], PARAMS[1]),
                ([92, *prompt(5)], PARAMS[0]),
            ]
            tasks = [asyncio.create_task(llm.generate(*each)) for each in [*asked, *wrong, *asked, *wrong]]
            found = await asyncio.gather(*tasks, return_exceptions=True)
            for at in (0, 7):
                assert [c.token_ids for c in found[at : at + 4] if isinstance(c, Completion)] == alone
                failed = found[at + 4 : at + 7]
                assert [type(error) for error in failed] == [NonFiniteError, DecodingError, DecodingError]
                assert str(failed[1]) == "decoding failed: ValueError: of one request"
                assert str(failed[2]) == "decoding failed: Panic: of one request"
            assert llm.in_flight == 0
            assert caches_are_finite(llm)
            chunks = llm.stream(*wrong[1])
            assert (await anext(chunks)).finish_reason is None  # earlier tokens stay valid
            with pytest.raises(DecodingError, match="of one request"):
                [chunk async for chunk in chunks]

    asyncio.run(main())


def test_a_failed_pass_ends_each_request_and_the_next_call_begins_afresh(bundle: Path) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    with LLM(bundle, threads=1) as llm:
        expected = llm.generate(prompt(9), params).token_ids
        start, calls = llm.runtime.pair.start, iter(range(4))

        def failing(*given: Any) -> Any:
            if next(calls, None) == 3:
                raise RuntimeError("out of order")
            return start(*given)

        llm.runtime.pair.start = failing  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="the engine failed: RuntimeError: out of order") as error:
            llm.generate([prompt(9), prompt(12)], params, block_length=2)
        assert isinstance(error.value.__cause__, RuntimeError)
        assert llm.generate(prompt(9), params).token_ids == expected


def interrupted(work: Callable[[], object], at: int) -> int:
    """Run `work` with Ctrl-C before the `at`-th executed line of the package. Returns the number of lines executed."""
    count = 0

    def lines(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        # The interpreter lets no signal in between the body of a `with` and its end, which has its own event.
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event == "line" and not text.startswith("with "):
            count += 1
            if count == at:
                raise KeyboardInterrupt
        return lines

    def calls(frame: FrameType, event: str, argument: Any) -> Any:
        return lines if "/dflash_trt/" in frame.f_code.co_filename else None

    sys.settrace(calls)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("spare", [0, 1 << 20])
def test_ctrl_c_anywhere_leaves_no_request_behind(bundle: Path, spare: int) -> None:
    """The next call gets its own tokens, from a scheduler without other requests."""
    params = [SamplingParams(max_tokens=n, seed=n, temperature=0.7) for n in (3, 6, 4)]
    prompts = [prompt(6 + i, i) for i in range(3)]
    with LLM(bundle, max_batch_size=2, prefill_chunk=8, prefix_cache_bytes=spare, threads=1) as llm:
        scheduler: Any = llm.runtime.scheduler

        def generate() -> None:
            llm.generate(prompts, params, block_length=4)

        def stream() -> None:
            chunks = llm.stream(prompts[0], params[1], block_length=4)
            next(chunks)
            chunks.close()  # type: ignore[attr-defined]

        expected = [c.token_ids for c in llm.generate(prompts, params, block_length=4)]
        for work, share in ((generate, 70), (stream, 30)):
            work()
            lines = interrupted(work, 0)
            for at in np.random.default_rng(spare).integers(1, lines + 1, share).tolist():
                interrupted(work, at)
                assert [c.token_ids for c in llm.generate(prompts, params, block_length=4)] == expected
                assert (scheduler.idle, scheduler.cut_short) == (True, False)
                assert scheduler.logits(prompts[0]).shape == (VOCAB,)


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_close_waits_for_the_pass_that_another_thread_runs(bundle: Path) -> None:
    """That thread then gets an error. Freeing memory under a running pass would end the process."""
    found = python(
        """
        import sys, threading
        from dflash_trt import LLM, SamplingParams
        from dflash_trt.errors import DFlashError

        def generate(llm, said):
            try:
                while True:
                    llm.generate([[8, 9, 10]] * 4, SamplingParams(max_tokens=200, ignore_eos=True))
            except DFlashError as error:
                said.append(str(error))

        for i in range(8):
            llm, said, passes = LLM(sys.argv[1], max_batch_size=4), [], threading.Semaphore(0)
            llm.runtime.pair.start = lambda *given, start=llm.runtime.pair.start: passes.release() or start(*given)
            thread = threading.Thread(target=generate, args=(llm, said))
            thread.start()
            for _ in range(1 + 5 * i):
                passes.acquire(timeout=60)
            llm.close()
            thread.join(60)
            assert said == ["this LLM is closed; open the bundle again"], said
        """,
        bundle,
    )
    assert (found.returncode, found.stderr) == (0, "")


def test_a_stream_that_is_not_read_on_does_not_keep_close_waiting(bundle: Path) -> None:
    llm = LLM(bundle, threads=1)
    stream = llm.stream(prompt(5), SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    llm.close()
    with pytest.raises(DFlashError, match="closed"):
        next(stream)
    llm.close()


@pytest.mark.parametrize("interface", ["LLM", "AsyncLLM"])
def test_the_interpreter_ends_in_order_while_requests_run(bundle: Path, interface: str) -> None:
    """A thread that computes while the interpreter shuts down would abort the process."""
    code = """
        import asyncio, sys, threading
        from dflash_trt import LLM, AsyncLLM, SamplingParams

        params = SamplingParams(max_tokens=220, ignore_eos=True)
        if sys.argv[2] == "LLM":
            llm, passes = LLM(sys.argv[1]), threading.Semaphore(0)
            llm.runtime.pair.start = lambda *given, start=llm.runtime.pair.start: passes.release() or start(*given)
            threading.Thread(target=lambda: [llm.generate([8, 9], params) for _ in range(9999)], daemon=True).start()
            passes.acquire(timeout=60)
        else:
            llm, loop = AsyncLLM(sys.argv[1]), asyncio.new_event_loop()
            streams = [llm.stream([8, 9, i], params) for i in range(20)]
            for stream in streams[:8]:
                loop.run_until_complete(anext(stream))
            assert llm.in_flight
        """
    found = python(code, bundle, interface)
    assert found.returncode == 0, found.stderr


@pytest.fixture
def garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unwritten memory with the most harmful values."""

    def empty(shape: Any, dtype: Any = float, **options: Any) -> np.ndarray[Any, Any]:
        kind = np.dtype(dtype)
        return np.full(shape, np.nan if kind.kind == "f" else np.ones((), kind), kind)

    monkeypatch.setattr(np, "empty", empty)
    monkeypatch.setattr(np, "empty_like", lambda array, **_: empty(array.shape, array.dtype))


def test_uninitialised_memory_is_not_read(bundle: Path, garbage: None) -> None:
    params = [SamplingParams(max_tokens=20, seed=i, ignore_eos=True, **kind) for i, kind in enumerate(KINDS)]
    with LLM(bundle, threads=1, max_batch_size=4) as llm:
        assert caches_are_finite(llm)
        prompts = [prompt(3 + 20 * i, i) for i in range(4)]
        found = [c.token_ids for c in llm.generate(prompts, params)]
        assert [
            llm.generate(*each, speculate=False).token_ids for each in zip(prompts, params, strict=True)
        ] == found

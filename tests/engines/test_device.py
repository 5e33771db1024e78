"""What the engines of a GPU share, by the engine on torch on a CPU: tokens must be those of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dflash_plugins.launch import by_triton

from dflash_trt import LLM, AsyncLLM, Completion, SamplingParams, StructuredOutputs, hardware
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.decoding.length.adaptive import AdaptiveLength
from dflash_trt.decoding.length.rates import Rates
from dflash_trt.decoding.pair import PassRule
from dflash_trt.decoding.params import RequestOptions
from dflash_trt.decoding.sampling.sampler import log_probabilities
from dflash_trt.engines.caches import POSITION
from dflash_trt.engines.device.logprobs import LogProbabilities
from dflash_trt.engines.device.sizes import DECODE, PREFILL, batch_sizes, fitting
from dflash_trt.errors import BatchError, NonFiniteError, RequestError
from tests.api.jobs import ahead, known_answers, run
from tests.api.loops import serve
from tests.decoding.test_isolation import SPOILT, spoil, spoilt_prompt
from tests.doubles import triton_interpreter  # noqa: F401  # corrects it
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.hybrid_checkpoints import DENSE, make_hybrid
from tests.doubles.two_engines import for_both, params, prompts

BLOCK = 6


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "compute_capabilities", list)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


def built(directory: Path, target: Path, drafter: Path, **settings: Any) -> tuple[Bundle, Bundle]:
    """A pair for ONNX Runtime and for torch."""
    return for_both(directory, target, drafter, "torch", **{"max_seq_len": 100} | settings)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Bundle]:
    directory = tmp_path_factory.mktemp("device")
    target = make_target(directory / "target", favourites=6)
    return built(directory, target, make_drafter(directory / "drafter", target, block_size=BLOCK))


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A target with a token whose numbers are not finite."""
    directory = tmp_path_factory.mktemp("spoilt")
    target = make_target(directory / "target", favourites=6)
    spoil(target)
    drafter = make_drafter(directory / "drafter", target, block_size=BLOCK)
    return built(directory, target, drafter, max_seq_len=64, tree_width=2)[1]


def opened(bundle: Bundle, slots: int = 3, **settings: Any) -> LLM:
    return LLM(bundle.path, threads=1, max_batch_size=slots, prefill_chunk=16, **settings)


def expected_of(bundle: Bundle, temperature: float) -> list[list[int]]:
    with LLM(bundle.path, threads=1) as reference:
        return [c.token_ids for c in reference.generate(prompts(), params(temperature), speculate=False)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_padded_passes_give_the_same_tokens(
    bundles: tuple[Bundle, Bundle], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In exact mode a pass has copies of its last rows, made on the device or on the host."""
    expected = expected_of(bundles[0], temperature)
    with opened(bundles[1], prefix_cache_bytes=1 << 20) as llm:
        pair, widths = llm.runtime.pair, set[int]()
        pair.rule = PassRule((4, BLOCK), any_cut=False)
        run = pair.target.run

        def watched(profile: int, feeds: Any, **given: Any) -> Any:
            widths.update({feeds["tokens"].shape[1]} if profile == DECODE else ())
            return run(profile, feeds, **given)

        monkeypatch.setattr(pair.target, "run", watched)
        for block_length in (BLOCK, None, 3):
            completions = llm.generate(prompts(), params(temperature), block_length=block_length)
            assert [c.token_ids for c in completions] == expected
        form = StructuredOutputs(choice=["a", "b"])
        chosen = SamplingParams(max_tokens=4, structured_outputs=form)
        assert llm.generate("b", chosen).token_ids == llm.generate("b", chosen, speculate=False).token_ids
    assert widths == {4, BLOCK}


def test_a_full_gpu_keeps_no_rows(bundles: tuple[Bundle, Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(bundles[1]) as llm:
        llm.generate(prompts()[1], SamplingParams(max_tokens=4))

        def full(*_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(torch.Tensor, "clone", full)
        with pytest.raises(MemoryError, match="CUDA out of memory"):
            llm.runtime.pair.target.caches.keep(0, 0, 4, 1)


def test_sampling_by_kernels_gives_the_same(bundles: tuple[Bundle, Bundle]) -> None:
    """In Triton's interpreter. Sampled, greedy and penalized requests share a batch."""
    kinds: list[dict[str, Any]] = [{"temperature": 0.8}, {}, {"temperature": 1.0, "presence_penalty": 0.5}]
    kinds[1] = {"bad_words": ["a", "bc"], "min_tokens": 2, "repetition_penalty": 1.2}
    wanted = [SamplingParams(max_tokens=5, seed=2**63 + i, ignore_eos=True, **k) for i, k in enumerate(kinds)]
    with opened(bundles[1]) as llm:
        arrays: Any = llm.runtime.pair.arrays
        expected = [c.token_ids for c in llm.generate(prompts()[:3], wanted, block_length=4)]
        arrays.run, arrays.samples = by_triton, True
        found = llm.generate(prompts()[:3], wanted, block_length=4)
        assert [c.token_ids for c in found] == expected
        assert "_sampled" in vars(arrays)


@pytest.mark.parametrize("most", [1, 3, 8, 9, 33, 64, 100, 256])
def test_a_pass_of_many_sequences_wastes_at_most_a_fifth(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for count in range(1, most + 1):
        size = fitting(count, sizes)
        assert size < 2 * count if count <= 8 else (size - count) / size <= 1 / 5


@pytest.mark.parametrize("vocab", [12, 3000, 150_000])
def test_log_probabilities_on_the_device_are_those_of_the_host(vocab: int) -> None:
    """The same tokens in the same order, with numbers that differ by the order of a sum. Many logits are equal, some
    excluded, and memory is for two rows at a time.
    """
    rng, rows = np.random.default_rng(vocab), 5
    logits = torch.from_numpy(rng.normal(0, 4, (rows, vocab)).astype(np.float32)).bfloat16().float()
    logits[0], logits[1, ::3], logits[2, 4:] = 0.0, -torch.inf, -0.0
    chosen = torch.from_numpy(rng.integers(0, vocab, rows))
    work = LogProbabilities(torch.zeros(2 * 12 * vocab + 5, dtype=torch.uint8), 16, vocab)
    own, tokens = torch.zeros(rows), torch.zeros(rows, work.top, dtype=torch.int64)
    best = torch.zeros(rows, work.top)
    work.fill(logits, chosen, own, tokens, best)
    for i, row in enumerate(logits.numpy()):
        number, top = log_probabilities(row, int(chosen[i]), work.top)
        assert own[i].item() == pytest.approx(number, abs=1e-5)
        assert tokens[i].tolist() == [token for token, _ in top]
        assert best[i].tolist() == pytest.approx([each for _, each in top], abs=1e-5)


def test_jobs_of_all_kinds_have_their_own_tokens_where_rounds_start_ahead(
    bundles: tuple[Bundle, Bundle],
) -> None:
    """They arrive and leave while rounds are under way. Greedy ones alone go ahead, as the host samples here."""
    known = known_answers(bundles[1].path, 2)

    async def body(llm: AsyncLLM) -> None:
        with ahead(llm) as rounds:
            assert not (await run(llm, known, 120, 5, 2))["differs"]
        assert rounds["ahead"] > 0

    serve(bundles[1].path, body, max_batch_size=4)


@pytest.mark.parametrize("by_kernels", [False, True])
def test_numbers_that_are_not_finite_end_their_request_alone(by_kernels: bool, spoilt: Bundle) -> None:
    """Greedy, sampled and penalized ones alike. Their slots are clear for the next requests."""
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.8}, {"repetition_penalty": 1.2}]
    wanted = [SamplingParams(max_tokens=5, seed=9, ignore_eos=True, **kind) for kind in kinds]
    good, bad = [spoilt_prompt(9 + i, i) for i in range(3)], [spoilt_prompt(20 + i, i) for i in range(3)]
    good = [[token for token in each if token != SPOILT] for each in good]
    with opened(spoilt) as llm:
        pair: Any = llm.runtime.pair
        pair.arrays.run, pair.arrays.samples = by_triton if by_kernels else None, by_kernels
        expected = [llm.generate(*each, block_length=1).token_ids for each in zip(good, wanted, strict=True)]
        for drafts in ({"block_length": 4}, {"tree_nodes": 4}):
            with pytest.raises(BatchError, match="3 of 6") as caught:
                llm.generate([*bad, *good], wanted * 2, **drafts)
            assert all(isinstance(outcome, NonFiniteError) for outcome in caught.value.outcomes[:3])
            assert [c.token_ids for c in caught.value.outcomes[3:] if isinstance(c, Completion)] == expected
        caches = [*pair.target.caches.arrays.values(), *pair.drafter.caches.arrays.values()]
        assert all(torch.isfinite(rows).all() for rows in [*caches, pair.arrays._unread])


def test_a_draft_that_spoils_a_round_ends_no_request(spoilt: Bundle) -> None:
    """The same for a drafter whose numbers are not finite."""
    params = [SamplingParams(max_tokens=20, seed=9, ignore_eos=True, temperature=t) for t in (0.0, 0.8)]
    asked = [[token for token in spoilt_prompt(9 + i, i) if token != SPOILT] for i in range(2)]
    with opened(spoilt) as llm:
        pair: Any = llm.runtime.pair
        expected = [c.token_ids for c in llm.generate(asked, params, speculate=False)]
        drafter = pair.drafter.runner
        run = drafter.run

        def broken(name: str, part: Any, value: float) -> Any:
            def altered(profile: int, feeds: Any, **slot: int) -> Any:
                out = run(profile, feeds, **slot)
                if profile == DECODE:
                    out[name][part] = value
                return out

            return altered

        wrong = np.s_[:, -1]
        for altered in (broken("draft_tokens", wrong, SPOILT), broken("draft_logprobs", np.s_[:], np.nan)):
            drafter.run = altered
            found = llm.generate(asked, params, block_length=4, draft_source="drafter")
            assert [c.token_ids for c in found] == expected
            assert all(torch.isfinite(c).all() for c in pair.target.caches.arrays.values())
        assert [c.statistics.num_drafts for c in found] == [1, 1]


def test_forced_tokens_of_rounds_without_a_draft_find_room(
    bundles: tuple[Bundle, Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their features wait for a drafter that is not asked. A slot has room for a block of them."""
    pytest.importorskip("llguidance")
    form = StructuredOutputs(grammar='start: ("abcdefghijklmnop" /[0-9]/)+')
    params = SamplingParams(max_tokens=40, structured_outputs=form)
    monkeypatch.setattr(AdaptiveLength, "draft", lambda *_: 1)
    with opened(bundles[1], 2) as llm:
        arrays: Any = llm.runtime.pair.arrays
        add, rows = arrays.add_unread, set[int]()

        def watched(slot: int, at: int, features: Any, nodes: Sequence[int]) -> None:
            rows.add(at + len(nodes))
            add(slot, at, features, nodes)

        monkeypatch.setattr(arrays, "add_unread", watched)
        plain = llm.generate(prompts()[:2], params, speculate=False)
        drafted = llm.generate(prompts()[:2], params)
        assert max(rows) == arrays.most_unread
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert max(c.statistics.mean_acceptance_length for c in drafted) > 1


def test_structured_outputs_and_prompt_logprobs_are_those_of_onnxruntime(
    bundles: tuple[Bundle, Bundle],
) -> None:
    """The host cuts and extends the drafts of a batch that is on the device."""
    pytest.importorskip("llguidance")
    form = StructuredOutputs(grammar='start: "abcdefgh" /[a-z]{1,9}/ ("," /[0-9]{2}/)*')
    wanted = [
        SamplingParams(max_tokens=24, structured_outputs=form),
        SamplingParams(max_tokens=12, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=0.9, seed=3, structured_outputs=form),
        SamplingParams(max_tokens=2, prompt_logprobs=True, top_logprobs=2),
    ]
    found = []
    for bundle in bundles:
        with opened(bundle) as llm:
            found.append([llm.generate(prompts()[:4], wanted, block_length=n) for n in (BLOCK, 2, 1, None)])
    for ours, theirs in zip(*found, strict=True):
        assert [c.token_ids for c in theirs] == [c.token_ids for c in ours]
        assert theirs[0].text.startswith("abcdefgh")
        logprobs = [c[3].prompt_logprobs or [] for c in (ours, theirs)]
        assert logprobs[1][1:] == pytest.approx(logprobs[0][1:], abs=1e-3)
        tops = [
            [[token for token, _ in top] for top in c[3].prompt_top_logprobs or []] for c in (ours, theirs)
        ]
        assert tops[0] == tops[1]


def test_the_block_length_learns_from_the_device(bundles: tuple[Bundle, Bundle]) -> None:
    """It gets the drafts, which are read with the results."""
    with opened(bundles[1]) as llm:
        llm.generate(prompts(), params(0.0), draft_source="drafter")
        policy = llm.runtime.lengths(RequestOptions(draft_source="drafter"))
        assert isinstance(policy, AdaptiveLength)
        assert policy._rates.gains().tolist() != Rates(policy.block_size - 1).gains().tolist()


def test_a_prompt_fills_the_cache_to_its_last_row(bundles: tuple[Bundle, Bundle]) -> None:
    """The last part of a prompt is not filled up where the cache ends. Longer than the slot, it would be refused."""
    prompt = np.random.default_rng(2).integers(0, 300, 97).tolist()
    found = []
    for bundle in bundles:
        with LLM(bundle.path, threads=1, prefill_chunk=32) as llm:
            found.append(llm.generate(prompt, SamplingParams(max_tokens=3, ignore_eos=True)).token_ids)
    assert found[0] == found[1]


def test_a_pass_over_idle_slots_stays_in_the_caches(bundles: tuple[Bundle, Bundle]) -> None:
    """Also over the slot of a pass at their end. Writing beyond it, a pass would fail."""
    with opened(bundles[1], slots=4) as llm:
        pair: Any = llm.runtime.pair
        for slots in (4, 3):
            pair.drafter.dummy_pass(slots, BLOCK, pair.capacity)
            pair.dummy_verify(slots, BLOCK, pair.capacity)


def test_the_drafter_reads_zeros_behind_the_features_of_a_short_part(bundles: tuple[Bundle, Bundle]) -> None:
    with LLM(bundles[1].path, threads=1) as llm:
        pair: Any = llm.runtime.pair
        pair.prefill(prompts()[1], 0, 0, draft=True)
        features = pair.drafter.runner.whole_buffer(PREFILL, "features")
        features.fill_(torch.nan)  # such as those of a request that was not finite
        pair.drafter.read(pair.arrays.unread_features_of(0, 0, 2), [2], [40], 0)
        assert all(torch.isfinite(rows).all() for rows in pair.drafter.caches.arrays.values())
        unread = pair.arrays.unread_features_of(0, 0, 2)
        buffer = pair.drafter.runner.buffer(PREFILL, "features", 1, 16, unread.shape[2])
        assert not buffer[0, 2:].any()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Bundle]:
    """A pair with two candidates for each place, and a window that ends within a tree."""
    directory = tmp_path_factory.mktemp("wide")
    layers = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9}
    target = make_target(directory / "target", favourites=6, layers=2, **layers)
    drafter = make_drafter(directory / "drafter", target, taps=(0, 1), block_size=BLOCK)
    return built(directory, target, drafter, tree_width=2)


@pytest.mark.parametrize(("kernel", "temperature"), [(False, 0.0), (False, 0.8), (True, 0.8)])
def test_trees_give_the_tokens_of_onnxruntime(
    wide: tuple[Bundle, Bundle], kernel: bool, temperature: float
) -> None:
    """Five requests in three slots, with penalties. Torch moves rows, or kernels in the interpreter, which sample."""
    asked = [replace(p, presence_penalty=0.4 * (i % 2)) for i, p in enumerate(params(temperature))]
    texts = prompts()
    if kernel:  # the interpreter is slow
        texts, asked = texts[:4], [replace(p, max_tokens=8) for p in asked[:4]]
    moved = list[Sequence[int]]()
    with LLM(wide[0].path, threads=1) as reference:
        expected = [c.token_ids for c in reference.generate(texts, asked, speculate=False)]
    with opened(wide[1]) as llm:
        pair: Any = llm.runtime.pair
        for each in pair.target.caches.kinds if kernel else ():
            each.pool.compact_by(by_triton, BLOCK)
            pair.arrays.run, pair.arrays.samples = by_triton, True
        compact = pair.target.caches.compact
        pair.target.caches.compact = lambda slot, start, nodes: (
            moved.append(nodes) or compact(slot, start, nodes)
        )
        for nodes in (BLOCK, 4, 0) if not kernel else (BLOCK,):
            found = llm.generate(texts, asked, tree_nodes=nodes)
            assert [c.token_ids for c in found] == expected
            assert (sum(c.statistics.num_trees for c in found) > 0) == (nodes > 0)
        assert moved
        assert llm.most_tree_nodes == BLOCK
        with pytest.raises(RequestError, match=rf"tree_nodes is {BLOCK + 1}, expected 2\.\.{BLOCK}, or 0"):
            llm.generate([1, 2], asked[0], tree_nodes=BLOCK + 1)


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Bundle]:
    directory, layers = tmp_path_factory.mktemp("recurrent"), ["linear_attention", "full_attention"]
    target = make_hybrid(
        directory / "target", DENSE, favourites=6, num_hidden_layers=3, layer_types=[*layers, layers[0]]
    )
    drafter = make_drafter(directory / "drafter", target, block_size=BLOCK, layers=1, taps=(0, 1))
    return built(directory, target, drafter)


def test_states_give_the_tokens_of_onnxruntime(recurrent: tuple[Bundle, Bundle]) -> None:
    """Later rounds reuse prefixes at the boundaries where states were kept, and the copies of a row enter no state."""
    expected = expected_of(recurrent[0], 0.8)
    with opened(recurrent[1], prefix_cache_bytes=1 << 22) as llm:
        for block_length in (None, 1, BLOCK):
            found = llm.generate(prompts(), params(0.8), block_length=block_length)
            assert [c.token_ids for c in found] == expected
        assert sum(c.statistics.num_accepted_tokens for c in found) > 0
        assert found[1].statistics.num_cached_tokens == len(prompts()[1]) - 1
        states = llm.runtime.pair.target.caches.states
        assert states._on_device.tolist() == states._positions.tolist()
        llm.runtime.pair.rule = PassRule((4, BLOCK))
        found = llm.generate(prompts(), params(0.8), block_length=3)
        assert [c.token_ids for c in found] == expected


def test_states_move_and_are_cleared_by_slot(recurrent: tuple[Bundle, Bundle]) -> None:
    with opened(recurrent[1], 4) as llm:
        pair: Any = llm.runtime.pair
        caches = pair.target.caches
        pair.prefill(prompts()[1][:20], 0, 1, draft=False)
        names = [name for name in caches.arrays if "_state" in name]
        assert len(names) == 8  # four of each of two layers

        def state(slot: int) -> dict[str, torch.Tensor]:
            return {name: caches.arrays[name][slot].clone() for name in names}

        made = state(1)
        assert caches.states.position(1) == 19  # the last row of a prompt can be taken back
        assert list(caches.cut_lengths(1, 20)) == [19, 20]
        assert all(each.abs().max() > 0 for each in made.values())
        caches.copy(1, 0, 20)
        kept = caches.keep(1, 0, 20, 1)
        assert list(kept.lengths) == [19, 20]
        assert kept.size == caches.kept_bytes(20)
        caches.clear(1, 19)
        cleared = state(1)
        for name, before in made.items():
            assert torch.equal(cleared[name], torch.zeros_like(before) if "pending" in name else before)
        caches.clear(1)
        assert caches.states.position(1) == 0
        assert all(each.abs().max() == 0 for each in state(1).values())
        caches.restore(2, [kept], 20)
        for slot in (0, 2):
            assert caches.states.position(slot) == 19
            assert all(torch.equal(made[name], each) for name, each in state(slot).items())
        assert caches.keep(2, 0, 12, 1).lengths == ()  # the state has read more
        assert POSITION not in caches.arrays

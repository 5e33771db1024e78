"""Decoding with drafts as Transformers' own DFlash loop and z-lab's do it: the same tokens, and in every round the same
number of accepted drafts.

Both loops keep caches and cut them back, and know nothing of this project. Transformers 5.24 has one drafter class,
Muse Glimmer's, which is DFlash with two other names of tensors, full or windowed layers and a block that sees itself.
z-lab's package has DFlash and DFlash2. Prompts are longer than every window, and 64 tokens follow. Transformers'
MtpModel has the layers of multi-token prediction, but its loop refuses targets with states.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import dflash.model
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator
from transformers.modeling_layers import MtpModel

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.family_checkpoints import make_gpt_oss, make_gpt_oss_drafter
from tests.doubles.hybrid_checkpoints import DENSE, NEXT, SPARSE_IMAGES, load_hybrid, make_hybrid
from tests.doubles.kind_checkpoints import make_dflash2
from tests.doubles.reference import DFlash2, Drafter, load_target
from tests.doubles.text_checkpoints import GEMMA, load_text, make_assistant, make_gemma, make_muse
from tests.models.test_families import load as load_family

SLIDING, FULL = "sliding_attention", "full_attention"
PROMPT, COUNT = 50, 64
Make = Callable[[Path], Path]


def qwen3(path: Path, **settings: Any) -> Path:
    return make_target(path, **{"dtype": "float32", "favourites": 6, **settings})


def gemma(path: Path) -> Path:
    return make_gemma(path, GEMMA, dtype="float32", favourites=3)


ODD = {"hidden": 40, "heads": 3, "kv_heads": 1, "head_dim": 12, "intermediate": 56, "layers": 5}
# name: (target, how Transformers loads it, fields of a DFlash drafter that all read)
SHARED: dict[str, tuple[Make, Callable[[Path], Any], dict[str, Any]]] = {
    "windows of both": (
        lambda path: qwen3(path, sliding_window=20),
        load_target,
        {"layer_types": (SLIDING, SLIDING), "sliding_window": 12},
    ),
    "one window, odd sizes": (
        lambda path: qwen3(path, favourites=3, **ODD),
        load_target,
        {"heads": 5, "kv_heads": 1, "head_dim": 20, "intermediate": 36, "block_size": 5, "taps": (0, 2, 3)}
        | {"layers": 3, "layer_types": (SLIDING, FULL, SLIDING), "sliding_window": 9, "seed": 0},
    ),
    "gpt-oss": (
        lambda path: make_gpt_oss(path, favourites=3),
        load_family,
        {"layer_types": (SLIDING, FULL), "sliding_window": 9, "block_size": 10},
    ),
    # Transformers scales embedded rows as the target does, z-lab's package as the file says.
    "gemma 4": (
        gemma,
        load_text,
        {"layer_types": (FULL, SLIDING), "sliding_window": 16, "softcap": 4.0, "scale": 8.0},
    ),
}


def dflash2(**settings: Any) -> Callable[[Path, Path], Path]:
    return lambda path, target: make_dflash2(path, target, **settings)


# name: (target, how Transformers loads it, drafter) that z-lab's package alone reads
ZLAB: dict[str, tuple[Make, Callable[[Path], Any], Callable[[Path, Path], Path], type[Drafter]]] = {
    "causal window": (
        lambda path: qwen3(path, sliding_window=20),
        load_target,
        lambda path, target: make_drafter(
            path, target, dtype="float32", layer_types=(SLIDING, FULL), sliding_window=10, softcap=5.0
        ),
        Drafter,
    ),
    "gpt-oss, as published": (
        lambda path: make_gpt_oss(path, favourites=3),
        load_family,
        make_gpt_oss_drafter,
        Drafter,
    ),
    "dflash2, windows, soft-cap, odd block": (
        lambda path: qwen3(path, sliding_window=20, layers=5, heads=3, kv_heads=1),
        load_target,
        dflash2(window=9, softcap=6.0, multiplier=0.5, block_size=5, layers=3),
        DFlash2,
    ),
    "dflash2 of gemma 4, rows as stored": (gemma, load_text, dflash2(window=12), DFlash2),
    "dflash2 of gemma 4, scaled rows": (gemma, load_text, dflash2(scale=8.0), DFlash2),
    "dflash2 of muse glimmer": (
        lambda path: make_muse(path, favourites=6, sliding_window=20),
        load_text,
        dflash2(window=12, softcap=20.0, multiplier=0.5),
        DFlash2,
    ),
}


def prompt() -> list[int]:
    return np.random.default_rng(0).integers(0, 300, PROMPT).tolist()


@dataclass
class Loop:
    """What a loop did. blocks: of each round, the anchor and its drafts. accepted: of each round."""

    tokens: list[int]
    blocks: list[list[int]]
    accepted: list[int]

    def whole_rounds(self, size: int) -> list[tuple[list[int], int]]:
        """Those that began with more than `size` tokens to go. After them, loops shorten blocks differently."""
        made = accumulate((count + 1 for count in self.accepted), initial=1)
        rounds = zip(self.blocks, self.accepted, made, strict=False)
        return [(block, count) for block, count, before in rounds if before + size < COUNT]


def watched(model: Any) -> list[list[int]]:
    """The tokens of each pass of a target."""
    passes: list[list[int]] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: passes.append((args[0] if args else kwargs["input_ids"])[0].tolist()),
        with_kwargs=True,
    )
    return passes


def of_transformers(model: Any, drafter: Any, monkeypatch: pytest.MonkeyPatch) -> Loop:
    accepted: list[int] = []
    get_candidates = DFlashTokenCandidateGenerator.get_candidates

    def counted(self: Any, *args: Any, n_last_matches: int, **kwargs: Any) -> Any:
        accepted.append(n_last_matches)
        return get_candidates(self, *args, n_last_matches=n_last_matches, **kwargs)

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", counted)
    ids = torch.tensor([prompt()])  # a token of padding may be among them
    common = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": COUNT,
        "do_sample": False,
        "eos_token_id": None,
    }
    with torch.no_grad():
        plain = model.generate(ids, **common)[0, PROMPT:].tolist()
        passes = watched(model)
        drafted = model.generate(ids, assistant_model=drafter, speculation_type="dflash", **common)
    assert drafted[0, PROMPT:].tolist() == plain
    return Loop(
        plain, passes[1:], accepted[2:]
    )  # a call knows of the round before, and the first follows none


def of_zlab(model: Any, drafter: Any, monkeypatch: pytest.MonkeyPatch) -> Loop:
    monkeypatch.setattr(dflash.model, "_cuda_time", time.perf_counter)
    passes, ids = watched(model), torch.tensor([prompt()])
    found = dflash.model.dflash_generate(drafter, model, ids, COUNT, None, return_stats=True)
    accepted = [count - 1 for count in found.acceptance_lengths]
    return Loop(found.output_ids[0, PROMPT:].tolist(), passes[1:], accepted)


def of_mtp_model(model: Any, size: int) -> Loop:
    """Blocks of `size`, from Transformers' MtpModel without a cache: its rows are the target's last states, and after
    them its own."""
    config = model.config.get_text_config()
    config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
    mtp = MtpModel.from_pretrained(model).eval()
    found, tokens = Loop([], [], []), prompt()

    def target() -> tuple[list[int], torch.Tensor]:
        ids = torch.tensor([tokens])
        return model(ids).logits[0].argmax(-1).tolist(), model.get_decoder()(ids).last_hidden_state

    with torch.no_grad():
        best, states = target()
        while len(found.tokens) < COUNT:
            block = [best[-1]]
            ids = torch.tensor([[*tokens[1:], best[-1]]])
            for _ in range(size - 1):
                rows = mtp.forward_layer(0, states, torch.arange(ids.shape[1])[None], None, input_ids=ids)
                block.append(int(mtp._project_to_logits(rows[0, -1]).argmax()))
                states = torch.cat([states, rows[:, -1:]], 1)
                ids = torch.cat([ids, torch.tensor([block[-1:]])], 1)
            tokens += block
            best, states = target()
            right = best[-size:-1]
            accepted = next(
                (i for i, (a, b) in enumerate(zip(block[1:], right, strict=True)) if a != b), size - 1
            )
            found.blocks.append(block)
            found.accepted.append(accepted)
            found.tokens += block[: accepted + 1]
            cut = size - 1 - accepted
            tokens, best, states = (
                tokens[: len(tokens) - cut],
                best[: len(best) - cut],
                states[:, : states.shape[1] - cut],
            )
    return Loop(found.tokens[:COUNT], found.blocks, found.accepted)


def assert_ours(target: Path, drafter: Path | str, work: Path, theirs: Loop) -> None:
    bundle = build(str(target), str(drafter), work / "bundle", max_seq_len=256)
    params, blocks = SamplingParams(max_tokens=COUNT, ignore_eos=True), list[list[int]]()
    with LLM(bundle.path, max_batch_size=2, prefill_chunk=16, threads=1) as llm:
        assert list(llm.generate(prompt(), params, speculate=False).token_ids) == theirs.tokens
        ours = llm.runtime.pair.drafter
        propose = ours.propose

        def noted(active: Any, length: int) -> Any:
            draft = propose(active, length)
            blocks.extend(draft.tokens_of(slot) for slot in range(len(active)))
            return draft

        ours.propose = noted
        options = {"block_length": llm.block_size, "tree_nodes": 0, "draft_source": "drafter"}
        chunks = [chunk.token_ids for chunk in llm.stream(prompt(), params, **options) if chunk.token_ids]
    assert [token for chunk in chunks for token in chunk] == theirs.tokens
    found = Loop(theirs.tokens, blocks, [len(chunk) - 1 for chunk in chunks[1:]])
    assert found.whole_rounds(llm.block_size) == theirs.whole_rounds(llm.block_size)
    assert sum(found.accepted) > 1


def assistant(drafter: Path) -> Any:
    """A DFlash drafter in Transformers' class."""
    config = json.loads((drafter / "config.json").read_text())
    fields = config | config["dflash_config"]
    # Its windows reach this far in both directions, those of z-lab's class count the row itself.
    fields["sliding_window"] = (config["sliding_window"] or 2) - 1
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    model = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(**{k: v for k, v in fields.items() if k != "model_type"})
    )
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    model.load_state_dict({names.get(n, n): w for n, w in load_file(drafter / "model.safetensors").items()})
    model.set_attn_implementation("eager")
    return model.eval()


@pytest.mark.parametrize("name", SHARED)
def test_dflash_in_both_loops(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, load, fields = SHARED[name]
    target = make(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", target, dtype="float32", is_causal=False, **fields)
    expected = of_transformers(load(target), assistant(drafter), monkeypatch)
    found, size = of_zlab(load(target), Drafter(drafter).model, monkeypatch), fields.get("block_size", 8)
    assert found.tokens == expected.tokens
    assert found.whole_rounds(size) == expected.whole_rounds(size)
    assert_ours(target, drafter, tmp_path, expected)


@pytest.mark.parametrize("name", ZLAB)
def test_dflash_and_dflash2_in_the_loop_of_z_lab(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, load, make_of, reference = ZLAB[name]
    target = make(tmp_path / "target")
    drafter = make_of(tmp_path / "drafter", target)
    assert_ours(target, drafter, tmp_path, of_zlab(load(target), reference(drafter).model, monkeypatch))


def test_meta_s_drafter_in_the_loop_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_muse(tmp_path / "target", favourites=6, sliding_window=20)
    drafter = make_assistant(tmp_path / "drafter")
    theirs = MuseGlimmerAssistantModel.from_pretrained(drafter, attn_implementation="eager").eval()
    assert_ours(target, drafter, tmp_path, of_transformers(load_text(target), theirs, monkeypatch))


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [(DENSE, {"num_key_value_heads": 1}), (NEXT, {}), (SPARSE_IMAGES, {"stacked": True})],
    ids=["dense", "experts", "stacked experts, with images"],
)
def test_the_target_s_own_layer_in_the_model_of_transformers(
    architecture: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_TRT_CACHE", str(tmp_path / "cache"))
    target = make_hybrid(tmp_path / "target", architecture, prediction=True, favourites=6, **fields)
    assert_ours(target, "mtp", tmp_path, of_mtp_model(load_hybrid(target), 8))

"""Compare drafts with those of the library speculators: DFlash, DFlash2, DSpark with each head, and EAGLE-3.

The library makes random drafters and saves them. This package builds them, and drafts on ONNX Runtime. The library's
modules compute the rows of the same block. Needs `speculators` (tried with 0.9.0) beside the test requirements.

    python -m build_scripts.speculators_parity DIRECTORY
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import speculators.models as library
import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from dflash_trt.building.build import build
from dflash_trt.engines.onnxruntime import OnnxRuntimeEngine
from dflash_trt.models.drafters.dspark import CANDIDATES
from tests.doubles.checkpoints import MASK, draw, make_target
from tests.doubles.kind_checkpoints import (
    HEAD_DIM,
    HEADS,
    INTERMEDIATE,
    KV_HEADS,
    draft_vocabulary,
    target_config,
)
from tests.doubles.reference import load_target, target_outputs

LAYERS, CONTEXT, ANCHOR, VOCABULARY = 6, 21, 9, 200


def settings(target: Path, kind: type, layers: int, algorithm: str, **fields: Any) -> dict[str, Any]:
    """The fields that all configurations share."""
    of_target = target_config(target)
    inner = kind(
        hidden_size=of_target["hidden_size"],
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=of_target["vocab_size"],
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
    )
    inner._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=7)
    verifier = VerifierConfig(name_or_path=str(target), architectures=of_target["architectures"])
    return {
        "transformer_layer_config": inner,
        "draft_vocab_size": VOCABULARY,
        "speculators_config": SpeculatorsConfig(
            algorithm=algorithm,
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=verifier,
        ),
        **fields,
    }


def made(model: Any, out: Path, seed: int) -> Any:
    """The model with drawn weights and the target's embedding, saved in `out`."""
    vocab, size = model.config.transformer_layer_config.vocab_size, model.config.draft_vocab_size
    if size < vocab:
        d2t, t2d = draft_vocabulary(vocab, size, seed)
        model.load_vocab_mappings(t2d, d2t)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        if not name.startswith(("embed_tokens", "lm_head", "verifier")):
            weight.data.copy_(draw(name, weight.shape, generator))
    model.load_verifier_weights()
    model.eval().save_pretrained(out)
    return model


def places(model: Any) -> Tensor:
    """The target's ids of the head's tokens."""
    ids = torch.arange(model.config.draft_vocab_size)
    return ids if model.d2t is None else ids + model.d2t


def block_rows(model: Any, features: Tensor, count: int) -> Tensor:
    """The normed rows of a block [anchor, mask, ...] behind the features."""
    block = torch.tensor([[ANCHOR] + [MASK] * (count - 1)])
    context, rows = model.hidden_norm(model.fc(features[None])), model.embed_tokens(block)
    positions = torch.arange(CONTEXT + count)[None]
    rotations = model.rotary_emb(rows, positions)
    for layer in model.layers:
        rows = layer(
            hidden_states=rows, target_hidden=context, attention_mask=None, position_embeddings=rotations
        )
    normed: Tensor = model.norm(rows)[0]
    return normed


def of_block(model: Any, features: Tensor, drafts: list[int], tokens: list[int]) -> list[int]:
    """The library's drafts of a block, each behind our draft before it."""
    config = model.config
    rows = block_rows(model, features, config.block_size)
    before = torch.tensor([ANCHOR, *drafts[:-1]])
    if not config.sample_from_anchor:
        rows = rows[1:]
    scores, candidates = model.lm_head(rows), model.config.draft_vocab_size
    if isinstance(model, DFlash2DraftModel):
        ids, found = model.candidate_selector.select(scores, rows, before)
        chosen: list[int] = ids.gather(1, found.argmax(-1, keepdim=True))[:, 0].tolist()
        return chosen
    if isinstance(model, DSparkDraftModel):
        bias, candidates = (
            model.markov_head.block_bias(prev_token_ids=before[None], hidden_states=rows[None])[0],
            CANDIDATES,
        )
        best = scores.topk(candidates).indices
        scores = torch.full_like(scores, -torch.inf).scatter(1, best, (scores + bias).gather(1, best))
    best_of_each: list[int] = places(model)[scores.argmax(-1)].tolist()
    return best_of_each


def of_chain(model: Any, features: Tensor, drafts: list[int], tokens: list[int]) -> list[int]:
    """The library's drafts of an EAGLE-3 head, each behind our draft before it."""
    taps = features
    if model.input_norm is not None:
        taps = model.input_norm(taps)
    if model.fc_norm is not None:
        taps = torch.cat([norm(x) for norm, x in zip(model.fc_norm, taps.chunk(3, -1), strict=True)], -1)
    states, fed, found = model.fc(taps), [*tokens[1:], ANCHOR], list[int]()
    for draft in drafts:
        rows = torch.cat([model.embed_tokens(torch.tensor(fed)), states], -1)[None]
        positions = torch.arange(len(fed))[None]
        mask = torch.full((len(fed), len(fed)), -torch.inf).triu(1)[None, None]
        rotations = model.rotary_emb(rows, positions)
        row = model.layers[0](rows, attention_mask=mask, position_embeddings=rotations)[0, -1]
        normed = model.norm(row)
        found.append(int(places(model)[model.lm_head(normed).argmax()]))
        fed.append(draft)
        states = torch.cat([states, (normed if model.config.norm_output else row)[None]])
    return found


@torch.no_grad()
def main() -> int:
    directory = Path(sys.argv[1])
    target = make_target(directory / "target", layers=LAYERS, dtype="float32", favourites=6)
    vocab = target_config(target)["vocab_size"]
    block = {"aux_hidden_state_layer_ids": [2, 4], "mask_token_id": MASK}
    eagle = library.Eagle3SpeculatorConfig

    def dspark(head: str) -> Any:
        heads = {"markov_head_type": head, "markov_rank": 24, "enable_confidence_head": False}
        fields = settings(target, Qwen3Config, 2, "dspark", block_size=7, **block, **heads)
        return DSparkDraftModel(DSparkSpeculatorConfig(**fields))

    cases: dict[str, Callable[[], Any]] = {
        "dflash": lambda: library.DFlashDraftModel(
            library.DFlashSpeculatorConfig(
                **settings(target, Qwen3Config, 2, "dflash", block_size=8, **block)
            )
        ),
        "dflash2": lambda: DFlash2DraftModel(
            DFlash2SpeculatorConfig(
                **settings(target, Qwen3Config, 2, "dflash2", block_size=8, selector_rank=24, **block)
                | {"draft_vocab_size": vocab}
            )
        ),
        **{f"dspark, {head}": partial(dspark, head) for head in ("vanilla", "gated", "rnn")},
        "eagle3": lambda: library.Eagle3DraftModel(
            eagle(**settings(target, LlamaConfig, 1, "eagle3", norm_before_residual=True))
        ),
        "eagle3.1": lambda: library.Eagle3DraftModel(
            eagle(**settings(target, Qwen3Config, 1, "eagle3", fc_norm=True, norm_output=True))
        ),
    }
    model, wrong = load_target(target), 0
    tokens = np.random.default_rng(3).integers(0, 300, CONTEXT).tolist()
    for seed, (name, make) in enumerate(cases.items()):
        place = directory / name
        theirs = made(make(), place / "drafter", seed)
        bundle = build(str(target), str(place / "drafter"), place / "bundle", max_seq_len=64)
        taps, size = bundle.manifest["target_layer_ids"], bundle.manifest["block_size"]
        features = target_outputs(model, tokens, taps)[1]
        engine = OnnxRuntimeEngine(bundle.path / "drafter.onnx", slots=1, capacity=bundle.capacity, threads=1)
        feeds = {
            "features": features[None].numpy(),
            "n_features": np.array([CONTEXT]),
            "start": np.array([0]),
        }
        drafts = engine.run({**feeds, "block": np.array([[ANCHOR] + [MASK] * (size - 1)])})["draft_tokens"]
        ours = drafts[0, :, 0].tolist()
        own = features[:, features.shape[1] // len(taps) :] if "eagle3" in name else features
        expected = (of_chain if "eagle3" in name else of_block)(theirs, own, ours, tokens)
        wrong += ours != expected
        print(f"{name}: {'equal' if ours == expected else 'DIFFERENT'} {ours} {expected}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())

"""DFlash's drafts are those of Transformers' own DFlash class.

Transformers has one drafter of this kind, for Muse Glimmer. Its layers are DFlash's. Two tensors have other names.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.building.build import build
from dflash_trt.engines.onnxruntime.engine import OnnxRuntimeEngine
from tests.doubles.checkpoints import MASK, make_drafter, make_target
from tests.doubles.reference import load_target, target_outputs

_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


@torch.no_grad()
def test_drafts_are_those_of_transformers(tmp_path: Path) -> None:
    module = pytest.importorskip(
        "transformers.models.muse_glimmer_assistant", reason="is in Transformers 5.23"
    )
    target = make_target(tmp_path / "target", dtype="float32", favourites=6)
    drafter = make_drafter(tmp_path / "drafter", target, dtype="float32")
    config = module.MuseGlimmerAssistantConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        max_position_embeddings=2048,
        layer_types=["full_attention"] * 2,
        block_size=8,
        mask_token_id=MASK,
        target_layer_ids=[1, 2],
    )
    config._attn_implementation = "eager"
    theirs = module.MuseGlimmerAssistantModel(config).eval()
    weights = load_file(drafter / "model.safetensors")
    theirs.load_state_dict({_NAMES.get(name, name): weight for name, weight in weights.items()})

    model = load_target(target)
    tokens = np.random.default_rng(3).integers(0, 300, 21).tolist()
    features = target_outputs(model, tokens, config.target_layer_ids)[1]
    block = torch.tensor([[9] + [MASK] * 7])
    rows = theirs(
        noise_embeds=model.model.embed_tokens(block),
        context_hidden_states=features[None],
        attention_mask={"full_attention": None},
        use_cache=False,
    ).last_hidden_state
    expected = model.lm_head(rows)[0, 1:].log_softmax(-1).max(-1)

    bundle = build(str(target), str(drafter), tmp_path / "bundle", max_seq_len=64)
    engine = OnnxRuntimeEngine(bundle.path / "drafter.onnx", slots=1, capacity=bundle.capacity, threads=1)
    feeds = {"features": features[None].numpy(), "n_features": np.array([21]), "start": np.array([0])}
    out = engine.run({**feeds, "block": block.numpy()})
    assert out["draft_tokens"][0, :, 0].tolist() == expected.indices.tolist()
    assert np.abs(out["draft_logprobs"][0, :, 0] - expected.values.numpy()).max() <= 2e-4

"""The doubles' config.json has no field that the published file of its format does not have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.family_checkpoints import GPT_OSS_DRAFTER, make_gpt_oss_drafter
from tests.doubles.kind_checkpoints import make_dflash2, make_eagle3, target_config

# What every config.json of Transformers may have. Nothing reads it here.
_IDLE = "auto_map attention_dropout bos_token_id dtype eos_token_id initializer_range torch_dtype use_cache"
_SHAPE = (
    "architectures model_type hidden_act hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads rms_norm_eps max_position_embeddings vocab_size tie_word_embeddings"
)
_DFLASH = (
    f"{_IDLE} {_SHAPE} attention_bias dflash_config head_dim is_causal layer_types max_window_layers num_target_layers "
    "sliding_window use_sliding_window"
)
# SafeAILab's EAGLE3-LLaMA3.1-Instruct-8B, as SGLang's and SpecForge's tests quote it.
_EAGLE3 = f"{_IDLE} {_SHAPE} draft_vocab_size pad_token_id"
# z-lab's Qwen3-8B-DFlash-b16, gpt-oss-20b-DFlash and Qwen3.8-27B-DFlash2.
_DFLASH_OLD = f"{_DFLASH} block_size rope_scaling rope_theta"
_DFLASH_GPT_OSS = f"{_DFLASH_OLD} initial_context_length"
_DFLASH2 = f"{_DFLASH} rope_parameters"


@pytest.mark.parametrize(
    ("make", "published"),
    [
        (make_eagle3, _EAGLE3),
        (make_drafter, _DFLASH_OLD),
        (lambda out, target: make_gpt_oss_drafter(out, target, **GPT_OSS_DRAFTER), _DFLASH_GPT_OSS),
        (
            lambda out, target: make_drafter(out, target, old_config=False, block_size_in="dflash_config"),
            _DFLASH2,
        ),
        (make_dflash2, _DFLASH2),
    ],
)
def test_no_field_more_than_published(
    make: Callable[[Path, Path], Path], published: str, tmp_path: Path
) -> None:
    written = target_config(make(tmp_path / "drafter", make_target(tmp_path / "target")))
    assert set(written) <= set(published.split())

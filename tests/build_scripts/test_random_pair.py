"""The generated checkpoints of build_scripts.random_pair."""

from __future__ import annotations

import numpy as np

from build_scripts import random_pair
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.models.configs import read_drafter_config, read_target_config
from tests.doubles.family_checkpoints import make_gpt_oss, make_gpt_oss_drafter


def test_a_generated_pair_has_the_layers_and_the_tensors_of_its_configuration(tmp_path, monkeypatch) -> None:
    known = make_gpt_oss(tmp_path / "known"), tmp_path / "drafter"
    make_gpt_oss_drafter(known[1], known[0], layers=1)
    monkeypatch.setattr(random_pair, "known_configs", lambda pair: known)
    (tmp_path / "made").mkdir()
    sizes = random_pair.write_pair(tmp_path / "made", "any", 2, None)
    target, drafter = tmp_path / "made" / "target", tmp_path / "made" / "drafter"
    assert read_target_config(target).num_hidden_layers == 2
    assert set(read_drafter_config(drafter).target_layer_ids) <= {0, 1}
    made, whole = Checkpoint(target), Checkpoint(known[0])
    assert set(made.tensors) == {
        name for name in whole.tensors if ".layers.2." not in name and ".layers.3." not in name
    }
    for name, tensor in made.tensors.items():
        assert (tensor.dtype, tensor.shape) == (whole[name].dtype, whole[name].shape), name
    assert sizes["target"] == sum(tensor.nbytes for tensor in made.tensors.values())
    contents = []
    for tensor in made.tensors.values():
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            contents.append(file.read(tensor.nbytes))
        if tensor.name.endswith("_scales"):
            assert set(np.frombuffer(contents[-1], np.uint8).tolist()) <= {118, 119, 120, 121}
    large = [each for each in contents if len(each) > 64]
    assert len(set(large)) == len(large)  # a plan keeps equal tensors once

"""A row of a target has the same bits in every decoding pass, whatever torch's products do: all are ours, in Triton's
interpreter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dflash_plugins.kernel_specs import Use
from dflash_plugins.launch import by_triton

from dflash_trt import LLM
from dflash_trt.building.build import build
from dflash_trt.engines.torch import TorchOptions, kernels
from dflash_trt.formats.precision import Precision
from tests.doubles import triton_interpreter  # noqa: F401  # corrects it
from tests.doubles.checkpoints import VOCAB, make_drafter
from tests.doubles.family_checkpoints import make_gpt_oss
from tests.doubles.hybrid_checkpoints import NEXT, make_hybrid
from tests.doubles.text_checkpoints import EXPERTS, GEMMA_IMAGES, make_gemma

HYBRID = ["linear_attention", "full_attention"]
TARGETS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt-oss, fp8 caches": (make_gpt_oss, {"num_hidden_layers": 2}),
    "gemma 4": (make_gemma, {"architecture": GEMMA_IMAGES, "num_hidden_layers": 2, **EXPERTS}),
    "qwen3-next": (make_hybrid, {"architecture": NEXT, "num_hidden_layers": 2, "layer_types": HYBRID}),
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_a_row_is_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, fields = TARGETS[name]
    target = make(tmp_path / "target", **fields)
    drafter = make_drafter(tmp_path / "drafter", target, layers=1, block_size=4, taps=(0, 1))
    both = Precision(target="bf16", drafter="bf16")
    asked: dict[str, Any] = {"engine": "torch", "precision": both, "max_seq_len": 64}
    asked["options"] = TorchOptions(cache="fp8" if "fp8" in name else None)
    bundle = build(str(target), str(drafter), tmp_path / "b", **asked)
    product, launched = F.linear, list[Use]()

    def run(use: Use, *grid: Any, **arguments: Any) -> None:
        launched.append(use)
        by_triton(use, *grid, **arguments)

    interpreted = kernels.LayerKernels(run)

    def by_rows(x: Any, *others: Any) -> Any:
        """As cuBLAS may choose a kernel by the number of rows, but far worse."""
        y = product(x, *others)
        return y if x.dtype == torch.float32 else y * (1 + 0.02 * (len(x) % 7))

    monkeypatch.setattr(F, "linear", by_rows)
    monkeypatch.setattr(kernels, "of", lambda _: interpreted)
    tokens = np.random.default_rng(0).integers(VOCAB, size=(2, 2)).tolist()
    with LLM(bundle.path, max_batch_size=2, threads=1) as llm:
        pair = llm.runtime.pair
        launched.clear()
        alone = [pair.logits([[token]], [start])[0, 0] for start, token in enumerate(tokens[0])]
        of_one = _sums(launched)
        pair.clear(0)
        assert np.array_equal(pair.logits(tokens, [0, 0])[0], alone)
    assert _sums(launched) == of_one, "a pass of several rows has other tiles"
    assert not interpreted.missing


def _sums(launched: list[Use]) -> set[tuple[str, str]]:
    """What the order of sums depends on: all sizes of kernels but the rows of a program, which may be as many as the
    pass has. Small layers have the same sums with other tiles.
    """
    kept = [{n: size for n, size in use.constants.items() if n != "TOKENS"} for use in launched]
    return {(use.function, str(sizes)) for use, sizes in zip(launched, kept, strict=True)}

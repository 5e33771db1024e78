"""DFlash2 in training: the network is that of plain torch, and a run gives a drafter that is built."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.checkpoint.catalogue import SHIPPED
from dflash_trt.checkpoint.draft_vocabulary import FILE, read_draft_vocabulary
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.errors import DFlashError
from dflash_trt.models.configs import read_drafter_config
from dflash_trt.prompts import read_prompts
from dflash_trt.training.answers import read_answers, write_prompts
from dflash_trt.training.dflash2 import DFlash2Drafter, Selection
from dflash_trt.training.evaluation import ALL, read_history
from dflash_trt.training.model import dense_mask
from dflash_trt.training.recipe import Design, Recipe
from dflash_trt.training.run import run
from tests.doubles.checkpoints import make_target
from tests.doubles.kind_checkpoints import make_dflash2
from tests.doubles.reference import DFlash2, load_target, target_outputs

LAYERS, TINY = 6, SHIPPED / "tiny" / "target"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), layers=LAYERS, dtype="float32")


def test_the_rows_of_a_dflash2_drafter(target: Path, tmp_path: Path) -> None:
    path = make_dflash2(tmp_path, target, window=9)
    weights = {
        n: w for n, w in load_file(path / "model.safetensors").items() if "candidate_selector" not in n
    }
    drafter = DFlash2Drafter(read_drafter_config(path), weights)
    reference, model, config = DFlash2(path), load_target(target), drafter.config
    size, text, anchors = config.block_size, list(range(40, 70)), torch.tensor([[9, 20]])
    features = target_outputs(model, text, config.target_layer_ids)[1]
    places = (anchors[..., None] + torch.arange(size)).flatten(1)
    block = torch.full((2, size), reference.mask_token_id)
    block[:, 0] = torch.tensor(text)[anchors[0]]
    masks = {
        kind: dense_mask(kind, anchors, torch.full((1, 2), size), len(text), size) for kind in config.layers
    }
    embedded = model.model.embed_tokens(block)
    rows = drafter(features[None], torch.arange(len(text))[None], embedded.flatten(0, 1)[None], places, masks)
    for i, anchor in enumerate(anchors[0].tolist()):
        expected = reference.hidden(features[:anchor], embedded[i])
        torch.testing.assert_close(rows[0].unflatten(0, (2, size))[i], expected, atol=1e-3, rtol=1e-3)


def test_a_dflash2_drafter_begins_as_dflash_and_its_selector_learns(target: Path, tmp_path: Path) -> None:
    """A new selector adds nothing. Its loss has a gradient, and counts the rows whose token is a candidate."""
    config = read_drafter_config(make_dflash2(tmp_path, target))
    torch.manual_seed(0)
    drafter, model = DFlash2Drafter(config), load_target(target)
    hidden = torch.randn(1, config.block_size, config.hidden_size)
    best = model.lm_head(hidden).topk(config.settings.top_k).indices[0]
    labels = best[:, 2][None].clone()
    labels[0, 3] = next(i for i in range(config.vocab_size) if i not in best[3])
    valid = torch.ones_like(labels, dtype=torch.bool)
    valid[0, 0] = False
    embedding = model.model.embed_tokens.weight
    task = Selection(labels, valid, model.lm_head.weight, embedding)
    loss = drafter._selector_loss(hidden, task)
    counted = [i for i in range(1, config.block_size) if i != 3]
    scores = model.lm_head(hidden)[0].topk(config.settings.top_k).values.log_softmax(-1)
    assert loss.item() == pytest.approx(-scores[counted, 2].mean().item(), rel=1e-4)
    loss.backward()
    gradient = drafter.candidate_selector.successor.weight.grad
    assert gradient is not None
    assert gradient.abs().max() > 0
    teacher = torch.randn_like(hidden)
    shared = drafter._selector_loss(hidden, replace(task, teacher=teacher, share=0.4))
    chosen = model.lm_head(hidden)[0].topk(config.settings.top_k)
    likely = model.lm_head(teacher)[0].gather(1, chosen.indices).softmax(-1)
    hard, soft = -scores[counted, 2].sum(), -(likely * scores)[1:].sum()
    total = 0.6 * len(counted) + 0.4 * (config.block_size - 1)
    assert shared.item() == pytest.approx(((0.6 * hard + 0.4 * soft) / total).item(), rel=1e-4)
    published = drafter.published(drafter.state_dict(), embedding)
    assert set(published) == set(Checkpoint(tmp_path).tensors)


def test_the_products_of_a_selector_have_few_shapes(target: Path, tmp_path: Path) -> None:
    """On CPUs, torch keeps a compiled product for each of the last 1,024 shapes, some MB each."""
    config = read_drafter_config(make_dflash2(tmp_path, target))
    drafter, model = DFlash2Drafter(config), load_target(target)
    shapes: set[torch.Size] = set()
    drafter.candidate_selector.predecessor.register_forward_hook(lambda _, x, y: shapes.add(x[0].shape))
    blocks, size = 60, config.block_size
    rows = torch.randn(1, blocks * size, config.hidden_size)
    for number in range(20):
        valid = torch.arange(blocks * size).view(blocks, size) < 40 * size + number * 7
        valid[:, 0] = False
        labels = torch.randint(0, 100, (blocks, size))
        task = Selection(labels, valid, model.lm_head.weight, model.model.embed_tokens.weight)
        assert drafter._selector_loss(rows, task).isfinite()
    assert len(shapes) <= 2


def test_a_run_gives_a_drafter(answers: Path, tmp_path: Path) -> None:
    """The loss falls, and the checkpoint is built with its draft vocabulary, measured, and continued after an end."""
    recipe = Recipe(steps=20, batch_size=2, anchors=6, learning_rate=2e-3, max_length=96)
    recipe = replace(recipe, eval_tokens=12)
    held_out = tmp_path / "held_out.jsonl"
    write_prompts(held_out, read_prompts(None, 0)[:2])
    lines: list[dict[str, Any]] = []
    design = Design(kind="dflash2", draft_vocabulary=300)
    out = tmp_path / "run"
    assert run(TINY, "tiny", answers, out, design, recipe, held_out=held_out, report=lines.append) == 20
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert losses[20] < losses[10]
    figures = read_history(out / "evaluation.jsonl")[20][ALL]
    assert figures["acceptance_length"] > 1
    assert "# DFlash2 drafter" in (out / "checkpoint" / "README.md").read_text()
    tokens = read_draft_vocabulary(out / "checkpoint" / FILE, 2048)
    assert len(tokens) == 300
    wanted = Counter(token for answer in read_answers(answers) for token in answer.answer_ids)
    assert {token for token, _ in wanted.most_common(200)} <= set(tokens)
    longer = replace(recipe, steps=21)
    with pytest.raises(DFlashError, match="--draft-vocabulary is 400"):
        run(TINY, "tiny", answers, out, replace(design, draft_vocabulary=400), longer, held_out=held_out)
    assert run(TINY, "tiny", answers, out, design, longer, held_out=held_out, evaluate_every=None) == 21
    # Another run continues from that DFlash2 drafter: its first checkpoint is that one, and then learns.
    further, begun = tmp_path / "further", load_file(out / "checkpoint" / "model.safetensors")
    design = replace(design, checkpoint=out / "checkpoint", kind=None)
    kept: list[dict[str, torch.Tensor]] = []

    def keep(line: dict[str, Any]) -> None:
        if not kept:
            kept.append(load_file(further / "checkpoint" / "model.safetensors"))

    run(TINY, "tiny", answers, further, design, longer, held_out=held_out, evaluate_every=None, report=keep)
    for name, tensor in kept[0].items():
        torch.testing.assert_close(tensor, begun[name], rtol=2**-7, atol=1e-6)
    last = load_file(further / "checkpoint" / "model.safetensors")
    assert all(
        not torch.equal(
            last[f"candidate_selector.{book}_codebook"], begun[f"candidate_selector.{book}_codebook"]
        )
        for book in ("predecessor", "successor")
    )


def test_codebooks_that_are_no_projections_are_continued(target: Path, tmp_path: Path) -> None:
    """Published ones are none: what the embedding does not explain is in the loss, and in the checkpoint."""
    path = make_dflash2(tmp_path, target)
    config, weights = read_drafter_config(path), load_file(path / "model.safetensors")
    drafter, model = DFlash2Drafter(config, weights), load_target(target)
    embedding = model.model.embed_tokens.weight
    drafter.start_selector(embedding)
    published = drafter.published(drafter.state_dict(), embedding)
    assert set(published) == set(weights)
    for name, tensor in weights.items():
        torch.testing.assert_close(published[name], tensor.float(), rtol=1e-4, atol=1e-5)
    hidden = torch.randn(1, config.block_size, config.hidden_size)
    labels = torch.randint(0, config.vocab_size, (1, config.block_size))
    valid = torch.arange(config.block_size)[None] > 0
    head, books = (
        model.lm_head.weight,
        [weights[f"candidate_selector.{book}_codebook"].float() for book in ("predecessor", "successor")],
    )
    likely = torch.randn_like(hidden)
    loss = drafter._selector_loss(hidden, Selection(labels, valid, head, embedding, likely, 1.0))
    best = (hidden[0] @ head.T).topk(config.settings.top_k)
    query = hidden[0] @ weights["candidate_selector.hidden_projection.weight"].float().T
    before = books[0][labels[0]].roll(1, 0)
    scores = (best.values + torch.einsum("nr,nkr->nk", query * before, books[1][best.indices])).log_softmax(
        -1
    )
    wanted = (likely[0] @ head.T).gather(1, best.indices).softmax(-1)
    assert loss.item() == pytest.approx(-(scores * wanted)[1:].sum(1).mean().item(), rel=1e-3)

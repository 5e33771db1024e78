"""The batch and the block lengths of a build for which no plan was made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_trt.checkpoint.catalogue import known_pair
from dflash_trt.engines import registry
from dflash_trt.models.inventory import Inventory
from dflash_trt.planning import times
from dflash_trt.planning.acceptance import Acceptance, published
from dflash_trt.planning.curve import Layout
from dflash_trt.planning.layouts import MAX_BATCH, ModelLayout
from dflash_trt.planning.memory import Settings
from dflash_trt.planning.operators import best_layouts
from dflash_trt.planning.slo import block_schedule, fastest
from dflash_trt.planning.work import work_of

# Block lengths that are compared, and the trained one.
BLOCKS = (2, 4, 6, 8, 10, 12, 16, 24, 32)
USUAL_CONTEXT = 2048
# A larger batch must add this much to the tokens per second of a GPU.
WORTH = 0.1


@dataclass(frozen=True, slots=True)
class Serving:
    """The times of one layout, and settings that follow from them. `times`: their source."""

    layout: Layout
    acceptance: Acceptance
    blocks: Sequence[int]
    times: str

    def batch(self, most: int) -> int:
        """The power of two up to `most`, beyond which twice the requests add less than a tenth of the throughput."""
        batch, most = 1, min(most, MAX_BATCH)
        while 2 * batch <= most and self._throughput(2 * batch) >= (1 + WORTH) * self._throughput(batch):
            batch *= 2
        return batch

    def drafts(self, batch: int) -> dict[int, int]:
        """TensorRT-LLM's draft_len_schedule for this largest batch: drafts by active requests.

        It begins with the whole block, as TensorRT-LLM demands. Empty where the whole block is best for all.
        """
        longest = max(self.blocks)
        steps = dict(block_schedule(self.layout, self.acceptance, batch, self.blocks))
        if steps[min(steps)] < longest:
            steps[1] = longest
        return {n: steps[n] - 1 for n in sorted(steps)} if len(steps) > 1 else {}

    def _throughput(self, batch: int) -> float:
        found = fastest(self.layout, self.acceptance, batch, self.blocks)
        return 0.0 if found is None else batch * found[1]


def lengths(trained: int) -> list[int]:
    """The block lengths that are compared for a drafter of blocks of `trained` rows."""
    return [*(block for block in BLOCKS if block < trained), trained]


def serving(inventory: Inventory, settings: Settings, pair: str | None) -> Serving | str:
    """The model for a known pair on the GPUs of `settings`, or why there is none.

    `pair`: the name of the pair whose target and drafter both are.
    """
    gpu, count = settings.gpu, settings.tensor_parallel
    known = None if pair is None else known_pair(pair)
    if known is None:
        return "the acceptance of this drafter is not published"
    acceptance, _ = published(known.name)
    if acceptance is None:
        return f"no acceptance of {known.name} is published"
    if "bf16" not in gpu.dense_flops:
        return f"no peak rate of {gpu.name} is published"
    if count > gpu.gpus_per_node:
        return "the model of times has one node"
    model = ModelLayout(
        gpus=count,
        most=MAX_BATCH,
        target=work_of(inventory, "target", gpu, gpus=count, precision=settings.precision),
        drafter=work_of(
            inventory,
            "drafter",
            gpu,
            gpus=count,
            precision=settings.precision,
            draft_vocabulary=registry.find(settings.engine).draft_vocabulary,
        ),
        config=inventory.target,
        gpu=gpu,
        context=min(USUAL_CONTEXT, settings.max_seq_len),
        constants=times.built_in(),
    )
    (layout,), source = best_layouts([model], settings.engine, known.name, stored=True)
    return Serving(layout, acceptance, lengths(settings.block_size), source)

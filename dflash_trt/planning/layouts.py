"""Layouts of a node, with the times of the model (dflash_trt/planning/times.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dflash_trt.checkpoint.schema import TargetConfig
from dflash_trt.engines import registry
from dflash_trt.errors import BuildError
from dflash_trt.models.inventory import Inventory
from dflash_trt.planning import times
from dflash_trt.planning.acceptance import Chain
from dflash_trt.planning.gpus import Gpu
from dflash_trt.planning.memory import Settings, estimate_memory
from dflash_trt.planning.work import Work, check_rates, work_of

MAX_BATCH = 512
_CHAIN_VOCABULARY = 32_000  # of the drafts of published EAGLE-3 heads


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """A layout as `curve.Layout`. The work of target and drafter is that of one of its GPUs."""

    gpus: int
    most: int
    target: Work
    drafter: Work
    config: TargetConfig
    gpu: Gpu
    context: int
    constants: times.Constants

    def plain(self, batch: int) -> float:
        return times.plain_seconds(
            self.target, self.gpu, self.constants, requests=batch, context=self.context
        )

    def round(self, batch: int, block: int) -> float:
        return times.round_seconds(
            self.target,
            self.drafter,
            self.gpu,
            self.constants,
            requests=batch,
            width=block,
            context=self.context,
        )

    def chain(self, batch: int, chain: Chain) -> float:
        constants, width = self.constants, chain.steps + 1
        verify = times.pass_seconds(
            self.target, self.gpu, constants, requests=batch, width=width, context=self.context
        )
        host = constants.round_seconds + constants.request_seconds * batch
        return verify + self.chain_seconds(batch, chain) + host

    def chain_seconds(self, batch: int, chain: Chain) -> float:
        """The passes of EAGLE-3's own layer in a round."""
        layer = _chain_work(self.config, self.gpu, self.gpus)
        step = times.pass_seconds(
            layer, self.gpu, self.constants, requests=batch, width=1, context=self.context
        )
        return chain.steps * step


def model_layouts(
    inventory: Inventory,
    settings: Settings,
    *,
    name: str,
    context: int,
    constants: times.Constants | None = None,
) -> list[ModelLayout]:
    """Every layout that fits on one node of `settings.gpu`, each with the largest batch that its memory holds.

    `context`: rows of cache behind each request.

    Raises BuildError if no layout fits.
    """
    constants, gpu = constants or times.built_in(), settings.gpu
    check_rates(gpu)
    made = [
        ModelLayout(
            gpus=count,
            most=most,
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
            context=context,
            constants=constants,
        )
        for count, most in fitting(inventory, settings, context)
    ]
    if not made:
        raise BuildError(
            f"{name} fits on no layout of one node of {gpu.name} with {context} tokens of context: lower --context, "
            "or choose GPUs with more memory"
        )
    return made


def fitting(inventory: Inventory, settings: Settings, context: int) -> Iterator[tuple[int, int]]:
    """The layouts that fit: 1, 2, 4, ... GPUs that share a model, each with the largest batch.

    They are repeated over the node. Experts take the same bytes whether they are split or spread.
    """
    count = 1
    while count <= (settings.gpu.gpus_per_node if settings.traits.several_gpus else 1):
        layout = replace(settings, tensor_parallel=count, max_seq_len=context, max_batch_size=1)
        if (most := min(estimate_memory(inventory, layout).largest_batch, MAX_BATCH)) > 0:
            yield count, most
        count *= 2


def _chain_work(config: TargetConfig, gpu: Gpu, gpus: int) -> Work:
    """One layer of EAGLE-3's drafter, with its head."""
    c = config
    attention = 2 * c.hidden_size * c.head_dim * (c.num_attention_heads + 2 * c.num_key_value_heads)
    attention += c.hidden_size * c.head_dim * c.num_attention_heads
    size = attention + 3 * c.hidden_size * (c.intermediate_size + c.hidden_size)
    size += _CHAIN_VOCABULARY * c.hidden_size
    return Work(
        layers=1,
        dense_bytes=2 * size / gpus,
        dense_operations=2 * size / gpus,
        dense_rate=gpu.dense_flops["bf16"],
        expert_bytes=0.0,
        expert_operations=0.0,
        expert_rate=1.0,
        experts=0,
        experts_per_token=0,
        kv_bytes=4 * c.num_key_value_heads * c.head_dim / gpus,
        window_bytes=0.0,
        window=0,
        hidden_bytes=2 * c.hidden_size,
        gpus=gpus,
    )

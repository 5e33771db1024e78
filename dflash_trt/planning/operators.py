"""Times of the target's passes from measured operators: the package aiconfigurator-core (the extra `operators`).

Its tables have the operators of TensorRT-LLM on data-centre GPUs. Three of its habits matter here:

- With `nextn` drafts it multiplies the rows by nextn + 1, and all times by (layers + nextn) / layers, as if each draft
  had a layer of its own. The factor is taken out again.
- It prices experts in MXFP4 with BF16 inputs, unless the mode is named. TensorRT-LLM multiplies in FP8 on Blackwell.
- It has no drafter of blocks. The drafter's pass comes from the model (dflash_trt/planning/times.py), without its
  fixed cost per round, which is the host's share in another engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from dflash_trt.checkpoint.catalogue import known_pair
from dflash_trt.engines import registry
from dflash_trt.planning import times
from dflash_trt.planning.acceptance import Chain
from dflash_trt.planning.curve import Layout
from dflash_trt.planning.layouts import ModelLayout

_MODULE, _DISTRIBUTION = "aiconfigurator_core", "aiconfigurator-core"
_SYSTEMS = {
    "a100": "a100_sxm",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "gb200": "gb200",
    "l40s": "l40s",
    "rtx-pro-6000": "rtx_pro_6000_server",
}


@dataclass(slots=True, kw_only=True)
class OperatorLayout:
    """A layout as `curve.Layout`, with experts spread over its GPUs. `model` has the times of the drafter."""

    model: ModelLayout
    target: str
    system: str
    backend: str
    experts: bool
    mode: str | None
    _engines: dict[int, Any] = field(default_factory=dict)

    @property
    def gpus(self) -> int:
        return self.model.gpus

    @property
    def most(self) -> int:
        return self.model.most

    def plain(self, batch: int) -> float:
        return self._seconds(batch, 0)

    def round(self, batch: int, block: int) -> float:
        model = self.model
        draft = times.pass_seconds(
            model.drafter,
            model.gpu,
            model.constants,
            requests=batch,
            width=block,
            context=model.context,
        )
        return self._seconds(batch, block - 1) + draft

    def chain(self, batch: int, chain: Chain) -> float:
        steps = self.model.chain_seconds(batch, chain)
        return self._seconds(batch, chain.steps) + steps

    def _seconds(self, batch: int, drafts: int) -> float:
        """A pass of the target over 1 + drafts rows of each request."""
        milliseconds = self._engine(drafts).predict_decode_latency(batch, self.model.context, 2)
        layers = self.model.target.layers
        return float(milliseconds) / 1e3 * layers / (layers + drafts)

    def _engine(self, drafts: int) -> Any:
        if drafts not in self._engines:
            import aiconfigurator_core
            from aiconfigurator_core.sdk.engine import compile_engine

            options: dict[str, Any] = {"tp_size": self.gpus, "nextn": drafts}
            if self.experts:
                options |= {"moe_tp_size": 1, "moe_ep_size": self.gpus}
            if self.mode is not None:
                options["moe_quant_mode"] = self.mode
            spec = compile_engine(self.target, self.system, self.backend, None, **options)
            self._engines[drafts] = aiconfigurator_core.AicEngine.from_spec(spec)
        return self._engines[drafts]


def best_layouts(
    models: Sequence[ModelLayout], engine: str, pair: str, *, stored: bool
) -> tuple[Sequence[Layout], str]:
    """The layouts with the best times there are, and the source of these times.

    `stored`: whether the weights are as in the checkpoint, as in the tables of operators.
    """
    measured, source = operator_layouts(models, engine, pair) if stored else ([], "")
    return (measured, source) if measured else (models, times.SOURCE)


def operator_layouts(
    models: Sequence[ModelLayout], engine: str, pair: str
) -> tuple[list[OperatorLayout], str]:
    """The layouts of the model with the times of measured operators, and the source of these times.

    No layouts where the package is missing, or has no table for the engine, the GPU or the target.
    """
    known = known_pair(pair)
    system, backend = _SYSTEMS.get(models[0].gpu.name), registry.find(engine).operators or None
    if (
        known is None
        or known.target_repo is None
        or system is None
        or backend is None
        or find_spec(_MODULE) is None
    ):
        return [], ""
    blackwell = models[0].gpu.sm in (100, 103)
    mode = "w4a8_mxfp4_mxfp8" if known.family == "gpt_oss" and blackwell else None
    made: list[OperatorLayout] = []
    for model in models:
        layout = OperatorLayout(
            model=model,
            target=known.target_repo,
            system=system,
            backend=backend,
            experts=model.target.experts > 0,
            mode=mode,
        )
        try:
            layout.plain(1)
        except Exception:  # the package's own errors: a table that it lacks
            continue
        made.append(layout)
    if not made:
        return [], ""
    version = metadata.version(_DISTRIBUTION)
    return (
        made,
        f"measured operators of {backend} on {system}, {_DISTRIBUTION} {version}; the drafter by the model",
    )

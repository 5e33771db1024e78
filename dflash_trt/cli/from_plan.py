"""`build --from-plan`: the options that a plan stands for."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from dflash_trt.engines import registry

if TYPE_CHECKING:
    from dflash_trt.planning.slo import Plan


def apply(args: argparse.Namespace) -> None:
    """Set the options of `build` that the plan decides.

    Ends the program, as for wrong usage, where an option says something else. Raises RequestError for a wrong file,
    and BuildError for a machine with other GPUs.
    """
    from dflash_trt.planning.slo import read_plan

    plan = read_plan(args.from_plan)
    if plan.engine not in registry.NAMES:
        args.usage_error(f"{args.from_plan}: engine is {plan.engine!r}, none of {', '.join(registry.NAMES)}")
    kind = registry.find(plan.engine).options
    has = {field: kind is not None and field in kind.__dataclass_fields__ for field in _ENGINE_FIELDS}
    wanted: dict[str, tuple[str, Any]] = {
        "target": ("--target", plan.target),
        "drafter": ("--drafter", plan.drafter),
        "engine": ("--engine", plan.engine),
        "precision": ("--precision", plan.choice.precision),
        "max_seq_len": ("--max-seq-len", plan.context),
        "block_size": ("--block-size", plan.choice.block_size),
    }
    if has["max_batch_size"]:
        wanted["max_batch_size"] = "--max-batch-size", plan.choice.batch
    if has["gpu"]:
        wanted["gpu"] = "--gpu", plan.gpu
        wanted["tensor_parallel"] = "--tp", plan.choice.gpus
        wanted["draft_len_schedule"] = "--draft-len-schedule", _draft_lengths(plan)
    else:
        _check_machine(args, plan)
    for name, (flag, value) in wanted.items():
        given = getattr(args, name)
        if given is not None and not _same(name, given, value):
            args.usage_error(
                f"{flag} {_shown(given)}: {args.from_plan} is a plan for {flag} {_shown(value)}; leave {flag} out, or "
                "make another plan"
            )
        setattr(args, name, value if given is None else given)


_ENGINE_FIELDS = ("max_batch_size", "gpu")


def _same(name: str, given: Any, value: Any) -> bool:
    from dflash_trt.checkpoint.catalogue import known_pair
    from dflash_trt.planning.gpus import find_gpu

    if given == value:
        return True
    if name == "target":
        pair = known_pair(given)
        return pair is not None and pair == known_pair(value)
    return name == "gpu" and value is not None and find_gpu(given) == find_gpu(value)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{batch}:{length}" for batch, length in value.items()) or "none"
    return "none" if value is None else str(value)


def _draft_lengths(plan: Plan) -> dict[int, int]:
    """TensorRT-LLM's draft_len_schedule: drafts by active requests. Empty where one length is best for all."""
    lengths = {requests: block - 1 for requests, block in plan.choice.schedule}
    first = next(iter(lengths.values()))
    return lengths if len(lengths) > 1 and first == plan.choice.block_size - 1 else {}


def _check_machine(args: argparse.Namespace, plan: Plan) -> None:
    """A build for the GPUs of this machine needs the plan's GPU. Builds for other GPUs name them."""
    from dflash_trt import hardware
    from dflash_trt.errors import BuildError
    from dflash_trt.planning.gpus import find_gpu, gpus

    if plan.gpu is None:
        return
    if plan.gpu not in gpus():
        args.usage_error(f"{args.from_plan}: gpu is {plan.gpu!r}; `dflash-trt plan --gpus` lists the names")
    gpu = find_gpu(plan.gpu)
    capabilities = getattr(args, "capabilities", None)
    if capabilities and set(capabilities) != {gpu.sm}:
        args.usage_error(
            f"--compute-capability {' '.join(map(str, capabilities))}: {args.from_plan} is a plan for {gpu.name}, "
            f"which has {gpu.sm}"
        )
    here = [each.get("name", "") for each in hardware.gpus()]
    if not capabilities and here and not any(gpu.is_named(name) for name in here):
        raise BuildError(
            f"{args.from_plan}: is a plan for {gpu.name}, but this machine has {', '.join(here)}; build there, make a "
            f"plan for this machine, or give --compute-capability {gpu.sm}"
        )

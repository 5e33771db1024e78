"""From a graph to a plan: parse, set profiles, build, and stream the result to disk.

Written against the documented Python API that `tensorrt` and `tensorrt_rtx` share. An argument selects one of them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_plugins.plugins import Build, check, register

from dflash_trt.bundle.workspace import Progress
from dflash_trt.engines.tensorrt.options import Flavour
from dflash_trt.errors import BuildError
from dflash_trt.files.disk import whole_file

# The beginning of the names of a plan's outputs that nothing reads.
QUERY = "query."
# Ends the name of a plan's timing cache.
TIMINGS = ".timing"
_NODE = re.compile(r"\b(?:target|drafter)/[\w./:-]+")


@dataclass(frozen=True)
class Profile:
    """Smallest, usual and largest length of each dynamic dimension."""

    name: str
    lengths: Mapping[str, tuple[int, int, int]]

    def shapes(self, shape: Sequence[int | str]) -> tuple[tuple[int, ...], ...]:
        """Smallest, usual and largest shape of an input whose dimensions are numbers or names."""
        return tuple(
            tuple(d if isinstance(d, int) else self.lengths[d][which] for d in shape) for which in range(3)
        )

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, **{name: list(lengths) for name, lengths in self.lengths.items()}}


def build_plan(
    flavour: Flavour,
    graph: Path,
    plan: Path,
    profiles: Sequence[Profile],
    capability: int,
    progress: Progress,
    *,
    plugins: bool = False,
    timings: bytes = b"",
) -> dict[str, Any]:
    """Build `graph` for one compute capability into `plan`, which appears only when complete, with a log beside it.

    timings: the timing cache of an earlier build, from which tactics are chosen again. The cache of this build lies
    beside the plan, unless the flavour builds without a GPU and times nothing.

    The graph's weights are external data. TensorRT maps their files, and the plan is written while it is made. So
    memory holds only TensorRT's own copy of the weights. Returns the plan's entry for the manifest.

    Raises BuildError for a node that TensorRT refuses, with its path and operator, for a failed build, or a full
    disk.
    """
    trt = flavour.load()
    step = f"build {graph.stem} sm{capability}"
    plan.parent.mkdir(parents=True, exist_ok=True)
    with plan.with_suffix(".log").open("w", encoding="utf-8") as log:
        logger = _logger(trt, log)
        builder = trt.Builder(logger)
        if plugins:
            register(trt, Build(capability, timed=not flavour.ahead))
        network = _network(trt, flavour, builder, logger, graph)
        config = _config(trt, flavour, builder, logger, capability)
        cache = None if flavour.ahead else _timing_cache(config, timings, graph.stem)
        for profile in profiles:
            if _add_profile(builder, config, network, profile) < 0:
                raise BuildError(
                    f"{graph.name}: profile {profile.name} was refused: {_builder_error(logger, flavour)}"
                )
        config.progress_monitor = monitor = _monitor(trt, step, progress)
        progress(step, 0, 1)
        with whole_file(plan) as file:
            writer = _writer(trt, file.raw)  # unbuffered, so that a full disk is noticed where it occurs
            built = builder.build_serialized_network_to_stream(network, config, writer)
            check()
            for failure in (monitor.failure, writer.failure):
                if isinstance(failure, OSError):
                    raise BuildError(f"{plan}: cannot be written: {failure.strerror}") from failure
                if failure is not None:
                    raise failure
            if not built:
                raise BuildError(f"{graph.name}: {_builder_error(logger, flavour)}; the log is {log.name}")
            if cache is not None:
                with whole_file(plan.with_suffix(TIMINGS)) as timing_file:
                    timing_file.write(bytes(cache.serialize()))
    progress(step, 1, 1)
    return {
        "profiles": [profile.describe() for profile in profiles],
        "activation_bytes": logger.activation_bytes,
        "file": {"size": writer.size, "sha256": writer.sha256.hexdigest()},
    }


def _network(trt: Any, flavour: Flavour, builder: Any, logger: Any, graph: Path) -> Any:
    # From TensorRT 11 on, every network is strongly typed, and the flag is accepted without effect.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(graph)):
        raise BuildError(f"{graph.name}: {_parser_error(parser, flavour)}; the log is {logger.file}")
    _keep_queries(trt, network)
    return network


def _config(trt: Any, flavour: Flavour, builder: Any, logger: Any, capability: int) -> Any:
    config = builder.create_builder_config()
    # Otherwise TensorRT-RTX's runtime may allocate, and cannot be captured.
    if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    # With several streams, all weights that need widening would be widened at once, as far as memory permits.
    config.max_aux_streams = 0
    if flavour.ahead:
        config.num_compute_capabilities = 1
        if not config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{capability}"), 0):
            raise BuildError(
                f"{flavour.label} refused compute capability {capability}: {_builder_error(logger, flavour)}"
            )
    return config


def _timing_cache(config: Any, timings: bytes, graph: str) -> Any:
    """The cache in which the builder looks for a tactic's time before it measures it."""
    cache = config.create_timing_cache(timings)
    if cache is None or not config.set_timing_cache(cache, False):
        raise BuildError(
            f"--timing-cache: the times of the {graph} are of another GPU or another version of TensorRT; leave it out"
        )
    return cache


def has_operator(trt: Any, name: str) -> bool:
    """Whether this version's ONNX parser supports one of its own operators, such as `TRT_Attention`."""
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    return bool(trt.OnnxParser(builder.create_network(0), logger).supports_operator(name))


def _keep_queries(trt: Any, network: Any) -> None:
    """Make the queries of each attention an output of the plan, `query.N`.

    TensorRT-RTX then compiles attention apart from the projection before it. The kernel reads keys and values in the
    cache, by their own heads, and skips tiles that the mask hides. Otherwise every pass first copies the whole cache,
    repeated for each head of the queries (docs/tensorrt.md).
    """
    if (attention := getattr(trt.LayerType, "ATTENTION_INPUT", None)) is None:
        return
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    for layer in layers:
        if layer.type == attention and (query := layer.get_input(0)).dtype != trt.DataType.FLOAT:
            query.name = f"{QUERY}{network.num_outputs}"
            network.mark_output(query)


def _add_profile(builder: Any, config: Any, network: Any, profile: Profile) -> int:
    """The index of the profile in the plan, or -1 where TensorRT refuses it."""
    added = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        shape = [
            tensor.get_dimension_name(axis) if length == -1 else length
            for axis, length in enumerate(tensor.shape)
        ]
        added.set_shape(tensor.name, *profile.shapes(shape))
    return int(config.add_optimization_profile(added))


def _parser_error(parser: Any, flavour: Flavour) -> str:
    """Describe the parser's error. Inside a function, it knows only the body's node; the path is on its stack of
    calls.
    """
    error = parser.get_error(0)
    stack = list(error.local_function_stack())
    where = f"{error.node_name()} ({error.node_operator()})"
    if stack:
        where = f"{stack[0]}, in its {where}"
    return f"{flavour.label} does not support {where}: {_one_line(error.desc())}"


def _builder_error(logger: Any, flavour: Flavour) -> str:
    message = _one_line(logger.errors[0] if logger.errors else "it gave no reason")
    node = _NODE.search(message)
    return f"{flavour.label} failed{f' at {node[0]}' if node else ''}: {message}"


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 400 else text[:400] + " ..."


def _logger(trt: Any, log: Any) -> Any:
    """A logger. Everything except verbose messages goes to the log; errors are kept for the one-line error text."""

    class BuildLogger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.file, self.errors = log.name, list[str]()
            self.activation_bytes: int | None = None

        def log(self, severity: Any, message: str) -> None:
            if severity == trt.ILogger.VERBOSE or message.startswith(
                "Input filename"
            ):  # a path of this machine
                return
            log.write(f"[{severity.name}] {message}\n")
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(message)
            if size := re.match(r"Total Activation Memory: (\d+) bytes", message):
                self.activation_bytes = max(self.activation_bytes or 0, int(size[1]))  # one per profile

    return BuildLogger()


def _writer(trt: Any, file: Any) -> Any:
    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.failure: BaseException | None = None
            self.size, self.sha256 = 0, hashlib.sha256()

        def write(self, data: bytes) -> int:
            # TensorRT takes a short write for a complete one, and exceptions do not pass through it.
            rest = memoryview(data)
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError as error:
                self.failure = error
                return 0
            self.sha256.update(data)
            self.size += len(data)
            return len(data)

    return Writer()


def _monitor(trt: Any, step: str, progress: Progress) -> Any:
    """Report TensorRT's outermost phase as one of our steps. An error in `progress` ends the build."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.failure: BaseException | None = None
            self.outermost: dict[str, int] = {}

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            if not parent:
                self.outermost[name] = steps

        def step_complete(self, name: str, done: int) -> bool:
            try:
                if (steps := self.outermost.get(name, 0)) > done + 1:
                    progress(step, done + 1, steps)
            except BaseException as error:
                self.failure = error
            return self.failure is None

        def phase_finish(self, name: str) -> None:
            pass

    return Monitor()


def weight_bytes(model: Any) -> Mapping[str, int]:
    """Bytes of a graph's weights by the plan's compute dtype, largest first."""
    total: dict[str, int] = {}
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or not hasattr(tensor, "location"):
            continue
        casts = [use.node for use in value.uses() if use.node.op_type == "Cast"]
        dtype = type(tensor.dtype)(casts[0].attributes["to"].value) if casts else tensor.dtype
        total[dtype.name] = total.get(dtype.name, 0) + round(tensor.size * dtype.itemsize)
    return dict(sorted(total.items(), key=lambda item: -item[1]))

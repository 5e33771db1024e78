"""Register plugins with TensorRT: quickly deployable plugins (`tensorrt.plugin`), compiled ahead of time.

There is one plugin per kernel, because such a plugin is one launch without a workspace. A plan contains the compiled
kernels, so loading it needs neither this package nor Triton.

Written against TensorRT 11.4's `tensorrt.plugin`; `trt` is the module `tensorrt`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import GenericAlias
from typing import TYPE_CHECKING, Any

from dflash_plugins import kernel_specs as uses
from dflash_plugins.plugin_table import NAMESPACE, PLUGINS, Attributes, Plugin, Sizes, Symbols, versioned
from dflash_trt.errors import BuildError

if TYPE_CHECKING:
    from dflash_plugins.compiled import Compiled

_registered_for: list[int] = []  # the only compute capability that this process builds for


def register(trt: Any, capability: int) -> None:
    """Register all plugins with TensorRT, to be compiled for one compute capability.

    Raises BuildError if they are registered for another one: TensorRT registers a plugin once per process.
    """
    if _registered_for:
        if _registered_for != [capability]:
            raise BuildError(
                f"plugins are registered for compute capability {_registered_for[0]} in this process; "
                f"build for {capability} in another process"
            )
        return
    for plugin in PLUGINS:
        _Registration(trt, plugin, capability).register()
    _registered_for.append(capability)


class _Registration:
    """The functions of one plugin that TensorRT calls during a build."""

    def __init__(self, trt: Any, plugin: Plugin, capability: int) -> None:
        self.trt, self.plugin, self.capability = trt, plugin, capability
        self.name, self.count = f"{NAMESPACE}::{versioned(plugin.name)}", len(plugin.inputs)

    def register(self) -> None:
        trtp, plugin = self.trt.plugin, self.plugin
        schema = {**dict.fromkeys(plugin.inputs, trtp.TensorDesc), **plugin.attributes}
        outputs = len(plugin.kinds(dict.fromkeys(plugin.attributes, 1)))
        several = GenericAlias(tuple, (trtp.TensorDesc,) * outputs)
        trtp.register(self.name)(_signed(self.describe, schema, several))
        schema |= {"outputs": several}
        if plugin.tiles is not None:
            combinations = GenericAlias(list, (trtp.AutoTuneCombination,))
            trtp.autotune(self.name)(_signed(self.tune, schema, combinations))
        result = GenericAlias(tuple, (str, str, trtp.KernelLaunchParams, trtp.SymIntExprs))
        trtp.aot_impl(self.name)(_signed(self.implement, schema | {"tactic": int}, result))

    def describe(self, *inputs: Any, **attributes: Any) -> Any:
        """Shapes and types of the outputs."""
        made = []
        for shape, kind in self.plugin.outputs(self._symbols(inputs), attributes):
            dtype = inputs[kind].dtype if isinstance(kind, int) else getattr(self.trt.DataType, kind)
            made.append(self.trt.plugin.from_shape_expr(shape, dtype))
        return tuple(made)

    def tune(self, *arguments: Any) -> Any:
        """The tile sizes that TensorRT can launch and should time: those that fit shared memory and registers."""
        inputs, values, outputs = arguments[: self.count], arguments[self.count : -1], arguments[-1]
        attributes = dict(zip(self.plugin.attributes, values, strict=True))
        names = [str(t.dtype.name) for t in (*inputs, *outputs)]
        types = ", ".join({"FLOAT": "FP32", "HALF": "FP16"}.get(name, name) for name in names)
        compiled = [self._compiled(inputs, attributes, tile) for tile in self._tiles(inputs)]
        tactics = [i for i, each in enumerate(compiled, 1) if each.fits]
        if not tactics:
            raise BuildError(
                f"{self.plugin.name}: every tile shape spills registers or takes more than {uses.SHARED_BYTES} bytes "
                "of shared memory; build with --plugins none"
            )
        return [self.trt.plugin.AutoTuneCombination(types, "LINEAR", tactics)]

    def implement(self, *arguments: Any) -> Any:
        """The compiled kernel and its launch."""
        trtp, plugin = self.trt.plugin, self.plugin
        inputs, values, tactic = arguments[: self.count], arguments[self.count : -2], arguments[-1]
        attributes = dict(zip(plugin.attributes, values, strict=True))
        # Tactics count from 1; 0 is TensorRT's own default.
        tile = None if plugin.tiles is None else self._tiles(inputs)[max(tactic, 1) - 1]
        compiled = self._compiled(inputs, attributes, tile)
        if not compiled.stores:
            raise BuildError(
                f"{plugin.name}: Triton compiles it to a kernel that writes nothing; install another version"
            )
        symbols = self._symbols(inputs)
        launch = trtp.KernelLaunchParams()
        for axis, size in zip("xyz", plugin.grid(symbols, attributes, tile), strict=False):
            setattr(launch, f"grid_{axis}", size)
        launch.block_x, launch.shared_mem = compiled.threads, compiled.shared_bytes
        integers = plugin.integers(symbols, attributes)
        extra = trtp.SymIntExprs(len(integers))
        for i, value in enumerate(integers):
            extra[i] = trtp.SymInt32(value)
        return compiled.name, compiled.ptx, launch, extra

    def _symbols(self, inputs: Sequence[Any]) -> Symbols:
        return Symbols([t.shape_expr for t in inputs], self.trt.plugin.cdiv, self.trt.plugin.min)

    def _tiles(self, inputs: Sequence[Any]) -> Sequence[Any]:
        assert self.plugin.tiles is not None
        return self.plugin.tiles(Sizes(self.name, inputs))

    def _compiled(self, inputs: Sequence[Any], attributes: Attributes, tile: Any) -> Compiled:
        from dflash_plugins.compiler import compile_kernel

        return compile_kernel(self.plugin.use(Sizes(self.name, inputs), attributes, tile), self.capability)


def _signed(function: Callable[..., Any], parameters: Mapping[str, Any], result: Any) -> Callable[..., Any]:
    """`function` with a signature of these parameters, from which TensorRT reads the schema."""
    signed = partial(function)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind, annotation=t) for name, t in parameters.items()],
        return_annotation=result,
    )
    return signed

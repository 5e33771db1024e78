"""A module `tensorrt` whose `plugin` is the real one: the Python sources of NVIDIA's bindings wheel.

The double provides the little that these sources use of the native library: expressions over dimensions, descriptors,
the registry. Any other attribute is an error.
"""

from __future__ import annotations

import enum
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any


class Expr:
    """IDimensionExpr: an expression over named dimensions."""

    def __init__(self, evaluate: Callable[[dict[str, int]], int], constant: int | None = None) -> None:
        self.evaluate, self._constant = evaluate, constant

    def is_constant(self) -> bool:
        return self._constant is not None

    def get_constant_value(self) -> int:
        assert self._constant is not None
        return self._constant


class DimensionOperation(enum.Enum):
    SUM, PROD, MAX, MIN, SUB, EQUAL, LESS, FLOOR_DIV, CEIL_DIV = range(9)


_OPERATIONS: dict[DimensionOperation, Callable[[int, int], int]] = {
    DimensionOperation.SUM: lambda a, b: a + b, DimensionOperation.PROD: lambda a, b: a * b,
    DimensionOperation.MIN: min, DimensionOperation.SUB: lambda a, b: a - b,
    DimensionOperation.FLOOR_DIV: lambda a, b: a // b, DimensionOperation.CEIL_DIV: lambda a, b: -(-a // b),
}  # fmt: skip


class IExprBuilder:
    def constant(self, value: int) -> Expr:
        return Expr(lambda env: value, value)

    def operation(self, operation: DimensionOperation, a: Expr, b: Expr) -> Expr:
        return Expr(lambda env: _OPERATIONS[operation](a.evaluate(env), b.evaluate(env)))


class DataType(enum.Enum):
    FLOAT, HALF, INT8, INT32, BOOL, UINT8, FP8, BF16, INT64, INT4, FP4 = range(11)


FIELD_TYPES = "FLOAT16 FLOAT32 FLOAT64 INT8 INT16 INT32 CHAR DIMS UNKNOWN BF16 INT64 FP8 INT4 FP4"
REQUESTS = "UNKNOWN PREFER_JIT PREFER_AOT STRICT_JIT STRICT_AOT"


class Fields(list[Any]):
    """PluginFieldCollection"""


class PluginField:
    def __init__(self, name: str, data: Any = None, type: Any = None) -> None:
        self.name, self.data, self.type = name, data, type


class Registry:
    def __init__(self) -> None:
        self.creators: dict[tuple[str, str, str], Any] = {}

    def register_creator(self, creator: Any, namespace: str) -> bool:
        self.creators[creator.name, creator.plugin_version, namespace] = creator
        return True

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        return self.creators[name, version, namespace]


class Record:
    """A native struct. Its fields are set one by one."""

    def __init__(self, *args: Any) -> None:
        pass


def install() -> Any:
    """Put the double in `sys.modules` and return it. The wheel tensorrt_cu13_bindings must be installed."""
    trt: Any = types.ModuleType("tensorrt")
    registry = Registry()

    def empty(name: str, *bases: type) -> type:
        return type(name, bases or (Record,), {})

    def enumeration(name: str, *members: str) -> Any:
        return enum.Enum(name, members)

    vars(trt).update(
        __path__=[],
        DataType=DataType,
        float32=DataType.FLOAT,
        float16=DataType.HALF,
        int32=DataType.INT32,
        DimensionOperation=DimensionOperation,
        IDimensionExpr=Expr,
        IExprBuilder=IExprBuilder,
        DimsExprs=lambda n: [None] * n,
        Dims=type("Dims", (tuple,), {"MAX_DIMS": 8}),
        Logger=type("Logger", (Record,), {"log": lambda *a: None, "WARNING": 0}),
        PluginField=PluginField,
        PluginFieldCollection=Fields,
        PluginFieldType=enumeration("PluginFieldType", *FIELD_TYPES.split()),
        PluginArgType=enumeration("PluginArgType", "INT"),
        PluginArgDataType=enumeration("PluginArgDataType", "INT8", "INT16", "INT32"),
        QuickPluginCreationRequest=enumeration("QuickPluginCreationRequest", *REQUESTS.split()),
        TensorFormat=enumeration("TensorFormat", "LINEAR"),
        TensorRTPhase=enumeration("TensorRTPhase", "BUILD", "RUNTIME"),
        get_plugin_registry=lambda: registry,
    )
    for name in (
        *(
            "ITensor",
            "ISymExpr",
            "IPluginCreatorV3Quick",
            "IPluginV3",
            "IPluginV3QuickCore",
            "IPluginV3QuickBuild",
        ),
        *("IPluginV3QuickRuntime", "IPluginV3QuickAOTBuild", "DynamicPluginTensorDesc", "PluginTensorDesc"),
    ):
        setattr(trt, name, empty(name))
    spec = importlib.util.find_spec("tensorrt_bindings")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = f"{spec.submodule_search_locations[0]}/plugin"
    plugin_spec = importlib.util.spec_from_file_location(
        "tensorrt.plugin", f"{folder}/__init__.py", submodule_search_locations=[folder]
    )
    assert plugin_spec is not None
    assert plugin_spec.loader is not None
    trt.plugin = importlib.util.module_from_spec(plugin_spec)
    sys.modules.update({"tensorrt": trt, "tensorrt.plugin": trt.plugin})
    plugin_spec.loader.exec_module(trt.plugin)
    return trt


def described(trt: Any, dims: tuple[int, ...], largest: tuple[int, ...], dtype: DataType) -> Any:
    """A DynamicPluginTensorDesc; -1 for dynamic sizes."""
    desc = trt.DynamicPluginTensorDesc()
    desc.desc = trt.PluginTensorDesc()
    desc.desc.dims, desc.desc.type, desc.desc.format, desc.desc.scale = (
        dims, dtype, trt.TensorFormat.LINEAR, 1.0,
    )  # fmt: skip
    desc.min, desc.opt, desc.max = tuple(max(1, d) for d in dims), largest, largest
    return desc

"""The quantized layers of a checkpoint: `hf_quant_config.json`, as NVIDIA's Model Optimizer writes it.

config.json may hold the same facts under quantization_config with quant_method "modelopt". The file takes precedence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.recognized import METHODS
from dflash_trt.errors import show
from dflash_trt.files.reading import read_object
from dflash_trt.formats import ALGORITHMS, FORMATS, Algorithm

QUANT_CONFIG = "hf_quant_config.json"
_BLOCK = 1 << 12  # the most rows or columns of a block
# Limits: module names, patterns among them, and characters per pattern. Every name and pattern costs a search.
_NAMES, _PATTERNS, _PATTERN_CHARACTERS = 1 << 18, 1024, 512


@dataclass(frozen=True, slots=True)
class Quantization:
    """By `path`, all linear layers are stored in `default`, with the exceptions below.

    layers: layers that are stored in another way.
    excluded: names of layers that are not quantized.
    patterns: patterns of such names; * stands for any characters, ? for one.
    kv_cache: whether there are scales for an FP8 cache.
    digests: sha256 of weight files by name, if they were recorded during quantization.
    blocks: rows and columns of weights in FP8 that share a scale, `weight_scale_inv`; builds widen such layers to BF16
        (quantization/widen.py).
    """

    path: Path
    default: Algorithm | None = None
    layers: Mapping[str, Algorithm] = field(default_factory=dict)
    excluded: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()
    kv_cache: bool = False
    digests: Mapping[str, str] = field(default_factory=dict)
    blocks: tuple[int, int] | None = None

    @property
    def algorithms(self) -> set[Algorithm]:
        """The algorithms of all layers."""
        return {*self.layers.values(), *([self.default] if self.default is not None else [])}

    @property
    def name(self) -> str | None:
        """The algorithms, as the checkpoint names them; None if nothing is quantized."""
        if self.blocks is not None:
            return "FP8 in blocks"
        return ", ".join(sorted(a.name for a in self.algorithms)) or None

    def algorithm(self, layer: str) -> Algorithm | None:
        """The algorithm of a linear layer. `layer` is the name of its tensors without `.weight`."""
        if layer in self.layers:
            return self.layers[layer]
        if layer in self.excluded or any(fnmatchcase(layer, pattern) for pattern in self.patterns):
            return None
        return self.default


def read_quantization(directory: Path) -> Quantization:
    """Read the quantization of the checkpoint in `directory`. Files that do not mention it mean: nothing is
    quantized.

    The family handles experts in OpenAI's MXFP4 (quant_method "mxfp4").

    Raises:
        CheckpointError: naming the file and field, if the field is malformed or names a format that is not supported.
    """
    path = directory / QUANT_CONFIG
    if path.is_file():
        whole = Fields(path, read_object(path))
        section = whole.section("quantization")
        if section is None:
            raise whole.error("quantization", "is missing, expected an object with quant_algo")
        producer = whole.section("producer")
        files = producer.section("sha256") if producer is not None else None
        digests = {} if files is None else {name: files.string(name) for name in files.values}
        return replace(_read(section, "exclude_modules", "kv_cache_quant_algo"), digests=digests)
    path = directory / "config.json"
    found = read_object(path).get("quantization_config") if path.is_file() else None
    if found is None:
        return Quantization(path)
    if not isinstance(found, dict):
        raise Fields(path, {}).error("quantization_config", f"is {show(found)}, expected an object")
    section = Fields(path, found, "quantization_config.")
    method = section.string("quant_method")
    if method == "mxfp4":
        return Quantization(path)
    if method == "fp8" and section.get("weight_block_size") is not None:
        sizes = section.integers("weight_block_size", minimum=1, maximum=_BLOCK, most=2)
        if len(sizes) != 2:
            raise section.error("weight_block_size", f"is {show(list(sizes))}, expected rows and columns")
        return Quantization(path, blocks=(sizes[0], sizes[1]))
    if method != "modelopt":
        raise section.error(
            "quant_method",
            f"is {show(method)}: {METHODS.get(method, 'this quantization')} is not supported, only 'modelopt' "
            f"({', '.join(ALGORITHMS)}) and 'fp8' in blocks; make such a checkpoint from the original, unquantized "
            "model with: dflash-trt quantize",
        )
    return _read(section, "ignore", "kv_cache_scheme")


def _read(fields: Fields, excluded: str, kv_cache: str) -> Quantization:
    layers: dict[str, Algorithm] = {}
    default = None
    if fields.get("quant_algo") == "MIXED_PRECISION":
        each = fields.section("quantized_layers")
        if each is None:
            raise fields.error("quantized_layers", "is missing, but quant_algo is MIXED_PRECISION")
        for name in each.values:
            layer = each.section(name)
            if layer is not None:
                layers[name] = _algorithm(layer, layer)
    elif fields.get("quant_algo") is not None:
        # config.json gives the group size with the weights of the only group of layers.
        groups = fields.section("config_groups")
        group = groups.section("group_0") if groups is not None else None
        weights = group.section("weights") if group is not None else None
        default = _algorithm(fields, fields if fields.get("group_size") or weights is None else weights)
    cache = fields.get(kv_cache)
    if cache not in (None, "FP8") and not (isinstance(cache, dict) and cache.get("num_bits") == 8):
        raise fields.error(kv_cache, f"is {show(cache)}, supported is FP8")
    return Quantization(fields.path, default, layers, *_excluded(fields, excluded), cache is not None)


def _excluded(fields: Fields, key: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Names of excluded layers, and patterns."""
    found = fields.strings(key, most=_NAMES) if fields.get(key) is not None else ()
    patterns = tuple(dict.fromkeys(each for each in found if set(each) & set("*?[")))
    if len(patterns) > _PATTERNS:
        raise fields.error(key, f"has {len(patterns)} patterns, expected at most {_PATTERNS}")
    for pattern in patterns:
        if "[" in pattern or len(pattern) > _PATTERN_CHARACTERS:
            raise fields.error(
                key,
                f"has {show(pattern)}, expected names of at most {_PATTERN_CHARACTERS} characters, with * or ?",
            )
    return frozenset(found) - frozenset(patterns), patterns


def _algorithm(fields: Fields, grouped: Fields) -> Algorithm:
    name = fields.string("quant_algo")
    algorithm = ALGORITHMS.get(name.upper())
    if algorithm is None:
        raise fields.error("quant_algo", f"is {show(name)}, supported are: {', '.join(ALGORITHMS)}")
    size = grouped.get("group_size")
    if not size:  # null, or 0 without groups
        return algorithm
    allowed = FORMATS[algorithm.scheme].group_sizes or (0,)
    if size not in allowed or type(size) is not int:
        expected = " or ".join(map(str, allowed))
        raise grouped.error("group_size", f"is {show(size)}, but {algorithm.name} is read with {expected}")
    return replace(algorithm, group_size=size)

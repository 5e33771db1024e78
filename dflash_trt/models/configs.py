"""Read `config.json` of targets and drafters: find the family or drafter kind and read the configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.pair import check_pair
from dflash_trt.checkpoint.quantization import read_quantization
from dflash_trt.checkpoint.schema import DrafterConfig, TargetConfig
from dflash_trt.models.drafters import KINDS, speculators
from dflash_trt.models.families import FAMILIES
from dflash_trt.models.reading import architecture_of


def read_target_config(directory: Path) -> TargetConfig:
    """Read a target's config.json and generation_config.json.

    Raises:
        CheckpointError: a file is missing or malformed, the architecture is not one of FAMILIES, the quantization is
            unsupported, or a field is missing, of the wrong type, or out of range.
    """
    fields = Fields.read(directory / "config.json")
    family = FAMILIES[architecture_of(fields, "target", FAMILIES)]
    fields.string("model_type", among=(family.model_type,))
    config = family.read(fields)
    if config.moe is None or config.moe.quantization is None:
        _check_quantization(fields)
    return replace(config, architecture=family.architecture)


def read_drafter_config(directory: Path, target: TargetConfig | None = None) -> DrafterConfig:
    """Read a drafter's config.json. Its `target` gives what the file leaves open: taps by the kind, the vocabulary.

    Raises:
        CheckpointError: as in read_target_config, and for a field that requests something not supported.
    """
    fields = Fields.read(directory / "config.json")
    if fields.get(speculators.TYPE) is not None:
        kind = speculators.KINDS[fields.string(speculators.TYPE, among=speculators.KINDS)]
    else:
        kind = KINDS[architecture_of(fields, "drafter", KINDS)]
        fields.string("model_type", among=(kind.model_type, *kind.also))
    _check_quantization(fields)
    config = replace(kind.read(fields), architecture=kind.architecture)
    if not config.target_layer_ids and kind.taps is not None and target is not None:
        config = replace(config, target_layer_ids=kind.taps(target.num_hidden_layers))
    if kind.vocabulary_of_target and target is not None and fields.get("vocab_size") is None:
        config = replace(config, vocab_size=target.vocab_size)
    return config


def read_pair(target: Path, drafter: Path | None) -> tuple[TargetConfig, DrafterConfig | None]:
    """The configurations of a target and its drafter, which fit each other. Raises CheckpointError and PairError."""
    config = read_target_config(target)
    if drafter is None:
        return config, None
    draft_config = read_drafter_config(drafter, config)
    check_pair(config, draft_config)
    return config, draft_config


def is_drafter(directory: Path) -> bool:
    """Whether config.json is a drafter's. Some kinds have the architecture of a target, and a vocabulary of drafts."""
    fields = Fields.read(directory / "config.json")
    names = fields.get("architectures")
    named = isinstance(names, list) and any(name in KINDS and name not in FAMILIES for name in names)
    return named or any(
        fields.get(key) is not None for key in ("dflash_config", "draft_vocab_size", speculators.TYPE)
    )


def _check_quantization(fields: Fields) -> None:
    """Refuse storage formats that no reader of linear layers supports."""
    section = fields.section("quantization_config")
    if section is not None and section.get("quant_method") == "mxfp4":
        raise section.error("quant_method", "is 'mxfp4', which is supported for gpt-oss only")
    read_quantization(fields.path.parent)

"""`config.json` of targets and drafters: which family or kind it is of, and what it means."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.schema import DrafterConfig, TargetConfig
from dflash_trt.files.reading import read_object
from dflash_trt.models.drafters import KINDS
from dflash_trt.models.families import FAMILIES
from dflash_trt.models.reading import architecture_of, check_names


def read_target_config(directory: Path) -> TargetConfig:
    """Read a target's config.json and generation_config.json.

    Raises:
        CheckpointError: a file is missing or malformed, the architecture is not one of FAMILIES, the quantization is
            not one it is published in, or a field is missing, of the wrong type, or out of range.
    """
    fields = _fields(directory)
    family = FAMILIES[architecture_of(fields, "target", FAMILIES)]
    check_names(fields, family.architecture, family.model_type)
    return family.read(fields)


def read_drafter_config(directory: Path) -> DrafterConfig:
    """Read a drafter's config.json.

    Raises:
        CheckpointError: as read_target_config, and for a field that asks for something not implemented.
    """
    fields = _fields(directory)
    kind = KINDS[architecture_of(fields, "drafter", KINDS)]
    check_names(fields, kind.architecture, kind.model_type)
    return kind.read(fields)


def _fields(directory: Path) -> Fields:
    path = directory / "config.json"
    return Fields(path, read_object(path))

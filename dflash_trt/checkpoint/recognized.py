"""Paths and repositories that are no checkpoint of this package, recognized by what they are."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from dflash_trt.errors import CheckpointError, show_name
from dflash_trt.files.reading import read_object

_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
# quant_method -> how people call it.
METHODS = {
    "bitsandbytes": "bitsandbytes",
    "gguf": "GGUF",
    "hqq": "HQQ",
    "quark": "Quark",
    "torchao": "torchao",
}


def check_directory(path: Path, role: str) -> None:
    """Raise CheckpointError for a directory of another kind, saying what it is and how to go on."""
    if (path / "manifest.json").is_file():
        raise CheckpointError(
            f"{path}: is a bundle already; give the checkpoint that it was built from as --{role}"
        )
    if (path / "adapter_config.json").is_file():
        base = read_object(path / "adapter_config.json").get("base_model_name_or_path")
        of = f" for {show_name(base)}" if isinstance(base, str) and base else ""
        raise CheckpointError(
            f"{path}: is a LoRA adapter{of}, not a whole model; merge it into its base model first (with PEFT: "
            f"merge_and_unload, then save_pretrained), and give that directory as --{role}"
        )
    if (path / "config.json").exists():
        names = [file.name for file in sorted(path.iterdir()) if file.suffix in _PICKLED]
        if names and not any(path.glob("*.safetensors*")):
            raise CheckpointError(
                f"{path}: has weights in {show_name(names[0])}, which is not read, as loading a pickle runs code; "
                "save the model again as safetensors (with Transformers: save_pretrained)"
            )
        return
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs:
        raise CheckpointError(f"{path}: holds GGUF files; give the file itself: --{role} {ggufs[0]}")
    raise CheckpointError(
        f"{path}: has no config.json; expected a checkpoint as Hugging Face keeps it: config.json, "
        "the safetensors files and, for a target, tokenizer.json"
    )


def check_file(path: Path, role: str) -> None:
    """Raise CheckpointError for a file where a directory is expected."""
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path}: is a file; give its directory, with config.json, as --{role} {path.parent}"
        )
    if path.suffix == ".gguf":
        raise CheckpointError(f"{path}: is a GGUF file; only a target can be one, --{role} cannot")
    raise CheckpointError(f"{path}: is a file; --{role} takes a directory, a name or a repository")


def hub_error(repo: str, error: Exception, role: str) -> CheckpointError:
    """The hub's error, with the way out. Raises an error of the disk as it is."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise error
    kinds = {kind.__name__ for kind in type(error).__mro__}
    token = "with a token: `hf auth login`, or the variable HF_TOKEN"
    if "GatedRepoError" in kinds:
        return CheckpointError(
            f"{repo}: is gated; accept its licence on https://huggingface.co/{repo}, then come back {token}"
        )
    if "RepositoryNotFoundError" in kinds:
        return CheckpointError(
            f"{repo}: the hub has no such repository, or it is private; check the name, or come back {token}"
        )
    if "RevisionNotFoundError" in kinds:
        return CheckpointError(
            f"{repo}: the hub has no such revision; leave out @REVISION for the newest one"
        )
    files = "config.json, the safetensors files" + (", tokenizer.json" if role == "target" else "")
    offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
    return CheckpointError(
        f"{repo}: the hub does not provide it{offline} ({_first_line(error)}); "
        f"a local directory with {files} can be given as --{role} instead"
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(". ") if lines else type(error).__name__

"""The engine bundle: one self-contained directory, described by its manifest (docs/bundle.md)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import onnx

from dflash_trt.errors import BundleError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
# Files up to this size have their digest checked at every load; larger ones (weights) only by check="full".
QUICK_DIGEST_BYTES = 16 << 20
_MAX_MANIFEST_BYTES = 4 << 20

Check = Literal["size", "full"]

_FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "key": str,
    "engine": str,
    "dialect": str,
    "precision": dict,
    "weights": str,
    "target": dict,
    "drafter": dict,
    "block_size": int,
    "mask_token_id": int,
    "target_layer_ids": list,
    "hidden_size": int,
    "vocab_size": int,
    "max_seq_len": int,
    "eos_token_ids": list,
    "versions": dict,
    "files": dict,
}
# What each graph says of the pair in its own metadata, and the manifest must say too.
_AGREED = ("key", "block_size", "mask_token_id", "target_layer_ids", "hidden_size", "vocab_size")


@dataclass(frozen=True)
class Bundle:
    """A bundle that was found whole. `manifest` holds manifest.json; docs/bundle.md lists its fields."""

    path: Path
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, path: str | Path, check: Check = "size") -> Bundle:
        """Read and check a bundle.

        `check="size"` compares every file's size, and the digests of those up to QUICK_DIGEST_BYTES (all but weights);
        `"full"` every digest.

        Raises:
            BundleError: something is missing, truncated, altered, of another format version, or the two graphs
                and the manifest disagree; the message names the file or the field.
        """
        path = Path(path)
        if check not in get_args(Check):
            raise BundleError(f"check is {check!r}, expected one of {', '.join(get_args(Check))}")
        manifest = _read_manifest(path)
        for name, entry in manifest["files"].items():
            _check_file(path, name, entry, full=check == "full")
        graphs = () if manifest["engine"] == "tensorrt-llm" else ("target.onnx", "drafter.onnx")
        for graph in graphs:
            if graph not in manifest["files"]:
                raise BundleError(f"{path / MANIFEST}: files does not list {graph}; build the bundle again")
            _check_graph(path / graph, manifest)
        return cls(path, manifest)

    @property
    def capacity(self) -> int:
        """Cache rows per sequence."""
        return cache_rows(int(self.manifest["max_seq_len"]), int(self.manifest["block_size"]))


def cache_rows(max_seq_len: int, block_size: int) -> int:
    """Per sequence: passes write blocks past the last token, and attention sinks one row more."""
    return max_seq_len + 2 * block_size + 1


def graph_metadata(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What the graphs of this bundle carry, so that a graph of another pair is noticed."""
    return {f"dflash.{field}": json.dumps(manifest[field]) for field in _AGREED}


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    if not path.is_dir():
        raise BundleError(
            f"{path}: there is no such directory; make a bundle with: dflash-trt build --out {path}"
        )
    if not file.is_file():
        raise BundleError(f"{path}: no {MANIFEST}, so this is not a finished bundle; run the build again")
    if file.stat().st_size > _MAX_MANIFEST_BYTES:
        raise BundleError(f"{file}: {file.stat().st_size} bytes, more than a manifest can have")
    try:
        manifest = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file}: not valid JSON ({error}); build the bundle again") from error
    if not isinstance(manifest, dict) or "format_version" not in manifest:
        raise BundleError(f"{file}: format_version is missing; build the bundle again")
    if manifest["format_version"] != FORMAT_VERSION:
        raise BundleError(
            f"{file}: format_version is {manifest['format_version']!r}, this version of dflash-trt reads "
            f"{FORMAT_VERSION}; build the bundle again"
        )
    for field, kind in _FIELDS.items():
        value = manifest.get(field)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise BundleError(f"{file}: {field} is {value!r}; build the bundle again")
    return manifest


def _check_file(bundle: Path, name: str, entry: Any, *, full: bool) -> None:
    file = bundle / name
    if not isinstance(entry, dict) or not isinstance(entry.get("size"), int):
        raise BundleError(f"{bundle / MANIFEST}: files[{name!r}] has no size; build the bundle again")
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise BundleError(f"{bundle / MANIFEST}: files names {name!r}, which is outside the bundle")
    if not file.is_file():
        raise BundleError(f"{file}: missing, though the manifest lists it; build the bundle again")
    size = file.stat().st_size
    if size != entry["size"]:
        raise BundleError(f"{file}: {size} bytes, the manifest says {entry['size']}; build the bundle again")
    if (full or size <= QUICK_DIGEST_BYTES) and digest(file) != entry.get("sha256"):
        raise BundleError(
            f"{file}: sha256 differs from the manifest's: the file was altered; build the bundle again"
        )


def _check_graph(file: Path, manifest: Mapping[str, Any]) -> None:
    try:
        model = onnx.load(str(file), load_external_data=False)
    except Exception as error:  # protobuf's DecodeError has no stable home
        raise BundleError(f"{file}: not a readable ONNX model ({error}); build the bundle again") from error
    found = {p.key: p.value for p in model.metadata_props}
    for key, expected in graph_metadata(manifest).items():
        if found.get(key) != expected:
            raise BundleError(
                f"{file}: {key.removeprefix('dflash.')} is {found.get(key)}, the manifest says {expected}: "
                "graph and manifest are of different builds; build the bundle again"
            )

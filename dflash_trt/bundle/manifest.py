"""The engine bundle: one self-contained directory, described by its manifest (docs/bundle.md)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

import onnx

from dflash_trt.bundle.cache_kinds import CacheKind, read_kind
from dflash_trt.errors import BundleError, CheckpointError, show
from dflash_trt.files.disk import copy, own_file, write_object
from dflash_trt.files.reading import read_object

FORMAT = "dflash-trt bundle"
FORMAT_VERSION = 4
MANIFEST = "manifest.json"
GRAPHS = ("target.onnx", "drafter.onnx")
# Every load checks the digests of files up to this size. Larger files (weights) are checked only by check="full".
QUICK_DIGEST_BYTES = 16 << 20
_MAX_MANIFEST_BYTES = 4 << 20
_OWN_DIGEST = "manifest_sha256"

Check = Literal["size", "full"]

_FIELDS: Mapping[str, Any] = {
    "key": str,
    "engine": str,
    "dialect": str,
    "precision": dict,
    "weights": str,
    "target": dict,
    "drafter": dict | None,
    "block_size": int,
    "tree_width": int,
    "mask_token_id": int | None,
    "target_layer_ids": list,
    "hidden_size": int,
    "vocab_size": int,
    "max_seq_len": int,
    "eos_token_ids": list,
    "versions": dict,
    "files": dict,
}
# Facts about the pair in each graph's metadata, which must agree with the manifest.
_AGREED = [
    "key",
    "block_size",
    "tree_width",
    "mask_token_id",
    "target_layer_ids",
    "hidden_size",
    "vocab_size",
]


@dataclass(frozen=True)
class Bundle:
    """A complete bundle. `manifest` holds manifest.json; docs/bundle.md lists its fields."""

    path: Path
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, path: str | Path, check: Check = "size") -> Bundle:
        """Read and check a bundle.

        `check="size"` compares every file's size, and the digests of those up to QUICK_DIGEST_BYTES (all but weights);
        `"full"` every digest.

        Raises:
            BundleError: something is missing, truncated, altered, of another format version, or the two graphs
                and the manifest disagree; the message names the file or the field. Files that the manifest does not
                list are not read; in a bundle without graphs, whose engine reads whole directories, there may be none.
        """
        path = Path(path)
        if check not in get_args(Check):
            raise BundleError(f"check is {check!r}, expected one of {', '.join(get_args(Check))}")
        manifest = read_manifest(path)

        def checked(name: str) -> None:
            _check_file(path, name, manifest["files"][name], full=check == "full")

        if check == "full":
            with ThreadPoolExecutor() as threads:
                list(threads.map(checked, manifest["files"]))
        else:
            for name in manifest["files"]:
                checked(name)
        graphs = any(graph in manifest["files"] or (path / graph).exists() for graph in GRAPHS)
        if not graphs and (others := unlisted(path, manifest)):
            raise BundleError(
                f"{path / others[0]}: the manifest does not list this file, and {manifest['engine']}, which reads "
                "whole directories, could read it; move it out of the bundle"
            )
        bundle = cls(path, manifest)
        for graph in GRAPHS[: len(bundle.roles)] if graphs else ():
            _check_graph(bundle.listed(graph), manifest)
        return bundle

    def listed(self, name: str) -> Path:
        """The path of a file that the bundle must have. Raises BundleError where the manifest does not list it."""
        if name not in self.manifest["files"]:
            raise BundleError(f"{self.path / MANIFEST}: files does not list {name}; build the bundle again")
        return self.path / name

    def copy_to(self, path: Path) -> None:
        """Copy the files that the manifest lists to the new directory `path`, and the manifest last."""
        for name in [*self.manifest["files"], MANIFEST]:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            copy(self.path / name, path / name)

    @property
    def roles(self) -> tuple[str, ...]:
        return ("target",) if self.manifest["drafter"] is None else ("target", "drafter")

    @property
    def feature_size(self) -> int:
        """The numbers that the target gives for each row: its taps, or one of a target without a drafter."""
        return len(self.manifest["target_layer_ids"]) * int(self.manifest["hidden_size"]) or 1

    @property
    def capacity(self) -> int:
        return cache_rows(int(self.manifest["max_seq_len"]), int(self.manifest["block_size"]))

    def cache_kinds(self, role: str) -> tuple[CacheKind, ...]:
        """The kinds of caches of "target" or "drafter". Bundles of earlier versions keep all rows of every layer."""
        return tuple(read_kind(kind) for kind in self.manifest.get("caches", {}).get(role, ()))


def cache_rows(max_seq_len: int, block_size: int) -> int:
    """Cache rows per sequence. Passes write blocks past the last token, and attention sinks need one more row."""
    return max_seq_len + 2 * block_size + 1


def graph_metadata(manifest: Mapping[str, Any]) -> dict[str, str]:
    """The metadata of this bundle's graphs. It reveals a graph of another pair."""
    return {f"dflash.{field}": json.dumps(manifest[field]) for field in _AGREED}


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_file(path: Path) -> dict[str, Any]:
    """The manifest's entry of a file that the build wrote."""
    return {"size": path.stat().st_size, "sha256": digest(path)}


def write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Write manifest.json with a digest of its own values. The file appears once it is complete and on disk."""
    values = {name: value for name, value in manifest.items() if name != _OWN_DIGEST}
    sealed = {"format": FORMAT, **values, _OWN_DIGEST: _digest_of_values({"format": FORMAT, **values})}
    write_object(directory / MANIFEST, sealed)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the bundle in `path`. Reads no other file.

    Raises BundleError if this is not a bundle, has another format version, or has a manifest that was changed.
    """
    file = path / MANIFEST
    if path.is_file():
        raise BundleError(f"{path}: is a file; expected a bundle, a directory that `dflash-trt build` made")
    if not path.is_dir():
        raise BundleError(f"{path}: no such directory; `dflash-trt build --out {path}` makes a bundle there")
    if not os.path.lexists(file) and (path / "config.json").is_file():
        raise BundleError(
            f"{path}: is a checkpoint, not a bundle; `dflash-trt build --target {path}` builds one"
        )
    if not os.path.lexists(file):
        raise BundleError(f"{path}: no {MANIFEST}, so this is not a finished bundle; run the build again")
    manifest = read_object(file, _MAX_MANIFEST_BYTES, BundleError)
    if manifest.get("format") != FORMAT:
        raise BundleError(
            f"{file}: format is {show(manifest.get('format'))}, expected {show(FORMAT)}: this is not a bundle, or one "
            "from an older version of dflash-trt; build it again, in another place"
        )
    if manifest.get("format_version") != FORMAT_VERSION:
        raise BundleError(
            f"{file}: format_version is {show(manifest.get('format_version'))}, this version of dflash-trt reads "
            f"{FORMAT_VERSION}; build the bundle again, in another place"
        )
    if manifest.get(_OWN_DIGEST) != _digest_of_values(manifest):
        raise BundleError(
            f"{file}: {_OWN_DIGEST} is not the digest of the other fields: the file was changed after the build; "
            "build the bundle again"
        )
    for field, kind in _FIELDS.items():
        value = manifest.get(field)
        if field not in manifest or not isinstance(value, kind) or isinstance(value, bool):
            raise BundleError(f"{file}: {field} is {show(value)}; build the bundle again")
    for name, entry in manifest["files"].items():
        _check_entry(file, name, entry)
    return manifest


def unlisted(path: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Entries of a bundle's directory that its manifest does not list: files, and links of any kind; sorted."""
    inside = [p for p in path.rglob("*") if p.is_symlink() or not p.is_dir()]
    return sorted({p.relative_to(path).as_posix() for p in inside} - {MANIFEST, *manifest["files"]})


def _digest_of_values(manifest: Mapping[str, Any]) -> str:
    """sha256 of the manifest without its own digest: keys sorted, no spaces, ASCII."""
    values = {name: value for name, value in manifest.items() if name != _OWN_DIGEST}
    values = json.loads(json.dumps(values))  # keys that are numbers become text, and are sorted as text
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _check_entry(manifest: Path, name: str, entry: Any) -> None:
    """Raise BundleError if an entry of `files` could lead out of the bundle, or lacks a size or digest."""
    parts = PurePosixPath(name).parts
    if not parts or PurePosixPath(name).is_absolute() or ".." in parts or "\0" in name or name == MANIFEST:
        raise BundleError(f"{manifest}: files names {show(name)}, which is not a file inside the bundle")
    for field, kind in (("size", int), ("sha256", str)):
        if not isinstance(entry, dict) or not isinstance(entry.get(field), kind):
            raise BundleError(f"{manifest}: files[{show(name)}] has no {field}; build the bundle again")


def _check_file(bundle: Path, name: str, entry: Mapping[str, Any], *, full: bool) -> None:
    file = bundle / name
    if not file.is_file():
        raise BundleError(f"{file}: missing, though the manifest lists it; build the bundle again")
    try:
        own_file(bundle, file)
    except CheckpointError as error:
        raise BundleError(str(error)) from None
    status = file.stat()
    if status.st_size != entry["size"]:
        raise BundleError(
            f"{file}: {status.st_size} bytes, the manifest says {entry['size']}; build the bundle again"
        )
    # A file with one link cannot be changed elsewhere. The files of a copied bundle have new times.
    if "mtime_ns" in entry and status.st_nlink > 1 and status.st_mtime_ns != entry["mtime_ns"]:
        raise BundleError(
            f"{file}: was written to after the build, through the linked checkpoint; restore the checkpoint and build "
            "again, without --weights link if the checkpoint may change"
        )
    if (full or status.st_size <= QUICK_DIGEST_BYTES) and digest(file) != entry["sha256"]:
        raise BundleError(
            f"{file}: sha256 differs from the manifest: the file was altered; build the bundle again"
        )


def _check_graph(file: Path, manifest: Mapping[str, Any]) -> None:
    try:
        model = onnx.load(str(file), load_external_data=False)
    except Exception as error:  # protobuf's DecodeError has no stable module
        raise BundleError(f"{file}: not a readable ONNX model ({error}); build the bundle again") from error
    stated = {p.key: p.value for p in model.metadata_props}
    for key, expected in graph_metadata(manifest).items():
        if stated.get(key) != expected:
            raise BundleError(
                f"{file}: {key.removeprefix('dflash.')} is {stated.get(key)}, the manifest says {expected}: "
                "graph and manifest belong to different builds; build the bundle again"
            )

"""Work directories: only files that this project made are deleted or written, whatever is in the way."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.bundle.manifest import MANIFEST, Bundle
from dflash_trt.bundle.workspace import workspace
from dflash_trt.errors import BuildError, CheckpointError, DFlashError
from dflash_trt.files.disk import held_folder, own_file, whole_file
from dflash_trt.quantization.convert import quantize
from dflash_trt.serving.deploy import deploy
from tests.bundle.test_bundle import build_pair, built, bundle, checkpoints, leftovers, manifest_of

__all__ = ["built", "bundle", "checkpoints"]  # the fixtures

ROOT = Path(__file__).parents[2]
WORK = ".bundle.dflash-trt-work"

POSIX = pytest.mark.skipif(
    not hasattr(os, "geteuid"), reason="Windows has neither such owners nor such locks"
)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


# Manifests of other programs and of other versions of this one, and a damaged one.
FOREIGN: dict[str, Callable[[dict[str, Any]], str]] = {
    "another program's": lambda manifest: json.dumps({"name": "thesis", "version": 2}),
    "no JSON": lambda manifest: "CACHE MANIFEST\n# v1\nthesis.css\n",
    "version 1": lambda manifest: json.dumps(manifest | {"format": None, "format_version": 1}),
    "newer": lambda manifest: json.dumps(manifest | {"format_version": 99}),
    "one damaged byte": lambda manifest: json.dumps(manifest).replace('"block_size": 8', '"block_size": 9'),
}


@pytest.mark.parametrize("what", FOREIGN)
@pytest.mark.parametrize("force", [False, True])
def test_a_directory_that_is_no_bundle_of_this_version_is_never_replaced(
    checkpoints, bundle, what, force
) -> None:
    (bundle / MANIFEST).write_text(FOREIGN[what](manifest_of(bundle)))
    (bundle / "thesis.tex").write_text("five years")
    before = contents(bundle)
    with pytest.raises(BuildError, match="this version can replace"):
        build_pair(checkpoints, bundle, force=force)
    assert contents(bundle) == before
    assert leftovers(bundle) == []


def test_files_that_the_manifest_does_not_list_are_not_removed(checkpoints: Path, bundle: Path) -> None:
    (bundle / "weights" / "notes.txt").write_text("mine")
    before = contents(bundle)
    build_pair(checkpoints, bundle)  # the same bundle stays, and the file with it
    with pytest.raises(BuildError, match=r"not part of the bundle, such as 'weights/notes\.txt'"):
        build_pair(checkpoints, bundle, "other", force=True)
    assert contents(bundle) == before
    (bundle / "weights" / "notes.txt").rename(bundle.parent / "notes.txt")
    build_pair(checkpoints, bundle, "other", force=True)
    assert leftovers(bundle) == []


def test_a_bundle_that_gets_a_file_during_the_build_is_not_replaced(checkpoints: Path, bundle: Path) -> None:
    def drop(step: str, done: int, total: int) -> None:
        if step == "write graphs":
            (bundle / "late.txt").write_text("mine")

    before = contents(bundle)
    with pytest.raises(BuildError, match=r"not part of the bundle, such as 'late\.txt'"):
        build_pair(checkpoints, bundle, "other", force=True, progress=drop)
    assert contents(bundle) == before | {"late.txt": b"mine"}
    (bundle / "late.txt").unlink()
    build_pair(checkpoints, bundle, "other", force=True)
    assert leftovers(bundle) == []


def test_links_in_a_bundle_are_not_followed_when_it_is_replaced(checkpoints, bundle, tmp_path) -> None:
    outside = tmp_path / "outside.safetensors"
    shutil.move(bundle / "weights" / "target" / "model.safetensors", outside)
    (bundle / "weights" / "target" / "model.safetensors").symlink_to(outside)
    build_pair(checkpoints, bundle, "other", force=True)
    assert outside.stat().st_size > 0


def test_a_symbolic_link_as_out_is_refused(checkpoints: Path, bundle: Path, tmp_path: Path) -> None:
    link, before = tmp_path / "link", contents(bundle)
    for target in (bundle, tmp_path / "dangling"):
        link.symlink_to(target)
        for make in (
            lambda: build_pair(checkpoints, link, "other", force=True),
            lambda: quantize(checkpoints / "target", link, "fp8"),
            lambda: deploy(Bundle.open(bundle), link),
        ):
            with pytest.raises(DFlashError, match=r"link"):
                make()
        assert link.is_symlink()
        link.unlink()
    assert contents(bundle) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle"]


def test_a_folder_is_held_once(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for _ in range(2):
        with held_folder(folder) as first, held_folder(folder) as second:
            assert (first, second) == (True, False)
        assert list(tmp_path.iterdir()) == []


@POSIX
def test_a_lock_whose_file_is_removed_meanwhile_is_not_held_twice(tmp_path, monkeypatch) -> None:
    """The previous holder removes its file, or the folder, between our open and our lock."""
    import fcntl

    flock, removed = fcntl.flock, []

    def late(*arguments: Any) -> None:
        if not removed:
            removed.append(shutil.rmtree(tmp_path / "folder"))
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", late)
    with held_folder(tmp_path / "folder") as first:
        assert not first or (tmp_path / "folder" / "lock").exists()
    with held_folder(tmp_path / "folder") as again:
        assert again


@pytest.mark.parametrize("full", [False, True])
def test_an_interrupted_run_leaves_plans_unless_the_disk_is_full(tmp_path: Path, full: bool) -> None:
    """The next run removes only our own names, whatever a kill has left of them."""
    out, area = tmp_path / "bundle", tmp_path / WORK
    with suppress(KeyboardInterrupt, OSError), workspace(out) as place:
        plan = place.path / "plans" / "sm90" / "target.plan"
        plan.parent.mkdir(parents=True)
        for file in (plan, place.path / "x", place.scratch / "y"):
            file.write_text("whole")
        raise OSError(errno.ENOSPC, "no room") if full else KeyboardInterrupt
    assert contents(tmp_path) == ({} if full else {f"{WORK}/new/plans/sm90/target.plan": b"whole"})
    for folder in (out, *(area / name for name in ("new", "scratch", "replaced"))):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "half").write_text("half")
    (area / "thesis.tex").write_text("five years")
    with workspace(out) as again:
        assert contents(again.area).keys() - {"lock"} == {"thesis.tex"} | (
            set() if full else {"new/plans/sm90/target.plan"}
        )
    assert contents(tmp_path) == {f"{WORK}/thesis.tex": b"five years", "bundle/half": b"half"}


@POSIX
def test_a_link_or_a_directory_of_another_user_is_not_taken_up(tmp_path, monkeypatch) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "thesis.tex").write_text("five years")
    (tmp_path / WORK).symlink_to(victim)
    refusal = pytest.raises(BuildError, match="is not a directory of this user")
    with refusal, workspace(tmp_path / "bundle"):
        pass
    (tmp_path / WORK).unlink()
    victim.rename(tmp_path / WORK)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with refusal, workspace(tmp_path / "bundle"):
        pass
    assert contents(tmp_path / WORK) == {"thesis.tex": b"five years"}


def test_a_replacement_that_ends_between_its_renames_is_undone(checkpoints, bundle, monkeypatch) -> None:
    """At once after an interrupt, by the next run after a kill."""
    before, rename = contents(bundle), os.rename

    def second_fails(source: Any, target: Any, **kwargs: Any) -> None:
        if (Path(source).name, target) == ("new", bundle):
            raise KeyboardInterrupt
        rename(source, target, **kwargs)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(KeyboardInterrupt):
        build_pair(checkpoints, bundle, "other", force=True)
    monkeypatch.undo()
    assert contents(bundle) == before
    (bundle.parent / WORK).mkdir(mode=0o700)
    bundle.rename(bundle.parent / WORK / "replaced")  # as a kill leaves it
    with pytest.raises(BuildError, match="other inputs"):
        build_pair(checkpoints, bundle, "other")
    assert contents(bundle) == before
    assert leftovers(bundle) == []


@pytest.mark.parametrize("role", ["path", "scratch"])
@pytest.mark.parametrize("kind", [OSError, BuildError])
def test_an_error_names_no_directory_that_is_gone(tmp_path: Path, role: str, kind: type[Exception]) -> None:
    def fail() -> None:
        with workspace(tmp_path / "out") as place:
            file = f"{getattr(place, role)}/half"
            raise (
                OSError(errno.ENOSPC, "no room", file) if kind is OSError else BuildError(f"{file}: is wrong")
            )

    with pytest.raises(kind, match=f"{tmp_path}/out") as found:
        fail()
    assert "dflash-trt-work" not in str(found.value)
    assert not list(tmp_path.iterdir())


def test_an_error_names_a_log_that_stays(tmp_path: Path) -> None:
    def fail() -> None:
        with workspace(tmp_path / "out") as place:
            log = place.path / "plans" / "target.log"
            log.parent.mkdir()
            log.write_text("why")
            raise BuildError(f"{place.scratch}: is wrong; the log is {log}")

    with pytest.raises(BuildError, match=f"{tmp_path}/out: is wrong") as found:
        fail()
    assert Path(str(found.value).rpartition(" ")[2]).read_text() == "why"


def test_what_comes_into_the_place_during_the_work_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    with workspace(out) as place:
        (place.path / "x").write_text("x")
        out.mkdir()
        (out / "thesis.tex").write_text("five years")
        with pytest.raises(BuildError, match="has appeared during the work"):
            place.publish()
    assert contents(out) == {"thesis.tex": b"five years"}


@POSIX
def test_everything_is_on_disk_before_it_has_its_name(checkpoints, bundle, tmp_path, monkeypatch) -> None:
    """Every file and directory is flushed before the rename, and the parent directory after it."""
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(descriptor: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def note_rename(source: Any, target: Any, **kwargs: Any) -> None:
        rename(source, target, **kwargs)
        if Path(source).name == "new":
            events.append("rename")

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    for out, make in (
        (tmp_path / "built", lambda out: build_pair(checkpoints, out)),
        (tmp_path / "quantized", lambda out: quantize(checkpoints / "target", out, "fp8")),
        (tmp_path / "deployed", lambda out: deploy(Bundle.open(bundle), out, copy=True)),
    ):
        events.clear()
        make(out)
        at = len(events) - 1 - events[::-1].index("rename")
        before = {event.partition("/new/")[2] for event in events[:at] if "/new/" in event}
        expected = {str(p.relative_to(out)) for p in out.rglob("*")}
        assert expected <= before, out
        assert any(event.endswith("/new") for event in events[:at])
        assert str(tmp_path) in events[at:]


def test_a_file_that_is_not_written_to_its_end_does_not_appear(tmp_path: Path) -> None:
    def fail() -> None:
        with whole_file(tmp_path / "file") as file:
            file.write(b"half")
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_links_in_a_checkpoint_lead_to_its_own_files(tmp_path: Path) -> None:
    """A snapshot in the Hugging Face cache consists of links to its repository's blobs. Any other outward link is
    refused.
    """
    repo = tmp_path / "hub" / "models--org--name"
    snapshot = repo / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    for folder in (repo / "blobs", tmp_path / "hub" / "models--org--other" / "blobs"):
        folder.mkdir(parents=True)
        (folder / "1234").write_text("x")
    (snapshot / "config.json").symlink_to("../../blobs/1234")
    assert own_file(snapshot, snapshot / "config.json") == repo / "blobs" / "1234"
    (snapshot / "other.json").symlink_to("../../../models--org--other/blobs/1234")
    with pytest.raises(CheckpointError, match=r"other\.json: is a symbolic link to .*outside"):
        own_file(snapshot, snapshot / "other.json")
    plain = tmp_path / "plain"
    (plain / "inside").mkdir(parents=True)
    (plain / "inside" / "file").write_text("x")
    (plain / "link").symlink_to("inside/file")
    assert own_file(plain, plain / "link") == plain / "inside" / "file"
    (plain / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError, match=r"is a symbolic link to /etc/passwd"):
        own_file(plain, plain / "passwd")


def test_make_clean_leaves_bundles(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for folder in (
        "bundles/mine",
        ".venv",
        ".mypy_cache",
        "dflash_trt/__pycache__",
        "build_scripts",
        "tests",
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file").write_text("x")
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True)
    assert set(contents(tmp_path)) == {"Makefile", "bundles/mine/file", "build_scripts/file", "tests/file"}

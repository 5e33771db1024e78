"""An open directory: what is done in it stays in it, also when links or other directories take its place meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Self

# Windows opens no directories. There, names are looked up by their path.
_OPENS = hasattr(os, "O_DIRECTORY") and os.open in os.supports_dir_fd
_FOLLOW_NOTHING = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class Folder:
    """A directory that is open. All methods take names in it, follow no links and raise OSError."""

    def __init__(self, path: Path, within: Folder | None = None) -> None:
        """Open `path`, or the directory of that name in `within`. A symbolic link is refused."""
        self.path: Path = within.path / path if within else path
        self._descriptor: int | None = None
        if _OPENS:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            self._descriptor = os.open(path, flags, dir_fd=within._descriptor if within else None)
        elif self.path.is_symlink() or not self.path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.path))

    def _at(self, name: str) -> str:
        return name if self._descriptor is not None else str(self.path / name)

    def inner(self, name: str) -> Folder:
        return Folder(Path(name), self)

    def file(self, name: str, flags: int, mode: int = 0o600) -> int:
        """Open a file and return the descriptor. A pipe is not waited for."""
        return os.open(self._at(name), flags | _FOLLOW_NOTHING, mode, dir_fd=self._descriptor)

    def names(self) -> list[str]:
        return os.listdir(self.path if self._descriptor is None else self._descriptor)

    def stat(self, name: str) -> os.stat_result:
        return os.stat(self._at(name), dir_fd=self._descriptor, follow_symlinks=False)

    def make(self, name: str) -> None:
        os.mkdir(self._at(name), dir_fd=self._descriptor)

    def rename(self, name: str, to: Folder, new: str) -> None:
        os.rename(self._at(name), to._at(new), src_dir_fd=self._descriptor, dst_dir_fd=to._descriptor)

    def unlink(self, name: str) -> None:
        os.unlink(self._at(name), dir_fd=self._descriptor)

    def remove(self, name: str) -> None:
        """Remove an empty directory."""
        os.rmdir(self._at(name), dir_fd=self._descriptor)

    def remove_tree(self, name: str) -> None:
        shutil.rmtree(self._at(name), dir_fd=self._descriptor)

    def is_ours(self) -> bool:
        """Whether this user owns the directory. Always true on Windows, which has no such owners."""
        return self._descriptor is None or owned(os.fstat(self._descriptor))

    def sync(self) -> None:
        """Flush the names in the directory to the disk. Windows does so by itself."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def owned(found: os.stat_result) -> bool:
    """Whether this user owns what `found` describes. Always true on Windows."""
    return not hasattr(os, "geteuid") or found.st_uid == os.geteuid()

"""Folders that appear whole or not at all: built beside the target, synced, then renamed.

One lock file beside each target is held while a build runs, so a second build of the same target is refused, and what a
killed build left behind is known to be nobody's and is removed. File modes do not depend on the umask.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from page4.checkpoint.hashes import OnBytes, sha256_of_file
from page4.errors import UsageError, message
from page4.scales.files import FILE_MODE, FOLDER_MODE, make_folder, sync


class Stage:
    """The folder that will become the target; every file of it is written through these methods."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, data: bytes) -> None:
        """A new file."""
        with self._place(name).open("xb") as file:
            file.write(data)
            os.fchmod(file.fileno(), FILE_MODE)

    def link(self, name: str, target: str) -> None:
        """A symbolic link as it is to stand there."""
        self._place(name).symlink_to(target)

    def copy(self, name: str, source: Path, on_bytes: OnBytes | None = None) -> str:
        """A copy of a file, read back for its SHA-256, which is returned; `on_bytes` hears of what was read back."""
        path = self._place(name)
        with source.open("rb") as reader, path.open("xb") as writer:
            shutil.copyfileobj(reader, writer, 1 << 20)
            os.fchmod(writer.fileno(), FILE_MODE)
        return sha256_of_file(path, on_bytes)

    def _place(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


@contextmanager
def staged(target: Path, *, force: bool = False, apart_from: Sequence[Path] = ()) -> Iterator[Stage]:
    """Build `target`: the block fills the stage, which is renamed to `target` when the block ends without an error.

    `force` replaces a folder that is not empty. Raises `UsageError` when the target exists, is, holds or lies in one of
    `apart_from` (what the build reads), or is being built by another process.
    """
    target = Path(os.path.realpath(target.parent)) / target.name
    check_target(target, force=force, apart_from=apart_from)
    make_folder(target.parent)
    with _locked(target):
        _recover(target)
        check_target(target, force=force, apart_from=apart_from)
        folder = Path(tempfile.mkdtemp(prefix=_prefix(target, "staging"), dir=target.parent))
        try:
            yield Stage(folder)
            _sync_tree(folder)
            _replace(target, folder)
        finally:
            _recover(target)


def check_target(target: Path, *, force: bool, apart_from: Sequence[Path]) -> None:
    """Refuse a target that must not be written. Raises `UsageError`."""
    if not target.name or target.name in (".", ".."):
        _refuse(target, "a new folder", "a name without an end", "name the folder")
    real = Path(os.path.realpath(target))
    for other in map(Path, map(os.path.realpath, apart_from)):
        if real == other or other in real.parents or real in other.parents:
            _refuse(target, f"a folder apart from {other}", "one that is, holds or lies in it", "write elsewhere")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        _refuse(target, "a new folder", "a file or a link", "write elsewhere")
    if target.is_dir() and not force and next(target.iterdir(), None) is not None:
        _refuse(target, "a new or empty folder", "a folder with files", "write elsewhere, or replace it with --force")


def _prefix(target: Path, kind: str) -> str:
    return f".{target.name}.{kind}-"


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    path = target.parent / f".{target.name}.lock"
    file = _lock(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: who waits for it sees that the name is gone
        os.close(file)


def _lock(path: Path) -> int:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
                return file
        except BlockingIOError:
            os.close(file)
            _refuse(path, "no other build of this folder", "one that runs", "wait for it, or write elsewhere")
        os.close(file)


def _recover(target: Path) -> None:
    """Undo what an unfinished build left: a stage is removed, a folder that was moved away comes back."""
    _remove_all(target, "staging")
    for old in _left(target, "old"):
        if not target.exists():
            old.rename(target)
    _remove_all(target, "old")


def _left(target: Path, kind: str) -> list[Path]:
    prefix = _prefix(target, kind)
    return [p for p in target.parent.iterdir() if p.name.startswith(prefix) and p.is_dir() and not p.is_symlink()]


def _remove_all(target: Path, kind: str) -> None:
    for folder in _left(target, kind):
        shutil.rmtree(folder)


def _replace(target: Path, folder: Path) -> None:
    if target.exists() and next(target.iterdir(), None) is not None:
        target.rename(tempfile.mkdtemp(prefix=_prefix(target, "old"), dir=target.parent))
    folder.rename(target)
    sync(target.parent)


def _sync_tree(folder: Path) -> None:
    for path, _, files in os.walk(folder, topdown=False):
        for name in files:
            file = Path(path) / name
            if not file.is_symlink():
                sync(file)
        Path(path).chmod(FOLDER_MODE)
        sync(Path(path))


def _refuse(path: Path, allowed: str, got: str, do: str) -> NoReturn:
    raise UsageError(message(str(path), allowed=allowed, got=got, do=do))

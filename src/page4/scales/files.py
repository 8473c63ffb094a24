"""Files that are either absent or whole: staged beside their place, flushed to the disk, renamed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from page4.checkpoint.hashes import sha256_of_bytes

FILE_MODE, FOLDER_MODE = 0o644, 0o755
STAGED = ".staged"


def json_bytes(value: Any) -> bytes:
    """Sorted keys, floats in their shortest exact form, one line end: the same bytes for the same value."""
    return (json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def digest_of(value: Any) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    return sha256_of_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def write_whole(path: Path, data: bytes, stage: Path | None = None) -> None:
    """`path` has `data`, or is as it was; `stage` is a folder on the same disk (that of `path` by default)."""
    staged = (stage or path.parent) / f"{path.name}{STAGED}"
    handle = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, FILE_MODE)
            file.write(data)
            file.flush()
            os.fsync(handle)
        staged.replace(path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    sync(path.parent)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, readable by all whatever the umask."""
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            folder.mkdir(exist_ok=True)
            folder.chmod(FOLDER_MODE)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""SHA-256 of files and bytes, in constant memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from page4.errors import CheckpointError, message

CONFIG_NAME = "config.json"
_CHUNK_BYTES = 1 << 20
MAX_CONFIG_BYTES = 16 << 20
OnBytes = Callable[[int], None]


def sha256_of_bytes(data: bytes) -> str:
    """The hex digest of `data`."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path, on_bytes: OnBytes | None = None) -> str:
    """The hex digest of a file's content; `on_bytes` hears of every piece that was read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            if on_bytes is not None:
                on_bytes(len(chunk))
    return digest.hexdigest()


def config_sha256(folder: Path) -> str:
    """The hash of config.json, of at most 16 MiB. Raises `CheckpointError`."""
    path = folder / CONFIG_NAME
    if not path.is_file() or path.stat().st_size > MAX_CONFIG_BYTES:
        got = "a larger file" if path.is_file() else "none"
        do = "give a checkpoint folder"
        raise CheckpointError(message(str(path), allowed=f"at most {MAX_CONFIG_BYTES} bytes", got=got, do=do))
    return sha256_of_file(path)

"""SHA-256 of files and bytes, in constant memory."""

from __future__ import annotations

import hashlib
from pathlib import Path

from page4.errors import CheckpointError, message

CONFIG_NAME = "config.json"
_CHUNK_BYTES = 1 << 20
MAX_CONFIG_BYTES = 16 << 20


def sha256_of_bytes(data: bytes) -> str:
    """The hex digest of `data`."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path) -> str:
    """The hex digest of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def config_sha256(folder: Path) -> str:
    """The hash of config.json, of at most 16 MiB. Raises `CheckpointError`."""
    path = folder / CONFIG_NAME
    if not path.is_file() or path.stat().st_size > MAX_CONFIG_BYTES:
        got = "a larger file" if path.is_file() else "none"
        do = "give a checkpoint folder"
        raise CheckpointError(message(str(path), allowed=f"at most {MAX_CONFIG_BYTES} bytes", got=got, do=do))
    return sha256_of_file(path)

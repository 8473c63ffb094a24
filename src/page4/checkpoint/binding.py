"""Does an overlay still belong to the base that it stands on? Torch-free and quick: no shard is hashed whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from page4.checkpoint.hashes import CONFIG_NAME, config_sha256, sha256_of_file
from page4.checkpoint.header import check_regular_file
from page4.checkpoint.identity import check_base, check_shards
from page4.checkpoint.index import Checkpoint
from page4.checkpoint.index_file import INDEX_NAME
from page4.checkpoint.paths import resolve_inside
from page4.checkpoint.provenance import PROVENANCE_NAME, Provenance, read_provenance
from page4.errors import ScaleError, message

_WHAT = PROVENANCE_NAME
_MAX_SCALE_FILE_BYTES = 64 << 20


def check_binding(folder: Path | str) -> None:
    """Refuse an overlay whose base, index or scale files are not those of its provenance.

    Compared: config, base index, merged index and scale files by SHA-256, each shard by size, header and sample (see
    `checkpoint.identity` for what that can tell). Raises `ScaleError`, also when there is no provenance, and
    `CheckpointError` when a file cannot be read at all or a link leads elsewhere.
    """
    folder = Path(folder)
    provenance = read_provenance(folder)
    _check_files(folder, provenance)
    base = provenance.base
    compared: set[Path] = set()
    if base.path is not None:
        root = Path(os.path.realpath(Path(os.path.realpath(folder)) / base.path))
        compared = {path for path, _ in check_base(base, root, _WHAT).shards.values()}
    if (found := config_sha256(folder)) != base.config_sha256:
        _refuse(folder / CONFIG_NAME, f"SHA-256 {base.config_sha256}", found)
    own = {record.filename for record in provenance.scale_files}
    shards = {name: shard for name, shard in Checkpoint.open(folder).shards.items() if name not in own}
    check_shards(base.shards, shards, f"{_WHAT}: {folder}", except_for=compared)


def _check_files(folder: Path, provenance: Provenance) -> None:
    hashes = {INDEX_NAME: provenance.index_sha256}
    hashes |= {record.filename: record.sha256 for record in provenance.scale_files}
    for name, sha256 in hashes.items():
        path = resolve_inside(folder, name)
        size = check_regular_file(path)
        if name != INDEX_NAME and size > _MAX_SCALE_FILE_BYTES:
            _refuse(path, f"at most {_MAX_SCALE_FILE_BYTES} bytes", f"{size} bytes")
        if (found := sha256_of_file(path)) != sha256:
            _refuse(path, f"SHA-256 {sha256}", found)


def _refuse(path: Path, allowed: str, got: str) -> NoReturn:
    do = "build the overlay again, or restore the file"
    raise ScaleError(message(f"{_WHAT}: {path}", allowed=allowed, got=got, do=do))

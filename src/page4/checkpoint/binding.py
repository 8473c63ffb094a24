"""Does an overlay still belong to the base that it stands on? Torch-free and quick: no shard is hashed whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from page4.checkpoint.hashes import CONFIG_NAME, config_sha256, sha256_of_file
from page4.checkpoint.header import check_regular_file
from page4.checkpoint.identity import check_base, check_shards
from page4.checkpoint.index import Checkpoint
from page4.checkpoint.index_file import INDEX_NAME
from page4.checkpoint.paths import resolve_inside
from page4.checkpoint.provenance import PROVENANCE_NAME, Provenance, read_provenance
from page4.errors import Page4Error, ScaleError, message

_WHAT = PROVENANCE_NAME
_MAX_SCALE_FILE_BYTES = 64 << 20


def check_binding(folder: Path | str) -> Provenance:
    """Refuse an overlay whose base, index or scale files are not those of its provenance, which is returned.

    Compared: config, base index, merged index and scale files by SHA-256, each shard by size, header and sample (see
    `checkpoint.identity` for what that can tell). Raises the first of `binding_faults`: `ScaleError`, also when there
    is no provenance, or `CheckpointError` when a file cannot be read at all or a link leads elsewhere.
    """
    provenance, faults = binding_faults(folder)
    if faults:
        raise faults[0]
    assert provenance is not None, "without a provenance there is a fault"
    return provenance


def binding_faults(folder: Path | str) -> tuple[Provenance | None, list[Page4Error]]:
    """The provenance of an overlay where it can be read, and all that does not agree with it."""
    folder = Path(folder)
    try:
        provenance = read_provenance(folder)
    except Page4Error as error:
        return None, [error]
    files = {INDEX_NAME: provenance.index_sha256}
    files |= {record.filename: record.sha256 for record in provenance.scale_files}
    checks: list[Callable[[], None]] = [
        *(lambda name=name, sha256=sha256: _check_file(folder, name, sha256) for name, sha256 in files.items()),
        lambda: _check_config(folder, provenance),
        lambda: _check_shards(folder, provenance),
    ]
    faults = []
    for check in checks:
        try:
            check()
        except Page4Error as error:
            faults.append(error)
    return provenance, faults


def _check_shards(folder: Path, provenance: Provenance) -> None:
    base = provenance.base
    compared: set[Path] = set()
    if base.path is not None:
        root = Path(os.path.realpath(Path(os.path.realpath(folder)) / base.path))
        compared = {path for path, _ in check_base(base, root, _WHAT).shards.values()}
    own = {record.filename for record in provenance.scale_files}
    shards = {name: shard for name, shard in Checkpoint.open(folder).shards.items() if name not in own}
    check_shards(base.shards, shards, f"{_WHAT}: {folder}", except_for=compared)


def _check_config(folder: Path, provenance: Provenance) -> None:
    if (found := config_sha256(folder)) != provenance.base.config_sha256:
        _refuse(folder / CONFIG_NAME, f"SHA-256 {provenance.base.config_sha256}", found)


def _check_file(folder: Path, name: str, sha256: str) -> None:
    path = resolve_inside(folder, name)
    size = check_regular_file(path)
    if name != INDEX_NAME and size > _MAX_SCALE_FILE_BYTES:
        _refuse(path, f"at most {_MAX_SCALE_FILE_BYTES} bytes", f"{size} bytes")
    if (found := sha256_of_file(path)) != sha256:
        _refuse(path, f"SHA-256 {sha256}", found)


def _refuse(path: Path, allowed: str, got: str) -> NoReturn:
    do = "build the overlay again, or restore the file"
    raise ScaleError(message(f"{_WHAT}: {path}", allowed=allowed, got=got, do=do))

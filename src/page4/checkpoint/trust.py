"""Links that may leave a folder: those of an overlay, to the shards of the base that its provenance binds.

A provenance is a file like any other and may lie. So a link is followed only when it ends at the very file that the
base opened by itself would read under the same name, and the base has the config and the index that the provenance
recorded. What such a file can give away is a shard of a checkpoint whose index the writer knew already.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from page4.checkpoint.hashes import CONFIG_NAME, config_sha256
from page4.checkpoint.index_file import INDEX_NAME, SINGLE_NAME, read_index
from page4.checkpoint.paths import check_shard_name, resolve_inside
from page4.errors import CheckpointError, PathEscapeError, ScaleError, message

if TYPE_CHECKING:
    from page4.checkpoint.provenance import OverlayBase


class ShardResolver:
    """Resolves shard names of one folder; reads its provenance when the first link leaves the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._base: TrustedBase | None = None

    def resolve(self, name: str) -> Path:
        """The real path of a shard. Raises `PathEscapeError` with the reason why a link is not followed."""
        try:
            return resolve_inside(self.folder, name)
        except PathEscapeError as outside:
            try:
                if self._base is None:
                    self._base = trusted_base(self.folder)
                return self._base.resolve(self.folder, name)
            except (ScaleError, CheckpointError, OSError) as reason:
                raise PathEscapeError(f"{outside} ({reason})") from None


class TrustedBase:
    """A base folder whose config and index are those of a provenance, and the shard names that its index lists."""

    def __init__(self, folder: Path, names: frozenset[str]) -> None:
        self.folder = folder
        self.names = names

    def resolve(self, overlay: Path, name: str) -> Path:
        """The file of the base under `name`, if the overlay's link ends there. Raises `PathEscapeError`."""
        target = Path(os.path.realpath(overlay / name))
        if name not in self.names or target != resolve_inside(self.folder, name):
            _refuse(str(overlay / name), f"a link to a shard of {self.folder}", f"a link to {target}")
        return target


def trusted_base(folder: Path) -> TrustedBase:
    """The base that the provenance of `folder` binds. Raises `ScaleError`, `CheckpointError`, `OSError`."""
    from page4.checkpoint.provenance import read_provenance  # pydantic, for overlays only

    base = read_provenance(folder).base
    if base.path is None:
        _refuse(str(folder), "no links, as its provenance says that it was copied", "links")
    root = Path(os.path.realpath(Path(os.path.realpath(folder)) / base.path))
    _check_config(base, root)
    return TrustedBase(root, frozenset(_shard_names(base, root)))


def _check_config(base: OverlayBase, root: Path) -> None:
    path = resolve_inside(root, CONFIG_NAME)
    if (found := config_sha256(root)) != base.config_sha256:
        _refuse(str(path), f"SHA-256 {base.config_sha256}, as in the provenance", found)


def _shard_names(base: OverlayBase, root: Path) -> list[str]:
    path = resolve_inside(root, INDEX_NAME)
    if base.index_sha256 is None:
        if path.exists():
            _refuse(str(path), "none, as in the provenance", "an index")
        return [SINGLE_NAME]
    index = read_index(path)
    if index.sha256 != base.index_sha256:
        _refuse(str(path), f"SHA-256 {base.index_sha256}, as in the provenance", index.sha256)
    return [check_shard_name(name) for name in set(index.weight_map.values())]


def _refuse(what: str, allowed: str, got: str) -> NoReturn:
    raise PathEscapeError(message(what, allowed=allowed, got=got, do="build the overlay again for this base"))

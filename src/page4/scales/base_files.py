"""What an overlay takes over from its base: every file but the index, by relative path."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from page4.checkpoint import Checkpoint, classify
from page4.checkpoint.hashes import CONFIG_NAME
from page4.checkpoint.index_file import INDEX_NAME
from page4.checkpoint.paths import resolve_inside
from page4.checkpoint.provenance import DRAFT_NAME, PROVENANCE_NAME, TARGET_NAME
from page4.errors import CheckpointError, message
from page4.geometry import Geometry
from page4.scales.schema import MANIFEST_NAME

_OURS = (PROVENANCE_NAME, TARGET_NAME, DRAFT_NAME)


@dataclass(frozen=True)
class Base:
    """A base checkpoint that was read and found fit to carry scales. `files` maps relative paths to real files."""

    folder: Path
    checkpoint: Checkpoint
    geometry: Geometry
    prefix: str
    has_draft: bool
    files: dict[str, Path]


def read_base(folder: Path) -> Base:
    """Open a base. Raises `CheckpointError`, `ConfigError` for one that cannot carry an overlay."""
    root = Path(os.path.realpath(folder))
    checkpoint = Checkpoint.open(root)
    geometry = Geometry.from_folder(root)
    files = base_files(root)
    if CONFIG_NAME not in files:
        _refuse(root / CONFIG_NAME, "a file", "none", "give a checkpoint folder")
    kinds = {name: classify(name) for name in checkpoint.names()}
    scales = [name for name, (kind, _) in kinds.items() if kind == "scale"]
    if scales:
        _refuse(root, "a base without K/V scales", ", ".join(scales[:20]), "use the checkpoint without scales")
    prefixes = {n.removesuffix(k.canonical) for n, k in kinds.items() if k.canonical.startswith("layers.")}
    if len(prefixes) != 1:
        _refuse(root, "layers under one prefix", sorted(prefixes), "use a qwen4_exp checkpoint")
    has_draft = any(canonical.startswith("mtp.") for _, canonical in kinds.values())
    return Base(root, checkpoint, geometry, prefixes.pop(), has_draft, files)


def base_files(root: Path) -> dict[str, Path]:
    """The files to carry over, subfolders included; hidden folders, the index and a scale manifest stay behind."""
    files: dict[str, Path] = {}
    for path, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in folders:
            if (Path(path) / name).is_symlink():
                _refuse(Path(path) / name, "a folder", "a link to a folder", "replace the link by the folder")
        for name in sorted(names):
            relative = (Path(path) / name).relative_to(root).as_posix()
            if relative not in (INDEX_NAME, MANIFEST_NAME):
                files[relative] = _checked(root, relative)
    return files


def _checked(root: Path, relative: str) -> Path:
    if relative in _OURS:
        _refuse(root / relative, "a base that is no overlay", "a file of overlays", "give the base of the overlay")
    if not relative.isprintable():
        _refuse(root / relative, "a printable name", "another", "rename the file")
    target = resolve_inside(root, relative)
    if not target.is_file():
        got = "a special file" if target.exists() else "a link that leads nowhere"
        _refuse(root / relative, "a file", got, "download the checkpoint again")
    return target


def _refuse(path: Path, allowed: str, got: object, do: str) -> NoReturn:
    raise CheckpointError(message(str(path), allowed=allowed, got=got, do=do))

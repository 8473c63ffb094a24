"""Which file names of an index may be opened: plain names that stay inside the checkpoint.

Resolving follows links without opening anything. A name may lead into the folder itself, or from a snapshot of a hub
cache (`<repo>/snapshots/<revision>`) into the blobs of the same repository (`<repo>/blobs`).
"""

from __future__ import annotations

import os
from pathlib import Path

from page4.errors import PathEscapeError, message

SHARD_SUFFIX = ".safetensors"
_MAX_NAME_BYTES = 255


def check_shard_name(name: object) -> str:
    """`name` if it is a plain file name that ends in .safetensors. Raises `PathEscapeError`."""
    plain = (
        isinstance(name, str)
        and name.endswith(SHARD_SUFFIX)
        and name != SHARD_SUFFIX
        and not any(c in "/\\:" for c in name)
        and name.isprintable()
        and len(os.fsencode(name)) <= _MAX_NAME_BYTES
    )
    if not plain:
        do = "do not use this checkpoint: its index names files elsewhere"
        raise PathEscapeError(
            message("index file name", allowed="a plain name that ends in .safetensors", got=repr(name), do=do)
        )
    return str(name)


def resolve_inside(folder: Path, name: str) -> Path:
    """The real path of `folder/name`, which need not exist. Raises `PathEscapeError` when it lies elsewhere."""
    root = Path(os.path.realpath(folder))
    target = Path(os.path.realpath(root / name))
    if target.parent != root and root not in target.parents and not _is_hub_blob(root, target):
        allowed = "a file of this folder" + (" or a blob of its repository" if root.parent.name == "snapshots" else "")
        do = "replace the link by the file"
        raise PathEscapeError(message(f"{folder / name}", allowed=allowed, got=f"a link to {target}", do=do))
    return target


def _is_hub_blob(root: Path, target: Path) -> bool:
    return root.parent.name == "snapshots" and target.parent == root.parent.parent / "blobs"

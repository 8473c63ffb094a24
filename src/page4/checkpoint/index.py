"""A checkpoint folder: one safetensors file, or shards named by an index that is an allow-list.

`Checkpoint.open` checks everything that can be wrong before any tensor data is read: names, links, sizes, pointer
files, headers, and that each shard holds what the index says.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from page4.checkpoint._json import Scanner
from page4.checkpoint.hashes import sha256_of_bytes
from page4.checkpoint.header import (
    MAX_HEADER_BYTES,
    MAX_NAME_BYTES,
    ShardHeader,
    TensorEntry,
    check_regular_file,
    read_header,
)
from page4.checkpoint.paths import check_shard_name, resolve_inside
from page4.errors import CheckpointError, IndexFileError, message

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_INDEX_TENSORS = 500_000
_LOG = logging.getLogger("page4")


@dataclass(frozen=True)
class Index:
    """The content of an index file."""

    weight_map: dict[str, str]
    total_size: int | None
    sha256: str


class Checkpoint:
    """An open checkpoint: the tensors that the index allows, where they lie, and what was left out."""

    def __init__(self, folder: Path, index: Index | None, shards: dict[str, tuple[Path, ShardHeader]]) -> None:
        self.folder = folder
        self.index_sha256 = None if index is None else index.sha256
        self._shards = shards
        if index is None:
            self._shard_of = {name: shard for shard, (_, header) in shards.items() for name in header.tensors}
        else:
            self._shard_of = index.weight_map
        self.unlisted = tuple(
            (name, shard)
            for shard, (_, header) in shards.items()
            for name in header.tensors
            if self._shard_of.get(name) != shard
        )
        """Tensors that a shard holds but the index does not list there; they are never read."""

    @classmethod
    def open(cls, folder: Path | str) -> Checkpoint:
        """Check a folder and open it.

        Raises `CheckpointError` (`PathEscapeError`, `IndexFileError`, `ShardError`, `HeaderError`) that names the file,
        what it should be and what it is. A wrong `total_size` in the index is only logged.
        """
        folder = Path(folder)
        if not folder.is_dir():
            got = "a file" if folder.exists() else "nothing"
            raise CheckpointError(message(str(folder), allowed="a folder", got=got, do="give a checkpoint folder"))
        if (folder / INDEX_NAME).exists() or (folder / INDEX_NAME).is_symlink():
            return _open_sharded(folder)
        if not ((folder / SINGLE_NAME).exists() or (folder / SINGLE_NAME).is_symlink()):
            allowed = f"{SINGLE_NAME} or {INDEX_NAME}"
            raise CheckpointError(message(str(folder), allowed=allowed, got="neither", do="give a checkpoint folder"))
        path = resolve_inside(folder, SINGLE_NAME)
        return cls(folder, None, {SINGLE_NAME: (path, read_header(path))})

    def names(self) -> tuple[str, ...]:
        """Every tensor of the checkpoint, sorted."""
        return tuple(sorted(self._shard_of))

    def __contains__(self, name: object) -> bool:
        return name in self._shard_of

    def entry(self, name: str) -> TensorEntry:
        """dtype, shape and offsets of a tensor."""
        return self.header(name).tensors[name]

    def header(self, name: str) -> ShardHeader:
        """The header of the shard that holds a tensor."""
        return self._shards[self._shard_of[name]][1]

    def path(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._shards[self._shard_of[name]][0]

    @property
    def shards(self) -> dict[str, tuple[Path, ShardHeader]]:
        """The weight files by the name that the index has for them: links resolved, and the checked header."""
        return dict(self._shards)

    @property
    def files(self) -> tuple[Path, ...]:
        """The weight files, links resolved."""
        return tuple(path for path, _ in self._shards.values())


def _open_sharded(folder: Path) -> Checkpoint:
    index = read_index(resolve_inside(folder, INDEX_NAME))
    shard_names = sorted(set(index.weight_map.values()))
    for shard in shard_names:
        check_shard_name(shard)
    paths = {shard: resolve_inside(folder, shard) for shard in shard_names}
    for path in paths.values():
        check_regular_file(path)
    shards = {shard: (path, read_header(path)) for shard, path in paths.items()}
    _check_held(folder, index, shards)
    checkpoint = Checkpoint(folder, index, shards)
    held = sum(entry.end - entry.begin for entry in map(checkpoint.entry, index.weight_map))
    if index.total_size is not None and index.total_size != held:
        _LOG.warning(
            "%s: metadata.total_size is %d, the tensors it lists have %d bytes", INDEX_NAME, index.total_size, held
        )
    return checkpoint


def _check_held(folder: Path, index: Index, shards: dict[str, tuple[Path, ShardHeader]]) -> None:
    absent = [f"{name} in {shard}" for name, shard in index.weight_map.items() if name not in shards[shard][1].tensors]
    if absent:
        allowed = "every listed tensor in its shard"
        do = "download index and shards of one revision"
        raise IndexFileError(message(str(folder / INDEX_NAME), allowed=allowed, got=f"no {_some(absent)}", do=do))


def _some(names: Iterable[str]) -> str:
    """All names, or the first 20 and how many more."""
    names = list(names)
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(names[:20]) + more


def read_index(path: Path) -> Index:
    """Read and check an index file. Raises `IndexFileError`, `ShardError`, `PathEscapeError`."""
    size = check_regular_file(path)
    if size > MAX_HEADER_BYTES:
        allowed = f"at most {MAX_HEADER_BYTES} bytes"
        raise IndexFileError(message(str(path), allowed=allowed, got=f"{size} bytes", do="download it again"))
    text = path.read_bytes()

    def fail(allowed: str, got: str) -> NoReturn:
        raise IndexFileError(message(str(path), allowed=allowed, got=got, do="download it again"))

    scanner = Scanner(text, fail)
    weight_map: dict[str, str] | None = None
    total_size: int | None = None
    for key in scanner.members(MAX_NAME_BYTES):
        if key == "weight_map":
            weight_map = _weight_map(scanner)
        elif key == "metadata" and scanner.peek() == b"{":
            total_size = _total_size(scanner)
        else:
            scanner.skip()
    scanner.end()
    if not weight_map:
        fail("a weight_map that names tensors", "none")
    return Index(weight_map=weight_map, total_size=total_size, sha256=sha256_of_bytes(text))


def _weight_map(scanner: Scanner) -> dict[str, str]:
    weight_map: dict[str, str] = {}
    interned: dict[str, str] = {}
    for name in scanner.members(MAX_NAME_BYTES):
        if len(weight_map) == MAX_INDEX_TENSORS:
            scanner.fail(f"at most {MAX_INDEX_TENSORS} tensors", "more")
        if scanner.peek() != b'"':
            scanner.expected(f"a file name for {name!r}")
        shard = scanner.string(MAX_NAME_BYTES)
        weight_map[name] = interned.setdefault(shard, shard)
    return weight_map


def _total_size(scanner: Scanner) -> int | None:
    total_size: int | None = None
    for key in scanner.members(MAX_NAME_BYTES):
        if key == "total_size":
            total_size = scanner.integer()
            if total_size < 0:
                scanner.fail("a total_size of at least 0", str(total_size))
        else:
            scanner.skip()
    return total_size

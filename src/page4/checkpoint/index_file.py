"""`model.safetensors.index.json`: which tensor lies in which file, read within bounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from page4.checkpoint._json import Scanner
from page4.checkpoint.hashes import sha256_of_bytes
from page4.checkpoint.header import MAX_HEADER_BYTES, MAX_NAME_BYTES, check_regular_file
from page4.errors import IndexFileError, message

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_INDEX_TENSORS = 500_000


@dataclass(frozen=True)
class Index:
    """The content of an index file."""

    weight_map: dict[str, str]
    total_size: int | None
    sha256: str


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

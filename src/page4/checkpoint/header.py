"""Bounded reader of safetensors headers, without torch and without reading tensor data.

A file is an 8-byte little-endian length n, n bytes of JSON that map each tensor name to dtype, shape and data_offsets
(relative to the end of the JSON), then the data. The tensors must tile the data: no hole, no overlap, nothing after.
"""

from __future__ import annotations

import math
import re
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

from page4.checkpoint._json import Scanner
from page4.errors import HeaderError, ShardError, message

MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 150_000
MAX_NAME_BYTES = 4096
MAX_NAMES_BYTES = 1 << 24
MAX_METADATA_BYTES = 1 << 18
MAX_METADATA_KEYS = 1000
MAX_RANK = 64
_MAX_ELEMENTS = (1 << 63) - 1
_POINTER = b"version https://git-lfs"
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

# One field of an entry with what follows it, for speed: a shard of a large model has tens of thousands of entries.
# What this does not match takes the slow way, which has the exact messages.
_FIELD = re.compile(
    rb'[ \t\r\n]*"(?:dtype" ?: ?"([A-Z0-9_]{1,16})"'
    rb'|shape" ?: ?\[((?:N(?:, ?N){0,7})?)\]'
    rb'|data_offsets" ?: ?\[(N), ?(N)\])'
    rb"[ \t\r\n]*([,}])".replace(b"N", rb"(?:0|[1-9][0-9]{0,19})")
)


class TensorEntry(NamedTuple):
    """One tensor: `begin` and `end` are byte offsets in the data part of its file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class ShardHeader:
    """A checked header; the data of an entry starts at `data_start + entry.begin` in the file."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_start: int
    file_size: int


def read_header(path: Path) -> ShardHeader:
    """Read and check the header of one file.

    Raises `ShardError` when the file is missing, a pointer, truncated or too long, `HeaderError` when the header is
    malformed. Reads at most 8 + MAX_HEADER_BYTES bytes.
    """
    file_size = check_regular_file(path)
    with path.open("rb") as file:
        text = _read_text(path, file, file_size)
    tensors, metadata = _parse(path, text)
    data_start = 8 + len(text)
    _check_tiling(path, tensors, data_start, file_size)
    return ShardHeader(tensors=tensors, metadata=metadata, data_start=data_start, file_size=file_size)


def check_regular_file(path: Path) -> int:
    """The size of a regular file, found without opening it. Raises `ShardError`."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        reason = "none" if isinstance(error, FileNotFoundError) else str(error)
        raise ShardError(message(str(path), allowed="a file", got=reason, do="download it again")) from None
    if not stat.S_ISREG(status.st_mode):
        got = "a folder" if stat.S_ISDIR(status.st_mode) else "a special file"
        raise ShardError(message(str(path), allowed="a regular file", got=got, do="download it again"))
    return status.st_size


def _read_text(path: Path, file: BinaryIO, file_size: int) -> bytes:
    prefix = file.read(len(_POINTER))
    if prefix == _POINTER:
        do = "fetch the file itself (git lfs pull, or download it again)"
        raise ShardError(message(str(path), allowed="tensor data", got=f"a {file_size}-byte Git LFS pointer", do=do))
    if file_size < 10:
        got = f"{file_size} bytes"
        raise ShardError(message(str(path), allowed="at least 10 bytes", got=got, do="download it again"))
    length = int.from_bytes(prefix[:8], "little")
    if length > MAX_HEADER_BYTES:
        _refuse(path, f"a header of at most {MAX_HEADER_BYTES} bytes", f"{length} bytes")
    if 8 + length > file_size:
        expected = f"at least {8 + length} bytes for its header"
        raise ShardError(message(str(path), allowed=expected, got=f"{file_size} bytes", do="download it again"))
    if prefix[8:9] != b"{":
        _refuse(path, "a header that starts with '{'", repr(prefix[8:9]))
    file.seek(8)
    text = file.read(length)
    if len(text) != length:
        _refuse(path, f"{length} header bytes", f"{len(text)} bytes")
    return text


def _refuse(path: Path, allowed: str, got: str) -> NoReturn:
    raise HeaderError(message(f"{path} header", allowed=allowed, got=got, do="download the file again"))


def _parse(path: Path, text: bytes) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    def fail(allowed: str, got: str) -> NoReturn:
        _refuse(path, allowed, got)

    scanner = Scanner(text, fail)
    tensors: dict[str, TensorEntry] = {}
    metadata: dict[str, str] = {}
    names_bytes = 0
    for name in scanner.members(MAX_NAME_BYTES):
        if name == "__metadata__":
            metadata = _metadata(scanner)
            continue
        names_bytes += len(name)
        if len(tensors) == MAX_TENSORS or names_bytes > MAX_NAMES_BYTES:
            fail(f"at most {MAX_TENSORS} tensors with {MAX_NAMES_BYTES} bytes of names", "more")
        entry = _usual_entry(scanner) or _unusual_entry(path, name, scanner)
        _check_entry(path, name, entry)
        tensors[name] = entry
    scanner.end()
    return tensors, metadata


def _metadata(scanner: Scanner) -> dict[str, str]:
    metadata: dict[str, str] = {}
    for key in scanner.members(MAX_NAME_BYTES):
        if len(metadata) == MAX_METADATA_KEYS:
            scanner.fail(f"at most {MAX_METADATA_KEYS} metadata keys", "more")
        metadata[key] = scanner.string(MAX_METADATA_BYTES)
    return metadata


def _usual_entry(scanner: Scanner) -> TensorEntry | None:
    """The entry that stands here, or None, with nothing consumed, when it is not three plain fields."""
    if scanner.peek() != b"{":
        return None
    position = scanner.position + 1
    dtype = shape = begin = end = None
    for follower in (b",", b",", b"}"):
        field = _FIELD.match(scanner.text, position)
        if field is None or field.group(5) != follower:
            return None
        position = field.end()
        dtype, shape = field.group(1) or dtype, shape if field.group(2) is None else field.group(2)
        begin, end = (begin, end) if field.group(3) is None else field.group(3, 4)
    if dtype is None or shape is None or begin is None or end is None:
        return None  # a field is there twice
    scanner.position = position
    sizes = tuple(map(int, shape.split(b","))) if shape else ()
    return TensorEntry(sys.intern(dtype.decode()), sizes, int(begin), int(end))


def _unusual_entry(path: Path, name: str, scanner: Scanner) -> TensorEntry:
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None
    for key in scanner.members(MAX_NAME_BYTES):
        if key == "dtype":
            dtype = scanner.string(64)
        elif key == "shape":
            shape = scanner.integers(MAX_RANK)
        elif key == "data_offsets":
            offsets = scanner.integers(2)
        else:
            scanner.fail(f"dtype, shape and data_offsets for {name!r}", repr(key))
    if dtype is None or shape is None or offsets is None or len(offsets) != 2:
        _refuse(path, f"dtype, shape and two data_offsets for {name!r}", "an incomplete entry")
    return TensorEntry(dtype, shape, *offsets)


def _check_entry(path: Path, name: str, entry: TensorEntry) -> None:
    bits = DTYPE_BITS.get(entry.dtype)
    if bits is None:
        _refuse(path, f"{name}: a dtype among {', '.join(DTYPE_BITS)}", entry.dtype)
    if not 0 <= entry.begin <= entry.end:
        _refuse(path, f"{name}: data_offsets [begin, end] with 0 <= begin <= end", f"[{entry.begin}, {entry.end}]")
    elements = math.prod(entry.shape)
    if min(entry.shape, default=0) < 0:
        _refuse(path, f"{name}: sizes of at least 0", str(list(entry.shape)))
    # A size of zero must not hide the others: 2**32 * 2**32 * 0 overflows in readers that multiply in order.
    if (elements or math.prod(size or 1 for size in entry.shape)) > _MAX_ELEMENTS:
        _refuse(path, f"{name}: at most 2**63 - 1 elements", str(list(entry.shape)))
    if elements * bits != 8 * (entry.end - entry.begin):
        allowed = f"{name}: {elements * bits / 8:g} bytes for {entry.dtype} {list(entry.shape)}"
        _refuse(path, allowed, f"{entry.end - entry.begin} bytes")


def _check_tiling(path: Path, tensors: dict[str, TensorEntry], data_start: int, file_size: int) -> None:
    end, last = 0, "the start of the data"
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            kind = "a hole" if entry.begin > end else "an overlap"
            _refuse(path, f"{name} to start at byte {end}, after {last}", f"byte {entry.begin}, {kind}")
        end, last = entry.end, name
    if data_start + end != file_size:
        do = "download it again; it is truncated" if data_start + end > file_size else "download it again"
        raise ShardError(message(str(path), allowed=f"{data_start + end} bytes", got=f"{file_size} bytes", do=do))

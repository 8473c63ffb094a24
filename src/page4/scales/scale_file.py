"""Scale files: safetensors with one F32 number of shape [] for each tensor, the same bytes for the same scales."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn

from page4.checkpoint.header import TensorEntry, check_regular_file, read_header
from page4.errors import ScaleError, message

MAX_SCALE_FILE_BYTES = 64 << 20
_NUMBER_BYTES = 4


def scale_file_bytes(scales: Mapping[str, float]) -> bytes:
    """The file of `scales`, fp32 values by tensor name; names ascending, header padded to a multiple of 8 bytes."""
    names = sorted(scales)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for number, name in enumerate(names):
        offsets = [number * _NUMBER_BYTES, (number + 1) * _NUMBER_BYTES]
        header[name] = {"dtype": "F32", "shape": [], "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(struct.pack("<f", scales[name]) for name in names)


def read_scale_file(path: Path) -> dict[str, float]:
    """The scales of a file by name, as their fp32 values.

    Raises `ScaleError` naming the tensor that is not one finite positive F32 number, `CheckpointError` for a file that
    is no safetensors file.
    """
    size = check_regular_file(path)
    if size > MAX_SCALE_FILE_BYTES:
        _refuse(str(path), f"at most {MAX_SCALE_FILE_BYTES} bytes", f"{size} bytes")
    values = read_values(path)
    for name, value in values.items():
        if isinstance(value, str):
            _refuse(f"{path}: {name}", "one F32 number of shape []", value)
        if not (math.isfinite(value) and value > 0.0):
            _refuse(f"{path}: {name}", "a finite positive number", repr(value))
    return {name: value for name, value in values.items() if isinstance(value, float)}


def read_values(path: Path, names: Iterable[str] | None = None) -> dict[str, float | str]:
    """The numbers of a file (or of `names` in it), whatever they are; in words for another dtype or shape."""
    header = read_header(path)
    values: dict[str, float | str] = {}
    with path.open("rb") as file:
        for name in header.tensors if names is None else names:
            entry = header.tensors[name]
            file.seek(header.data_start + entry.begin)
            values[name] = _value(entry, file.read(_NUMBER_BYTES))
    return values


def _value(entry: TensorEntry, raw: bytes) -> float | str:
    if entry.dtype != "F32" or entry.shape not in ((), (1,)):
        return f"{entry.dtype} {list(entry.shape)}"
    return float(struct.unpack("<f", raw)[0])


def _refuse(what: str, allowed: str, got: str) -> NoReturn:
    raise ScaleError(message(what, allowed=allowed, got=got, do="get the pack again, or calibrate again"))

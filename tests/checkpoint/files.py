"""Raw safetensors bytes, good and bad, written without the package under test."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def raw_file(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """Length, header, data, as given."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def json_file(header: object, data: bytes = b"") -> bytes:
    return raw_file(json.dumps(header).encode(), data)


def entry(shape: list[Any], begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def good_file(tensors: Mapping[str, bytes]) -> bytes:
    """U8 vectors one after the other."""
    header, data = {}, b""
    for name, value in tensors.items():
        header[name] = entry([len(value)], len(data), len(data) + len(value), "U8")
        data += value
    return json_file(header, data)


def write_sharded(
    folder: Path, shards: Mapping[str, Mapping[str, bytes]], *, total_size: int | None = None
) -> dict[str, str]:
    """Good shards and their index; returns the weight map."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    for shard, tensors in shards.items():
        (folder / shard).write_bytes(good_file(tensors))
    size = sum(len(v) for tensors in shards.values() for v in tensors.values()) if total_size is None else total_size
    write_index(folder, weight_map, size)
    return weight_map


def write_index(folder: Path, weight_map: object, total_size: object = 0) -> None:
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

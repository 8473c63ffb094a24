"""Which checkpoint and which settings a calibration belongs to."""

from __future__ import annotations

import json
from typing import Any

from page4.checkpoint import Checkpoint
from page4.checkpoint.hashes import sha256_of_bytes, sha256_of_file


def base_identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """Digests of config.json, the index (None for a single file) and of every weight file and its header.

    Two checkpoints of one shape have the same headers, so only the digests of the whole files tell them apart.
    """
    shards = {}
    for name, (path, header) in sorted(checkpoint.shards.items()):
        with path.open("rb") as file:
            head = file.read(header.data_start)
        size = path.stat().st_size
        shards[name] = {
            "header_sha256": sha256_of_bytes(head), "sha256": sha256_of_file(path), "size_bytes": size
        }  # fmt: skip
    return {
        "config_sha256": sha256_of_file(checkpoint.folder / "config.json"),
        "index_sha256": checkpoint.index_sha256,
        "shards": shards,
    }


def digest_of(value: Any) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    return sha256_of_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())

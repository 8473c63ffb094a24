"""What binds scales to one base checkpoint: hashes of config and index, and a record of each shard.

Strength. A record holds the size of a shard, the SHA-256 of its header and of a sample of its data: the first and last
64 KiB and 64 pieces of 4 KiB between them (all of the data up to 384 KiB). Another training run, seed or revision
changes nearly every byte, so a sample tells it apart; an edit of a few bytes between the pieces is only found by the
SHA-256 of the whole shard. That one is recorded when it is cheap (a file that is copied or in a hub cache that names
blobs by it, or a base of at most 1 GiB in all) or when it is asked for, and is compared on demand.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, NoReturn

from pydantic import Field, field_validator, model_validator

from page4.checkpoint.documents import Record
from page4.checkpoint.hashes import CONFIG_NAME, OnBytes, config_sha256, sha256_of_file
from page4.checkpoint.header import ShardHeader, TensorEntry
from page4.checkpoint.index import Checkpoint
from page4.checkpoint.index_file import INDEX_NAME
from page4.errors import ScaleError, message

EDGE_BYTES = 64 << 10
PIECE_BYTES = 4 << 10
PIECES = 64
CHEAP_BYTES = 1 << 30
_BLOB_NAME = re.compile(r"[0-9a-f]{64}")

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ShardRecord(Record):
    """One weight file; `sha256` is None where it was not worth reading the file, `sample_sha256` where it was."""

    size_bytes: Annotated[int, Field(ge=0)]
    header_sha256: Sha256
    sample_sha256: Sha256 | None = None
    sha256: Sha256 | None = None

    @model_validator(mode="after")
    def _data(self) -> ShardRecord:
        if self.sample_sha256 is None and self.sha256 is None:
            raise ValueError("a sample_sha256 or a sha256 of the data")
        return self


class BaseRecord(Record):
    """A base checkpoint; packs of other makers hold `index_sha256` alone. It is None for a base without an index.

    `config_sha256` is of config.json, and `shards` maps file names to records.
    """

    index_sha256: Sha256 | None = None
    config_sha256: Sha256 | None = None
    tensors_sha256: Sha256 | None = None
    """Of the names, dtypes and shapes of all tensors, wherever they lie: tells a re-sharded base from another model."""
    shards: dict[str, ShardRecord] | None = None

    @field_validator("shards", mode="before")
    @classmethod
    def _ours(cls, value: object) -> object:
        """None for what another tool keeps under the same key."""
        entries = list(value.values()) if isinstance(value, dict) else [None]
        ours = all(
            isinstance(e, (dict, ShardRecord)) and {"size_bytes", "header_sha256"} <= set(dict(e)) for e in entries
        )
        return value if ours else None


def base_record(folder: Path, *, full: bool | None = None, on_bytes: OnBytes | None = None) -> BaseRecord:
    """The record of a base. `full` hashes whole shards: True always, False never, None when it is cheap.

    `on_bytes` hears of what is hashed whole.

    Raises `CheckpointError`.
    """
    checkpoint = Checkpoint.open(folder)
    shards = checkpoint.shards
    if full is None:
        full = sum(header.file_size for _, header in shards.values()) <= CHEAP_BYTES or None
    return BaseRecord(
        index_sha256=checkpoint.index_sha256,
        config_sha256=config_sha256(folder),
        tensors_sha256=tensors_sha256(checkpoint),
        shards={
            name: shard_record(path, header, full=full, on_bytes=on_bytes)
            for name, (path, header) in sorted(shards.items())
        },
    )


def tensors_sha256(checkpoint: Checkpoint) -> str:
    """The hash of every tensor's name, dtype and shape."""
    return hash_tensors((name, checkpoint.entry(name)) for name in checkpoint.names())


def hash_tensors(entries: Iterator[tuple[str, TensorEntry]]) -> str:
    """As `tensors_sha256`, of entries sorted by name."""
    digest = hashlib.sha256()
    for name, entry in entries:
        digest.update(json.dumps([name, entry.dtype, list(entry.shape)]).encode() + b"\n")
    return digest.hexdigest()


def shard_record(
    path: Path, header: ShardHeader, *, full: bool | None = False, on_bytes: OnBytes | None = None
) -> ShardRecord:
    """The record of one file; with `full` None, its whole hash only where a hub cache names the file by it."""
    whole = sha256_of_file(path, on_bytes) if full else None
    if full is None and path.parent.name == "blobs" and _BLOB_NAME.fullmatch(path.name):
        whole = path.name
    with path.open("rb") as file:
        head = hashlib.sha256(file.read(header.data_start)).hexdigest()
        sample = hashlib.sha256()
        for begin, size in _pieces(header.data_start, header.file_size):
            file.seek(begin)
            sample.update(file.read(size))
    return ShardRecord(size_bytes=header.file_size, header_sha256=head, sample_sha256=sample.hexdigest(), sha256=whole)


def _pieces(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Where the sample of the data in bytes `start` to `end` lies: (begin, size)."""
    if end - start <= 2 * EDGE_BYTES + PIECES * PIECE_BYTES:
        yield start, end - start
        return
    yield start, EDGE_BYTES
    free = end - start - 2 * EDGE_BYTES - PIECE_BYTES
    for piece in range(PIECES):
        yield start + EDGE_BYTES + free * piece // (PIECES - 1), PIECE_BYTES
    yield end - EDGE_BYTES, EDGE_BYTES


def check_base(record: BaseRecord, folder: Path, what: str) -> Checkpoint:
    """Refuse `folder` unless it is the base that `record` describes, and open it; `what` says whose record it is.

    Compares what the record holds, whole shard hashes apart. Raises `ScaleError` or, when the folder is no readable
    checkpoint, `CheckpointError`.
    """
    if record.index_sha256 is None and not record.shards:
        _refuse(what, "an index_sha256 or records of the shards", "neither", "use a pack that names its base")
    checkpoint = Checkpoint.open(folder)
    if checkpoint.index_sha256 != record.index_sha256:
        resharded = record.tensors_sha256 == tensors_sha256(checkpoint)
        got = f"{INDEX_NAME} with SHA-256 {checkpoint.index_sha256}" if checkpoint.index_sha256 else f"no {INDEX_NAME}"
        got += ": re-sharded, the same names, dtypes and shapes lie in other files" if resharded else ""
        allowed = f"a base with index SHA-256 {record.index_sha256}" if record.index_sha256 else f"no {INDEX_NAME}"
        _refuse(f"{what}: {folder}", allowed, got, _REVISION)
    if record.config_sha256 is not None and (found := config_sha256(folder)) != record.config_sha256:
        _refuse(f"{what}: {folder / CONFIG_NAME}", f"SHA-256 {record.config_sha256}", found, _REVISION)
    if record.shards is not None:
        check_shards(record.shards, checkpoint.shards, f"{what}: {folder}")
    return checkpoint


_REVISION = "use the revision that the scales were made for"


def check_shards(
    records: dict[str, ShardRecord],
    shards: dict[str, tuple[Path, ShardHeader]],
    what: str,
    *,
    except_for: Collection[Path] = (),
) -> None:
    """Refuse shards that are not exactly the recorded ones; paths in `except_for` are known to be good.

    Raises `ScaleError`.
    """
    if records.keys() != shards.keys():
        _refuse(what, f"the shards {sorted(records)}", str(sorted(shards)), _REVISION)
    for name, record in records.items():
        if shards[name][0] not in except_for:
            check_shard(record, *shards[name], what)


def check_shard(record: ShardRecord, path: Path, header: ShardHeader, what: str) -> None:
    """Refuse a shard that differs in size, header or sample; without a sample, in its whole. Raises `ScaleError`."""
    sampled = record.sample_sha256 is not None
    found = shard_record(path, header, full=not sampled)
    for field in ("size_bytes", "header_sha256", "sample_sha256" if sampled else "sha256"):
        allowed, got = getattr(record, field), getattr(found, field)
        if allowed != got:
            _refuse(f"{what}: {path}", f"{field} {allowed}", f"{got}, another checkpoint of the same shape", _REVISION)


def _refuse(what: str, allowed: str, got: str, do: str) -> NoReturn:
    raise ScaleError(message(what, allowed=allowed, got=got, do=do))

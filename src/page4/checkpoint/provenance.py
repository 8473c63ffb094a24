"""`kvscales-provenance.json`: where the scales of an overlay came from, and the base that they belong to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from page4._scale_math import to_fp32
from page4.checkpoint.documents import Document, Record, parse_document, read_bounded
from page4.checkpoint.hashes import sha256_of_bytes
from page4.checkpoint.identity import BaseRecord, Sha256, ShardRecord
from page4.checkpoint.paths import check_shard_name, resolve_inside
from page4.checkpoint.scale_names import Naming, Side
from page4.errors import DocumentError, PathEscapeError, message

PROVENANCE_NAME = "kvscales-provenance.json"
TARGET_NAME = "model-kvscales.safetensors"
DRAFT_NAME = "model-kvscales-mtp.safetensors"
PROTOTYPE = "prototype:"

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class OverlayBase(BaseRecord):
    """The base, and its path from the overlay; None when its files were copied."""

    path: str | None
    config_sha256: Sha256
    tensors_sha256: Sha256
    shards: dict[str, ShardRecord]

    @field_validator("path")
    @classmethod
    def _relative(cls, path: str | None) -> str | None:
        if path is not None and (not path or not path.isprintable() or Path(path).is_absolute()):
            raise ValueError("a relative path")
        return path

    @field_validator("shards")
    @classmethod
    def _plain(cls, shards: dict[str, ShardRecord]) -> dict[str, ShardRecord]:
        for name in shards:
            _plain_name(name)
        return shards


class PackSource(Record):
    """The pack that the target's scales came from."""

    artifact_id: str
    manifest_sha256: Sha256
    scale_file_sha256: Sha256


class ScaleFileRecord(Record):
    """A scale file of the overlay; `source` is published, envelope, report or `prototype:...`."""

    filename: str
    sha256: Sha256
    tensor_count: int
    tensor_names: list[str]
    source: str

    @field_validator("filename")
    @classmethod
    def _plain(cls, filename: str) -> str:
        return _plain_name(filename)


class ScaleRecord(Record):
    """One scale: its value, the largest magnitude behind it where known, and where it came from."""

    name: str
    layer: int
    kind: Side
    scale: Positive
    max_abs: Positive | None
    origin: str

    @field_validator("scale")
    @classmethod
    def _fp32(cls, scale: float) -> float:
        if to_fp32(scale) != scale:
            raise ValueError("an fp32 number")
        return scale


class KVFormat(Record):
    """How the scales are to be used."""

    dtype: Literal["float8_e4m3fn"] = "float8_e4m3fn"
    rule: str = "x = q * scale, one fp32 scale for each layer and side"


class Provenance(Document):
    """The whole record. `files` lists everything that was carried over from the base, by relative path."""

    kind: Literal["page4-kvscales-provenance"] = "page4-kvscales-provenance"
    page4_version: str
    mode: Literal["links", "copy"]
    naming: Naming
    kv_format: KVFormat
    target_layers: list[int]
    draft_layers: list[int]
    index_sha256: Sha256
    base: OverlayBase
    pack: PackSource
    target_report_sha256: Sha256 | None
    draft_report_sha256: Sha256 | None
    target: ScaleFileRecord
    draft: ScaleFileRecord | None
    scales: list[ScaleRecord]
    files: list[str]
    self_sha256: Sha256
    """Of the JSON of everything else, keys sorted and without spaces: finds edits of what nothing else can confirm."""

    def digest(self) -> str:
        """What `self_sha256` has to be."""
        content = self.model_dump(mode="json", exclude={"self_sha256"})
        return sha256_of_bytes(json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())

    def sealed(self) -> Provenance:
        """The same with its `self_sha256`."""
        return self.model_copy(update={"self_sha256": self.digest()})

    @property
    def scale_files(self) -> tuple[ScaleFileRecord, ...]:
        """The one or two scale files."""
        return (self.target,) if self.draft is None else (self.target, self.draft)

    @property
    def prototypes(self) -> tuple[str, ...]:
        """Names of the scales that no calibration stands behind, with their origin."""
        return tuple(f"{s.name} ({s.origin})" for s in self.scales if s.origin.startswith(PROTOTYPE))

    @field_validator("files")
    @classmethod
    def _inside(cls, files: list[str]) -> list[str]:
        for name in files:
            if not name.isprintable() or Path(name).is_absolute() or {"", ".", ".."} & set(name.split("/")):
                raise ValueError("paths inside the folder")
        return files


def _plain_name(name: str) -> str:
    try:
        return check_shard_name(name)
    except PathEscapeError as error:
        raise ValueError(str(error)) from None


def read_provenance(folder: Path) -> Provenance:
    """The provenance of an overlay. Raises `DocumentError`, `PathEscapeError`."""
    provenance = read_unsealed(folder)
    if (found := provenance.digest()) != provenance.self_sha256:
        allowed, do = f"{found}, the hash of the rest", "restore the file, or build the overlay again"
        text = message(f"{folder / PROVENANCE_NAME}: self_sha256", allowed=allowed, got=provenance.self_sha256, do=do)
        raise DocumentError(text, "hash")
    return provenance


def read_unsealed(folder: Path) -> Provenance:
    """As `read_provenance`, whatever its own hash says."""
    path = resolve_inside(folder, PROVENANCE_NAME)
    return parse_document(read_bounded(path), path, Provenance)


def is_overlay(folder: Path) -> bool:
    """Whether a folder says, or once said, that it is an overlay: one of the files that only overlays hold is there."""
    return any(os.path.lexists(folder / name) for name in (PROVENANCE_NAME, TARGET_NAME, DRAFT_NAME))

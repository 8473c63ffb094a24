"""The interchange files: pack manifest, calibration report, provenance. Unknown keys stay, unknown versions do not."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, Field, field_validator

from page4.checkpoint.documents import Document, Record, document_bytes, read_document
from page4.checkpoint.identity import BaseRecord, Sha256, ShardRecord
from page4.checkpoint.paths import check_shard_name
from page4.checkpoint.provenance import Positive, Provenance, read_provenance
from page4.checkpoint.scale_names import Side
from page4.errors import PathEscapeError

MANIFEST_NAME = "kvscales-manifest.json"
REPORT_NAME, REPORT_KIND = "calibration-report.json", "page4-calibration-report"
MAX_TENSORS = 16_384

__all__ = [
    "MANIFEST_NAME",
    "REPORT_KIND",
    "REPORT_NAME",
    "BaseRecord",
    "CalibrationReport",
    "PackManifest",
    "PackTensor",
    "Provenance",
    "ReportTensor",
    "ScaleFileEntry",
    "ShardRecord",
    "document_bytes",
    "read_document",
    "read_provenance",
]

Count = Annotated[int, Field(ge=0)]


class ScaleFileEntry(Record):
    """The scale file of a pack."""

    filename: str
    sha256: Sha256
    tensor_count: int
    tensor_names: Annotated[list[str], Field(max_length=MAX_TENSORS)]

    @field_validator("filename")
    @classmethod
    def _plain(cls, filename: str) -> str:
        try:
            return check_shard_name(filename)
        except PathEscapeError as error:
            raise ValueError(str(error)) from None


class PackTensor(Record):
    """One scale of a pack: the largest magnitude that was seen, and the scale where the manifest repeats it."""

    layer: Count
    kind: Side
    max_abs: Positive
    scale: Positive | None = None


class PackManifest(Document):
    """`kvscales-manifest.json`."""

    artifact_id: str
    base_checkpoint: BaseRecord
    scale_file: ScaleFileEntry
    tensors: Annotated[list[PackTensor], Field(max_length=MAX_TENSORS)]


class ReportTensor(Record):
    """What calibration says of one layer and side."""

    max_abs: Positive
    scale: Positive | None = None
    token_count: Count | None = Field(default=None, validation_alias=AliasChoices("token_count", "tokens"))


class CalibrationReport(Document):
    """A calibration report: `tensors` maps `model.layers.N.self_attn.{k,v}_scale`, draft N = num_hidden_layers.

    Only `tensors` must be there. `rule` is how a scale follows from what was seen; None is absmax.
    """

    version_required: ClassVar[bool] = False

    kind: Literal["page4-calibration-report"] = "page4-calibration-report"
    rule: Any = None
    base_checkpoint: BaseRecord | None = None
    counted_forwards: Count | None = None
    tensors: Annotated[dict[str, ReportTensor], Field(max_length=MAX_TENSORS)]

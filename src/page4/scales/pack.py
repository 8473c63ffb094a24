"""`page4 scales pack`: a calibration report becomes a scale pack that names its base."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from page4.checkpoint.hashes import sha256_of_bytes
from page4.checkpoint.identity import BaseRecord, base_record
from page4.checkpoint.provenance import TARGET_NAME
from page4.checkpoint.scale_names import written_name
from page4.scales.base_files import Base, read_base
from page4.scales.choice import Choices, target_places
from page4.scales.reports import Report, measured, read_report
from page4.scales.scale_file import scale_file_bytes
from page4.scales.schema import MANIFEST_NAME, PackManifest, PackTensor, ScaleFileEntry, document_bytes
from page4.scales.staging import check_target, staged


@dataclass(frozen=True)
class PackSummary:
    """What was written."""

    folder: Path
    artifact_id: str
    tensor_count: int
    notes: tuple[str, ...]


def make_pack(report: Path, base: Path, out: Path, *, force: bool = False) -> PackSummary:
    """Write a pack of the target's scales to the new folder `out`.

    Raises `ScaleError` for a report that saw nothing, lacks a layer or belongs to another base, `CheckpointError` for
    an unusable base, `UsageError` for a target that may not be written; before anything is written.
    """
    check_target(out, force=force, apart_from=(base, report))
    opened = read_base(base)
    loaded = read_report(report, opened.folder, opened.geometry)
    choices = measured(loaded, target_places(opened.geometry), opened.geometry)
    record = base_record(opened.folder, full=False)
    names = {place: written_name(*place, opened.geometry, prefix=opened.prefix, naming="qsa") for place in choices}
    data = scale_file_bytes({names[place]: choice.value for place, choice in choices.items()})
    manifest = _manifest(opened, loaded, choices, list(names.values()), record, data)
    with staged(out, force=force, apart_from=(base, report)) as stage:
        stage.write(TARGET_NAME, data)
        stage.write(MANIFEST_NAME, document_bytes(manifest))
    unbound = "the report names no base; the pack is bound to the one given here"
    notes = (unbound,) if loaded.content.base_checkpoint is None else ()
    return PackSummary(out, manifest.artifact_id, len(choices), notes)


def _manifest(
    base: Base, report: Report, choices: Choices, names: list[str], record: BaseRecord, data: bytes
) -> PackManifest:
    identity = hashlib.sha256(data + document_bytes(record)).hexdigest()
    tensors = [
        PackTensor.model_validate(
            {
                "layer": layer,
                "kind": side,
                "max_abs": choice.max_abs,
                "scale": choice.value,
                "name": written_name(layer, side, base.geometry, prefix=base.prefix, naming="qsa"),
            }
        )
        for (layer, side), choice in choices.items()
    ]
    entry = ScaleFileEntry(
        filename=TARGET_NAME, sha256=sha256_of_bytes(data), tensor_count=len(names), tensor_names=sorted(names)
    )
    extra = {"rule": report.content.rule or "absmax", "report_sha256": report.sha256}
    return PackManifest.model_validate(
        {
            "schema_version": 1,
            "artifact_id": f"kvscales-{identity[:16]}",
            "kv_format": {"dtype": "float8_e4m3fn", "rule": "x = q * scale, one fp32 scale for each layer and side"},
            "base_checkpoint": record,
            "scale_file": entry,
            "tensors": tensors,
            **extra,
        }
    )

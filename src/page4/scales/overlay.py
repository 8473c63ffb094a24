"""`page4 scales overlay`: links to a base, a new index, the scale files and their provenance, in one new folder."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import page4
from page4.checkpoint.hashes import OnBytes, sha256_of_bytes
from page4.checkpoint.identity import BaseRecord, base_record, check_base
from page4.checkpoint.index_file import INDEX_NAME
from page4.checkpoint.provenance import (
    DRAFT_NAME,
    PROVENANCE_NAME,
    TARGET_NAME,
    KVFormat,
    OverlayBase,
    PackSource,
    Provenance,
    ScaleFileRecord,
    ScaleRecord,
)
from page4.checkpoint.scale_names import Naming, Side, written_name
from page4.scales.base_files import Base, read_base
from page4.scales.choice import Choices
from page4.scales.packs import Pack, read_pack
from page4.scales.reports import Report
from page4.scales.scale_file import scale_file_bytes
from page4.scales.schema import document_bytes
from page4.scales.sources import Resolved, Sources, check_sources, resolve_sources
from page4.scales.staging import Stage, check_target, staged

_SCALE_BYTES = 4


@dataclass(frozen=True)
class OverlaySummary:
    """What was written; `prototypes` names the scales that no calibration stands behind."""

    folder: Path
    target_count: int
    draft_count: int
    carried_files: int
    prototypes: tuple[str, ...]


@dataclass(frozen=True)
class _Plan:
    """Everything that will be written, decided before the first byte."""

    base: Base
    pack: Pack
    resolved: Resolved
    naming: Naming
    target_data: bytes
    draft_data: bytes | None
    index_data: bytes

    def name(self, layer: int, side: Side) -> str:
        return written_name(layer, side, self.base.geometry, prefix=self.base.prefix, naming=self.naming)


def build_overlay(
    base: Path,
    pack: Path,
    out: Path,
    sources: Sources,
    *,
    naming: Naming = "qsa",
    copy: bool = False,
    force: bool = False,
    full: bool | None = None,
    on_bytes: OnBytes | None = None,
) -> OverlaySummary:
    """Write the overlay of `base` with the scales of `pack` and of the draft source to the new folder `out`.

    `copy` copies the base's files instead of linking them. `full` records the SHA-256 of whole shards: True always,
    False never, None where that is cheap or the shards are copied anyway. `on_bytes` hears of what is hashed or copied.

    Raises `ScaleError`, `CheckpointError`, `UsageError`, before anything is written, when base, pack and reports do not
    belong together or `out` may not be written.
    """
    read_from = (base, pack, *sources.files)
    check_target(out, force=force, apart_from=read_from)
    opened = read_base(base)
    check_sources(sources, has_draft=opened.has_draft)
    read = read_pack(pack)
    check_base(read.manifest.base_checkpoint, opened.folder, f"PACK {pack}")
    plan = _plan(opened, read, resolve_sources(sources, read, opened.folder, opened.geometry), naming)
    record = base_record(opened.folder, full=full, on_bytes=on_bytes)
    with staged(out, force=force, apart_from=read_from) as stage:
        target = Path(os.path.realpath(out.parent)) / out.name
        hashes = _carry(stage, target, opened, copy=copy, on_bytes=on_bytes)
        provenance = _provenance(plan, _bound(record, opened, None if copy else target, hashes))
        stage.write(TARGET_NAME, plan.target_data)
        if plan.draft_data is not None:
            stage.write(DRAFT_NAME, plan.draft_data)
        stage.write(INDEX_NAME, plan.index_data)
        stage.write(PROVENANCE_NAME, document_bytes(provenance))
    resolved = plan.resolved
    return OverlaySummary(
        out, len(resolved.target), len(resolved.draft), len(opened.files), tuple(provenance.prototypes)
    )


def _plan(base: Base, pack: Pack, resolved: Resolved, naming: Naming) -> _Plan:
    def named(choices: Choices) -> dict[str, float]:
        return {
            written_name(*place, base.geometry, prefix=base.prefix, naming=naming): choice.value
            for place, choice in choices.items()
        }

    target, draft = named(resolved.target), named(resolved.draft)
    weight_map = {name: base.checkpoint.shard(name) for name in base.checkpoint.names()}
    sizes = [entry.end - entry.begin for entry in map(base.checkpoint.entry, weight_map)]
    total_size = sum(sizes) + _SCALE_BYTES * (len(target) + len(draft))
    weight_map |= dict.fromkeys(target, TARGET_NAME) | dict.fromkeys(draft, DRAFT_NAME)
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return _Plan(
        base=base,
        pack=pack,
        resolved=resolved,
        naming=naming,
        target_data=scale_file_bytes(target),
        draft_data=scale_file_bytes(draft) if draft else None,
        index_data=json.dumps(index, indent=2).encode() + b"\n",
    )


def _carry(stage: Stage, target: Path, base: Base, *, copy: bool, on_bytes: OnBytes | None) -> dict[str, str]:
    """Links or copies of the base's files; the SHA-256 of each copy."""
    hashes: dict[str, str] = {}
    for name, source in base.files.items():
        if copy:
            hashes[name] = stage.copy(name, source, on_bytes)
        else:
            stage.link(name, os.path.relpath(base.folder / name, (target / name).parent))
    return hashes


def _bound(record: BaseRecord, base: Base, target: Path | None, hashes: dict[str, str]) -> OverlayBase:
    """The base as the overlay at `target` sees it; with copies, their hashes and no path."""
    content = record.model_dump()
    for name, shard in content["shards"].items():
        shard["sha256"] = hashes.get(name, shard["sha256"])
    return OverlayBase.model_validate({**content, "path": target and os.path.relpath(base.folder, target)})


def _provenance(plan: _Plan, base: OverlayBase) -> Provenance:
    resolved, geometry = plan.resolved, plan.base.geometry
    choices = {**resolved.target, **resolved.draft}
    names = {place: plan.name(*place) for place in choices}
    manifest = plan.pack.manifest
    source = "published" if resolved.target_report is None else "envelope"
    target = _file(TARGET_NAME, plan.target_data, [names[place] for place in resolved.target], source)
    draft = None
    if plan.draft_data is not None:
        draft = _file(DRAFT_NAME, plan.draft_data, [names[place] for place in resolved.draft], resolved.draft_source)
    return Provenance(
        page4_version=page4.__version__,
        mode="links" if base.path else "copy",
        naming=plan.naming,
        kv_format=KVFormat(),
        target_layers=list(geometry.qsa_layers),
        draft_layers=sorted({layer for layer, _ in resolved.draft}),
        index_sha256=sha256_of_bytes(plan.index_data),
        base=base,
        pack=PackSource(
            artifact_id=manifest.artifact_id,
            manifest_sha256=plan.pack.manifest_sha256,
            scale_file_sha256=manifest.scale_file.sha256,
        ),
        target_report_sha256=_sha256(resolved.target_report),
        draft_report_sha256=_sha256(resolved.draft_report),
        target=target,
        draft=draft,
        scales=[
            ScaleRecord(
                name=names[layer, side],
                layer=layer,
                kind=side,
                scale=choice.value,
                max_abs=choice.max_abs,
                origin=choice.origin,
            )
            for (layer, side), choice in choices.items()
        ],
        files=sorted(plan.base.files),
        self_sha256="0" * 64,
    ).sealed()


def _file(filename: str, data: bytes, names: list[str], source: str) -> ScaleFileRecord:
    return ScaleFileRecord(
        filename=filename,
        sha256=sha256_of_bytes(data),
        tensor_count=len(names),
        tensor_names=sorted(names),
        source=source,
    )


def _sha256(report: Report | None) -> str | None:
    return None if report is None else report.sha256

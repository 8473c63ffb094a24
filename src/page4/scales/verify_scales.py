"""Scales of an overlay: two for each layer with a K/V cache, finite, positive, and those of the provenance."""

from __future__ import annotations

import math
from pathlib import Path

from page4.checkpoint import classify
from page4.checkpoint.provenance import PROVENANCE_NAME, Provenance
from page4.checkpoint.scale_names import place
from page4.errors import ScaleError
from page4.geometry import Geometry
from page4.scales.choice import Place, describe, draft_places, target_places
from page4.scales.faults import Findings
from page4.scales.scale_file import read_values
from page4.scales.verify_shards import Headers
from page4.scales.view import View

_MAX_SCALES = 16_384


def check_scales(view: View, provenance: Provenance | None, geometry: Geometry | None, headers: Headers) -> None:
    """Coverage, types and values of every scale tensor in the weight files."""
    findings = view.findings
    values: dict[str, float | str] = {}
    names: list[str] = []
    for shard, (path, header) in headers.items():
        scales = [name for name in header.tensors if classify(name).kind == "scale"]
        names += scales
        if scales:
            values |= _read(findings, shard, path, scales)
    for name, value in values.items():
        if isinstance(value, str):
            findings.add("scale-type", name, value)
        elif not (math.isfinite(value) and value > 0.0):
            findings.add("scale-value", name, repr(value))
    if geometry is not None:
        drafted = any(name.startswith("mtp.") for _, header in headers.values() for name in header.tensors)
        _check_places(findings, names, geometry, drafted=drafted)
        if provenance is not None:
            _check_layers(findings, provenance, geometry)
    if provenance is not None:
        _check_records(findings, provenance, values)


def _read(findings: Findings, shard: str, path: Path, scales: list[str]) -> dict[str, float | str]:
    if len(scales) > _MAX_SCALES:
        findings.add("scale-extra", shard, f"{len(scales)} scale tensors")
        return {}
    found = read_values(path, scales)
    return {name: found[name] for name in scales}


def _check_places(findings: Findings, names: list[str], geometry: Geometry, *, drafted: bool) -> None:
    found: dict[Place, str] = {}
    for name in names:
        try:
            layer, sides = place(name, geometry)
        except ScaleError as error:
            findings.add("scale-extra", name, error)
            continue
        for side in sides:
            if (layer, side) in found:
                findings.add("scale-twice", name, f"also {found[layer, side]}")
            found[layer, side] = name
    target = target_places(geometry)
    draft = draft_places(geometry) if drafted else []
    for wanted in (*target, *draft):
        if wanted not in found:
            findings.add("scale-missing", describe([wanted], geometry), "nothing")
    findings.counts["target_scales"] = sum(wanted in found for wanted in target)
    findings.counts["draft_scales"] = sum(wanted in found for wanted in draft_places(geometry))


def _check_layers(findings: Findings, provenance: Provenance, geometry: Geometry) -> None:
    if provenance.target_layers != list(geometry.qsa_layers):
        got = f"target_layers {provenance.target_layers}, config.json gives {list(geometry.qsa_layers)}"
        findings.add("provenance-invalid", PROVENANCE_NAME, got)
    if provenance.draft_layers not in ([], [geometry.draft_layer]):
        got = f"draft_layers {provenance.draft_layers}, config.json gives [{geometry.draft_layer}]"
        findings.add("provenance-invalid", PROVENANCE_NAME, got)


def _check_records(findings: Findings, provenance: Provenance, values: dict[str, float | str]) -> None:
    for record in provenance.scales:
        value = values.get(record.name)
        if value is not None and value != record.scale:
            findings.add("scale-record", record.name, f"{value!r}, the provenance has {record.scale!r}")

"""Reads calibration reports for the checkpoint that they are to be used with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from page4._scale_math import scale_of, to_fp32
from page4.checkpoint.documents import parse_document, read_bounded
from page4.checkpoint.hashes import sha256_of_bytes
from page4.checkpoint.identity import check_base
from page4.checkpoint.scale_names import report_place
from page4.errors import ScaleError, message
from page4.geometry import Geometry
from page4.scales.choice import Choice, Choices, Place, check_coverage, describe
from page4.scales.schema import REPORT_NAME, CalibrationReport, ReportTensor

ABSMAX = "absmax"
# A report may print fewer digits of a scale than fp32 has; more than this is another rule.
_SAME = 1e-5


@dataclass(frozen=True)
class Report:
    """A report that was measured on this base: what it says of each layer and side."""

    path: Path
    sha256: str
    content: CalibrationReport
    tensors: dict[Place, ReportTensor]


def read_report(path: Path, base: Path, geometry: Geometry) -> Report:
    """Read a report (or the one in a folder) and refuse it unless it is one of `base`.

    Raises `ScaleError`, `CheckpointError`.
    """
    path = path / REPORT_NAME if path.is_dir() else path
    text = read_bounded(path)
    content = parse_document(text, path, CalibrationReport)
    if content.counted_forwards == 0:
        _refuse(f"{path}: counted_forwards", "at least 1", "0", "calibrate with prompts")
    tensors: dict[Place, ReportTensor] = {}
    for name, tensor in content.tensors.items():
        layer, sides = report_place(name, geometry)
        for side in sides:
            if (layer, side) in tensors:
                _refuse(f"{path}: {name}", "one entry for each layer and side", "two", _AGAIN)
            tensors[layer, side] = tensor
    if content.base_checkpoint is not None:
        check_base(content.base_checkpoint, base, f"report {path}")
    return Report(path, sha256_of_bytes(text), content, tensors)


_AGAIN = "calibrate this checkpoint again"


def measured(report: Report, wanted: list[Place], geometry: Geometry) -> Choices:
    """The scales of `wanted` by the report's rule; each must have seen the same tokens. Raises `ScaleError`."""
    found: list[Place] = [place for place in report.tensors if place in wanted]
    check_coverage(found, wanted, geometry, f"report {report.path}")
    counts = {place: report.tensors[place].token_count for place in wanted}
    if len(set(counts.values())) > 1 or 0 in counts.values():
        got = ", ".join(f"{describe([place], geometry)}: {count}" for place, count in counts.items())
        _refuse(f"{report.path}: token_count", "one count above 0 for every layer and side", got, _AGAIN)
    return {place: _choice(report, place, geometry) for place in wanted}


def _choice(report: Report, place: Place, geometry: Geometry) -> Choice:
    tensor = report.tensors[place]
    what = f"{report.path}: {describe([place], geometry)}"
    clips = report.content.rule not in (None, ABSMAX)
    value = to_fp32(tensor.scale) if clips and tensor.scale is not None else scale_of(tensor.max_abs)
    if not (math.isfinite(value) and value > 0.0):
        _refuse(what, "a finite positive fp32 scale", repr(tensor.scale or tensor.max_abs), _AGAIN)
    if tensor.scale is not None and abs(tensor.scale - value) > max(_SAME * value, 2.0**-149):
        allowed = f"scale {value!r}, which is max_abs {tensor.max_abs!r} / 448"
        _refuse(what, allowed, repr(tensor.scale), "name the rule of the report, or calibrate again")
    return Choice(value, tensor.max_abs, "report")


def _refuse(what: str, allowed: str, got: str, do: str) -> NoReturn:
    raise ScaleError(message(what, allowed=allowed, got=got, do=do))

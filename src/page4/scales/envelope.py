"""envelope: one report's distribution, with the largest max_abs of several reports for each tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from page4.checkpoint.hashes import sha256_of_file
from page4.errors import ScaleError, UsageError, message
from page4.scales.files import json_bytes, make_folder, write_whole
from page4.scales.report import read_report
from page4.scales.schema import REPORT_NAME


def write_envelope(reports: Sequence[Path], out: Path, *, restart: bool = False) -> dict[str, Any]:
    """Write the envelope of report files (or of folders with one) as `out/calibration-report.json`.

    Raises `ScaleError` when they are of different base checkpoints, rules or tensors, `UsageError` for fewer than two
    or an `out` that has a report (unless `restart`).
    """
    if len(reports) < 2:
        do = "name the reports to put together"
        raise UsageError(message("envelope", allowed="at least two reports", got=len(reports), do=do))
    files = [path / REPORT_NAME if path.is_dir() else path for path in reports]
    merged = envelope([read_report(path) for path in files], [sha256_of_file(path) for path in files])
    target = out / REPORT_NAME
    if target.exists() and not restart:
        do = "choose another --out, or --restart to replace it"
        raise UsageError(message(f"--out {out}", allowed="a folder without a report", got="a report", do=do))
    make_folder(out)
    write_whole(target, json_bytes(merged))
    return merged


def envelope(reports: Sequence[Mapping[str, Any]], digests: Sequence[str]) -> dict[str, Any]:
    """The first report with every tensor at its largest; `digests` are the SHA-256 of the report files."""
    first = reports[0]
    for number, report in enumerate(reports[1:], start=2):
        _check_alike(first, report, number)
    tensors = {name: _largest([report["tensors"][name] for report in reports], digests) for name in first["tensors"]}
    return {**first, "envelope": {"reports": list(digests)}, "tensors": tensors}


def _check_alike(first: Mapping[str, Any], other: Mapping[str, Any], number: int) -> None:
    for key in ("base_checkpoint", "rule"):
        if other.get(key) != first.get(key):
            got = _first_difference(first.get(key), other.get(key))
            do = "put together reports of one checkpoint and one rule"
            raise ScaleError(message(f"report {number} {key}", allowed="that of report 1", got=got, do=do))
    odd = sorted(set(first["tensors"]) ^ set(other["tensors"]))
    if odd:
        do = "calibrate the same layers"
        got = f"a difference in {', '.join(odd)}"
        raise ScaleError(message(f"report {number} tensors", allowed="those of report 1", got=got, do=do))


def _first_difference(first: Any, other: Any) -> str:
    if isinstance(first, Mapping) and isinstance(other, Mapping):
        odd = [key for key in sorted({*first, *other}) if first.get(key) != other.get(key)]
        return f"another {', '.join(odd)}"
    return f"{other!r} instead of {first!r}"


def _largest(tensors: Sequence[Mapping[str, Any]], digests: Sequence[str]) -> dict[str, Any]:
    """The first report's tensor with the largest max_abs and scale of all; which report they came from.

    What depends on the scale and cannot be known without the distribution of the others is None: the error, and the
    clips unless the scale is the first's own.
    """
    first = tensors[0]
    values = [tensor["max_abs"] for tensor in tensors]
    scales = [tensor["scale"] for tensor in tensors]
    origin = values.index(max(values))
    merged = {
        **first,
        "max_abs": values[origin],
        "origin": {"report": origin + 1, "report_sha256": digests[origin]},
        "scale": max(scales),
        "spread": (max(values) - min(values)) / max(values),
    }
    if merged["scale"] != first["scale"]:
        kept = not first.get("clipped")  # what a smaller scale did not clip, a larger one does not either
        merged |= {"mse": None, "clipped": 0 if kept else None, "clip_rate": 0.0 if kept else None}
    return merged

"""The calibration report: one JSON file that says nothing but what the samples and the checkpoint determine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from page4.checkpoint.documents import parse_object, read_bounded
from page4.errors import ScaleError, message
from page4.scales.kv_statistics import KvStatistics, Place, merge_all
from page4.scales.observe import tensor_name
from page4.scales.partial import Shard
from page4.scales.rules import Rule, curve_scales
from page4.scales.schema import REPORT_KIND, REPORT_NAME

RUN_NAME = "calibration-run.json"
SCHEMA_VERSION = 1
PERCENTILES = ("50", "90", "99", "99.9", "99.99", "99.999")
# How far max_abs may move when requests share batches, or with more threads: the rounding of sums, carried through the
# layers. The embedded checkpoint's own samples, 8 a batch against 1: float32 4.6e-7, float16 6.2e-4, bfloat16 7.1e-3.
ROUNDING = {"float32": 1e-5, "float16": 2.0**-8, "bfloat16": 2.0**-5}


def build_report(
    *, settings: Mapping[str, Any], samples: Mapping[str, Any], shards: Sequence[Shard], run: str
) -> dict[str, Any]:
    """The report of finished shards. Raises `ScaleError` when a tensor has no scale by the rule."""
    statistics = merge_all([shard.statistics for shard in shards])
    rule = Rule.parse(settings["rule"])
    tensors = {tensor_name(place): _tensor(place, seen, rule, shards) for place, seen in statistics.items()}
    return {
        "accepted_clips": sum(tensor["clipped"] for tensor in tensors.values()),
        "base_checkpoint": settings["base_checkpoint"],
        "batch_size": settings["batch_size"],
        "counted_forwards": sum(shard.counted_forwards for shard in shards),
        "dtype": settings["dtype"],
        "kind": REPORT_KIND,
        "rounding": {"max_abs_relative": ROUNDING[settings["dtype"]], "of": "another batch size or number of threads"},
        "rule": rule.text,
        "run_sha256": run,
        "samples": dict(samples),
        "schema_version": SCHEMA_VERSION,
        "tensors": tensors,
        "tokens": sum(shard.tokens for shard in shards),
    }


def _tensor(place: Place, seen: KvStatistics, rule: Rule, shards: Sequence[Shard]) -> dict[str, Any]:
    scale = rule.scale(seen, tensor_name(place))
    clipped = seen.clipped(scale)
    parts = [(shard, shard.statistics[place]) for shard in shards]
    return {
        "clip_rate": clipped / seen.values,
        "clipped": clipped,
        "kind": place[1],
        "layer": place[0],
        "log2_histogram": seen.log2_histogram(),
        "max_abs": seen.max_abs,
        "mse": seen.mean_squared_error(scale),
        "mse_curve": [
            [point.value, seen.mean_squared_error(point), seen.clipped(point) / seen.values]
            for point in curve_scales(scale)
        ],
        "percentiles": {percent: seen.percentile(Fraction(percent)) for percent in PERCENTILES},
        "scale": scale.value,
        "shards": [{"max_abs": part.max_abs, "name": shard.name, "tokens": part.tokens} for shard, part in parts],
        "tokens": seen.tokens,
        "values": seen.values,
        "zeros": seen.zeros,
    }


def read_report(path: Path) -> dict[str, Any]:
    """A report file (or the one in a folder) as an object with `tensors`. Raises `ScaleError`."""
    path = path / REPORT_NAME if path.is_dir() else path
    do = "give a calibration-report.json that page4 calibrate wrote"
    value = parse_object(read_bounded(path), path)
    kind, version = value.get("kind"), value.get("schema_version")
    if kind != REPORT_KIND or version != SCHEMA_VERSION:
        got = f"kind {kind!r}" if kind != REPORT_KIND else f"schema_version {version!r}"
        raise ScaleError(message(str(path), allowed=f"kind {REPORT_KIND!r}, version {SCHEMA_VERSION}", got=got, do=do))
    _check_tensors(path, value, do)
    return value


def _check_tensors(path: Path, value: Mapping[str, Any], do: str) -> None:
    tensors, base = value.get("tensors"), value.get("base_checkpoint")
    if not isinstance(tensors, dict) or not tensors or not isinstance(base, dict):
        raise ScaleError(message(str(path), allowed="tensors and base_checkpoint", got="none", do=do))
    for name, tensor in tensors.items():
        for key in ("max_abs", "scale"):
            found = tensor.get(key) if isinstance(tensor, dict) else None
            if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0.0 < found < 2.0**128:
                allowed = "a finite positive number"
                raise ScaleError(message(f"{path} {name} {key}", allowed=allowed, got=repr(found), do=do))

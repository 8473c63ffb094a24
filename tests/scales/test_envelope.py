"""The envelope of reports: the largest of all, where it came from, and what does not belong together."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.scales.runs import NAMES, report_bytes, run, token_samples

from page4.checkpoint.hashes import sha256_of_file
from page4.codec import Scale
from page4.errors import ScaleError, UsageError
from page4.scales.envelope import envelope, write_envelope

pytestmark = pytest.mark.usefixtures("one_thread")


def made_up(max_abs: float, **more: Any) -> dict[str, Any]:
    tensor = {
        "max_abs": max_abs, "scale": Scale.from_max_abs(max_abs).value, "clipped": 0, "clip_rate": 0.0, "mse": 0.25,
        "log2_histogram": {"0": int(max_abs)},
    }  # fmt: skip
    return {"base_checkpoint": {"config_sha256": "c"}, "rule": "absmax", "tensors": {"x": tensor}, **more}


def test_the_largest_of_all_in_any_place() -> None:
    found = envelope([made_up(2.0), made_up(7.0), made_up(3.5)], ["a", "b", "c"])
    tensor = found["tensors"]["x"]
    assert (tensor["max_abs"], tensor["scale"]) == (7.0, 7.0 / 448)
    assert tensor["origin"] == {"report": 2, "report_sha256": "b"}
    assert tensor["spread"] == 5.0 / 7.0
    assert tensor["log2_histogram"] == {"0": 2}
    assert (tensor["clipped"], tensor["mse"]) == (0, None)
    assert found["envelope"] == {"reports": ["a", "b", "c"]}


def test_the_first_keeps_its_figures_where_it_is_the_largest() -> None:
    tensor = envelope([made_up(7.0), made_up(2.0), made_up(7.0)], ["a", "b", "c"])["tensors"]["x"]
    assert tensor["origin"] == {"report": 1, "report_sha256": "a"}
    assert tensor["mse"] == 0.25


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"base_checkpoint": {"config_sha256": "d"}}, "report 2 base_checkpoint: .*another config_sha256"),
        ({"rule": "mse"}, "report 2 rule: .*'mse' instead of 'absmax'"),
        ({"tensors": {"y": {}}}, "report 2 tensors: .*a difference in x, y"),
    ],
)
def test_reports_that_do_not_belong_together_are_refused(other: dict[str, Any], words: str) -> None:
    with pytest.raises(ScaleError, match=words):
        envelope([made_up(1.0), made_up(1.0, **other)], ["a", "b"])


def test_one_and_eight_requests_a_batch_are_both_covered(tmp_path: Path) -> None:
    samples = token_samples(16)
    one = run(tmp_path / "one", samples).report
    eight = run(tmp_path / "eight", samples, batch_size=8, shard_size=16).report
    found = write_envelope([tmp_path / "one", tmp_path / "eight" / "calibration-report.json"], tmp_path / "both")
    assert json.loads(report_bytes(tmp_path / "both")) == json.loads(json.dumps(found))
    assert found["envelope"]["reports"] == [
        sha256_of_file(tmp_path / name / "calibration-report.json") for name in ("one", "eight")
    ]
    for name in NAMES:
        values = [report["tensors"][name]["max_abs"] for report in (one, eight)]
        tensor = found["tensors"][name]
        assert tensor["max_abs"] == max(values)
        assert tensor["scale"] == Scale.from_max_abs(max(values)).value
        assert tensor["spread"] == (max(values) - min(values)) / max(values) <= 1e-5
        assert tensor["log2_histogram"] == one["tensors"][name]["log2_histogram"]


def test_an_envelope_needs_two_reports_and_a_free_place(tmp_path: Path) -> None:
    run(tmp_path / "one", token_samples(2))
    with pytest.raises(UsageError, match="at least two reports, got 1"):
        write_envelope([tmp_path / "one"], tmp_path / "out")
    before = report_bytes(tmp_path / "one")
    with pytest.raises(UsageError, match="a folder without a report"):
        write_envelope([tmp_path / "one", tmp_path / "one"], tmp_path / "one")
    assert report_bytes(tmp_path / "one") == before
    assert not (tmp_path / "out").exists()
    write_envelope([tmp_path / "one", tmp_path / "one"], tmp_path / "one", restart=True)
    assert "envelope" in json.loads(report_bytes(tmp_path / "one"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "expected a JSON object"),
        ("[]", "expected a JSON object, got list"),
        ('{"kind": "other"}', "got kind 'other'"),
        ('{"kind": "page4-calibration-report", "schema_version": 2}', "got schema_version 2"),
        ('{"kind": "page4-calibration-report", "schema_version": 1, "tensors": {}}', "tensors and base_checkpoint"),
    ],
)
def test_files_that_are_no_reports_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ScaleError, match=rf"bad\.json: .*{words}"):
        write_envelope([tmp_path / "bad.json", tmp_path / "bad.json"], tmp_path / "out")


@pytest.mark.parametrize("value", [0, -1.0, "1", None, True, float("nan"), float("inf"), 1e39])
def test_bad_values_in_a_report_are_refused(tmp_path: Path, value: object) -> None:
    report = {**made_up(1.0), "kind": "page4-calibration-report", "schema_version": 1}
    report["tensors"]["x"]["max_abs"] = value
    (tmp_path / "bad.json").write_text(json.dumps(report))
    # JSON has no NaN and no infinity: such a file is refused as a whole.
    no_number = isinstance(value, float) and not math.isfinite(value)
    words = "is no number of JSON" if no_number else "x max_abs: expected a finite positive number"
    with pytest.raises(ScaleError, match=rf"bad\.json.* {words}"):
        write_envelope([tmp_path / "bad.json", tmp_path / "bad.json"], tmp_path / "out")

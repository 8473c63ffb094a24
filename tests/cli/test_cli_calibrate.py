"""`page4 calibrate`: the table, the JSON, the envelope, and one line for each thing that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.scales.runs import NAMES, small_checkpoint, token_samples, write_lines

from page4 import cli
from page4.scales.calibrate import CalibrationOptions

pytestmark = pytest.mark.usefixtures("one_thread")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "samples.jsonl", token_samples(4))


def test_a_table_at_the_end(capsys: pytest.CaptureFixture[str], tmp_path: Path, prompts: Path) -> None:
    code, out, err = run(capsys, "calibrate", small_checkpoint(), "--prompts", prompts, "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["layer", "side", "max_abs", "scale", "clips", "rmse"]
    assert [row[:2] for row in rows[1:5]] == [["3", "k"], ["3", "v"], ["4", "k"], ["4", "v"]]
    report = json.loads((tmp_path / "out" / "calibration-report.json").read_text())
    for row, name in zip(rows[1:5], NAMES, strict=True):
        assert float(row[2]) == pytest.approx(report["tensors"][name]["max_abs"], rel=1e-5)
        assert row[4:6] == ["0", "(0)"]
        assert float(row[6]) ** 2 == pytest.approx(report["tensors"][name]["mse"], rel=0.02)
    assert "rule absmax: 4 samples" in out


def test_json_is_the_report(capsys: pytest.CaptureFixture[str], tmp_path: Path, prompts: Path) -> None:
    flags = ["--rule", "percentile:99.9", "--num-samples", "3", "--seed", "5", "--batch-size", "2", "--json"]
    code, out, err = run(
        capsys, "calibrate", small_checkpoint(), "--prompts", prompts, "--out", tmp_path / "out", *flags
    )
    assert (code, err) == (0, "")
    value = json.loads(out)
    assert value == json.loads((tmp_path / "out" / "calibration-report.json").read_text())
    assert (value["rule"], value["samples"]["count"], value["samples"]["seed"]) == ("percentile:99.9", 3, 5)


def test_envelope(capsys: pytest.CaptureFixture[str], tmp_path: Path, prompts: Path) -> None:
    for name, size in (("a", 1), ("b", 4)):
        flags = ["--prompts", prompts, "--out", tmp_path / name, "--batch-size", size]
        assert run(capsys, "calibrate", small_checkpoint(), *flags)[0] == 0
    code, out, err = run(capsys, "calibrate", "envelope", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "ab")
    assert (code, err) == (0, "")
    assert "largest of 2 reports" in out
    code, out, _ = run(
        capsys, "calibrate", "envelope", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "ab", "--restart", "--json"
    )
    assert code == 0 and list(json.loads(out)["tensors"]) == NAMES


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["calibrate"], "MODEL"),
        (["calibrate", "tiny"], "--out: expected a folder, got none"),
        (["calibrate", "tiny", "--out", "x"], "--prompts: expected a JSONL file, got none"),
        (["calibrate", "tiny", "r.json", "--out", "x"], "REPORT: expected none after tiny, got r.json"),
        (["calibrate", "tiny", "--prompts", "no.jsonl", "--out", "x"], "--prompts: expected a readable file"),
        (["calibrate", "tiny", "--prompts", "p", "--out", "x", "--rule", "max"], "rule: expected absmax, mse"),
        (["calibrate", "tiny", "--prompts", "p", "--out", "x", "--mix", "text"], "--mix: expected"),
        (["calibrate", "tiny", "--prompts", "p", "--out", "x", "--num-samples", "0"], "num_samples: expected"),
        (["calibrate", "tiny", "--prompt", "p"], "nearest: --prompts"),
        (["calibrate", "tiny", "--max-seq-len", "9"], "nearest: --max-seq-length"),
        (["calibrate", "envelope", "--out", "x"], "at least two reports, got 0"),
        (["calibrate", "envelope", "a", "b"], "--out: expected a folder"),
        (["calibrate", "envelope", "a", "b", "--out", "x", "--rule", "mse"], "got --rule; leave it out"),
        (["calibrate", "envelope", "a", "b", "--out", "x", "--seed", "42"], "got --seed; leave it out"),
    ],
    ids=lambda value: " ".join(value[1:]) or "nothing" if isinstance(value, list) else "",
)
def test_usage_errors(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("page4: error: ") and err.count("\n") == 1
    assert words in err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_report_is_an_input_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, "calibrate", "envelope", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "x")
    assert code == 3
    assert f"{tmp_path / 'a'}: expected a file, got none" in err


def test_defaults_are_those_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    from page4.cli.app import build

    given = {parameter.name: parameter.default for parameter in build().commands["calibrate"].params}
    options = CalibrationOptions()
    for name in ("rule", "max_seq_length", "num_samples", "seed", "batch_size", "shard_size"):
        assert given[name] == getattr(options, name)

"""`page4 demo`: once for real, and what it makes of runs with known faults."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.fake_engine import Completion, Result

from page4 import cli
from page4.checkpoint import Checkpoint
from page4.cli import demo, models
from page4.cli.demo_steps import Built, LaneRun
from page4.engine.metrics import KVCounts
from page4.scales.effect import Effect, ProbeResult, ScaleResult
from page4.scales.faults import Fault, Findings


def results(last_token: int = 4) -> list[Any]:
    """What a lane wrote to the four prompts."""
    return [Result(str(n), [1, 2], [Completion(0, [3, last_token], "text\n", "stop")]) for n in range(4)]


KNOWN = LaneRun(results(), 40.0, 1.0, [], (), 2048, None)


def test_the_whole_job(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in models.embedded().iterdir()}
    assert cli.main(["demo", "--out", str(tmp_path / "demo"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pass"] is True and set(found["checks"].values()) == {True} and found["faults"] == []
    assert [(entry["layer"], entry["side"]) for entry in found["layers"]] == [(i, s) for i in (3, 7, 8) for s in "kv"]
    for entry in found["layers"]:
        assert entry["takes_effect"] and 0 < entry["attention_error"] < 0.15
        assert entry["max_abs"] / 448 <= entry["scale"] < entry["max_abs"] / 448 * (1 + 1e-6)
    assert abs(found["perplexity"]["change"]) <= 0.005 and 3 < found["perplexity"]["16-bit"] < 6
    lanes = found["lanes"]
    for name in ("16-bit", "E4M3"):
        assert lanes[f"{name}, 3 drafts"]["tokens_per_target_step"] > 2.5
        assert lanes[f"{name}, 0 drafts"]["tokens_per_target_step"] == 1.0
        assert 2 * lanes[f"E4M3, {3} drafts"]["kv_bytes_per_token"] == lanes["16-bit, 3 drafts"]["kv_bytes_per_token"]
    # The checkpoint in the package stays without scales; those of the overlay lie in the folder that it names.
    assert {path.name: path.stat().st_mtime_ns for path in models.embedded().iterdir()} == before
    assert not any("scale" in name for name in Checkpoint.open(models.embedded()).names())
    assert found["overlay"] == str(tmp_path / "demo" / "overlay")
    assert sum("_scale" in name for name in Checkpoint.open(Path(found["overlay"])).names()) == 6


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the steps of the demo are to find."""
    probe = ProbeResult("x1.3", 0.03, 0.03, 0.0, 0.04, 1.0, 0.01, 0.02)
    scales = tuple(ScaleResult(3, side, 0.5, 0.031, 0.032, (probe,), ()) for side in ("k", "v"))
    tensors = {side: {"layer": 3, "kind": side, "max_abs": 224.0, "mse": 0.0004} for side in "kv"}
    calibration = {"tensors": tensors, "samples": {"count": 5}, "tokens": 77, "rule": "absmax"}
    clips = (KVCounts(3, "k", 0.5, 7, 0), KVCounts(3, "v", 0.5, 0, 0))
    found: dict[str, Any] = {
        "built": Built(Path("x/overlay"), calibration, Findings(), Effect(scales, 99, 0.01, 0.02)),
        "16-bit": dataclasses.replace(KNOWN, perplexity=4.0),
        "E4M3": dataclasses.replace(KNOWN, perplexity=4.004, kv=clips, kv_bytes_per_token=1024),
    }
    monkeypatch.setattr("page4.cli.demo_steps.build", lambda base, out: found["built"])

    def lane(folder: Path, *, drafts: int, e4m3: bool, score: bool) -> LaneRun:
        name = "E4M3" if e4m3 else "16-bit"
        run: LaneRun = found.get((name, drafts), found[name])
        return run

    monkeypatch.setattr("page4.cli.demo_steps.run_lane", lane)
    return found


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    monkeypatch.setenv("COLUMNS", "200")
    code = cli.main(["demo", *arguments])
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, captured.out


def test_the_tables(steps: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out = run(capsys, monkeypatch)
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["3", "k", "224", "0.5", "7", "0.02", "3.10%", "yes"] in lines
    assert ["16-bit", "3", "4.0000", "1.00", "-", "40", "2048"] in lines
    assert ["E4M3", "3", "4.0040", "1.00", "-", "40", "1024"] in lines
    assert "perplexity with E4M3 K/V: +0.100% against 16-bit K/V (at most 0.5% either way)\n" in out
    assert "mtp tokens equal e4m3: yes\n" in out and "NO" not in out


def faulty(steps: dict[str, Any], case: str) -> None:
    built = steps["built"]
    if case == "overlay verified":
        steps["built"] = dataclasses.replace(built, findings=Findings([Fault("hash", "a file", "another hash")]))
    elif case == "scales take effect":
        bad = dataclasses.replace(built.effect.scales[0], faults=("it does not",))
        steps["built"] = dataclasses.replace(
            built, effect=dataclasses.replace(built.effect, scales=(bad, built.effect.scales[1]))
        )
    elif case == "perplexity change within limit":
        steps["E4M3"] = dataclasses.replace(steps["E4M3"], perplexity=4.021)
    else:
        name = "16-bit" if "16bit" in case else "E4M3"
        steps[name, 0] = dataclasses.replace(steps[name], results=results(5))


@pytest.mark.parametrize(
    "case",
    [
        "overlay verified",
        "scales take effect",
        "mtp tokens equal 16bit",
        "mtp tokens equal e4m3",
        "perplexity change within limit",
    ],
)
def test_one_failed_check_fails_the_demo(
    steps: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    faulty(steps, case)
    code, out = run(capsys, monkeypatch)
    assert code == 1 and f"{case}: NO\n" in out and out.count(": NO\n") == 1
    assert ("fault: " in out) == (case in ("overlay verified", "scales take effect"))
    code, out = run(capsys, monkeypatch, "--json")
    assert code == 1
    checks = json.loads(out)["checks"]
    assert [name for name, passed in checks.items() if not passed] == [case.replace(" ", "_")]
    assert demo.MAX_PERPLEXITY_CHANGE == 0.005

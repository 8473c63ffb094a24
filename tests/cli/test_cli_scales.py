"""`page4 scales`: from a report to an overlay and its check, by the command line alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.scales import bases
from tests.scales.bases import DRAFT, INDEX, MANIFEST, PROVENANCE, TARGET, edit, make_base, make_report

from page4 import cli


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["scales", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with base, report, pack and overlay."""
    base, report = make_base(tmp_path / "base"), make_report(tmp_path / "report.json")
    assert run(capsys, "pack", "--report", report, "--base", base, "--out", tmp_path / "pack")[0] == 0
    flags = ("--draft-report", report, "--out", tmp_path / "overlay")
    assert run(capsys, "overlay", base, tmp_path / "pack", *flags)[0] == 0
    return tmp_path


def test_from_a_report_to_a_verified_overlay(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {path.name for path in (made / "pack").iterdir()} == {MANIFEST, TARGET}
    assert {path.name for path in (made / "overlay").iterdir()} >= {TARGET, DRAFT, INDEX, PROVENANCE, "config.json"}
    code, out, err = run(capsys, "verify", made / "overlay")
    assert (code, err) == (0, "")
    assert out.endswith("pass (12 files, 2 shards, 12 tensors, 2 target scales, 2 draft scales)\n")


def test_faults_are_a_table_and_exit_code_1(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (made / "overlay" / "tokenizer.json").unlink()
    edit(made / "overlay" / INDEX, lambda index: index["metadata"].update(total_size=5))
    code, out, err = run(capsys, "verify", made / "overlay")
    assert (code, err) == (1, "")
    for word in ("file-missing", "hash-index", "total-size", "tokenizer.json", "3 faults"):
        assert word in out
    assert "\x1b" not in out


def test_json_of_each_verb(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = made / "report.json"
    code, out, _ = run(capsys, "pack", "--report", report, "--base", made / "base", "--out", made / "p2", "--json")
    assert code == 0 and json.loads(out)["tensors"] == 2
    flags = ("--draft-unit-scale", "--out", made / "o2", "--naming", "proj", "--copy", "--json")
    code, out, err = run(capsys, "overlay", made / "base", made / "p2", *flags)
    assert code == 0 and json.loads(out)["target_scales"] == 2 and len(json.loads(out)["prototypes"]) == 2
    assert err.count("prototype scale, not calibrated") == 2
    code, out, _ = run(capsys, "verify", made / "o2", "--json", "--full", "--root", made)
    value = json.loads(out)
    assert code == 0 and value["pass"] is True and value["faults"] == [] and len(value["notes"]) == 2
    (made / "o2" / PROVENANCE).unlink()
    code, out, _ = run(capsys, "verify", made / "o2", "--json")
    assert code == 1 and "provenance-missing" in {fault["code"] for fault in json.loads(out)["faults"]}


def test_envelope(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = make_report(made / "wide.json", factor=10.0)
    sources = ("--target-source", "envelope", "--target-report", wide, "--draft-report", made / "report.json")
    assert run(capsys, "overlay", made / "base", made / "pack", *sources, "--out", made / "o3")[0] == 0
    scales = json.loads((made / "o3" / PROVENANCE).read_text())["scales"]
    assert [scale["max_abs"] for scale in scales[:2]] == [10 * bases.max_abs_of(3, side) for side in "kv"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["pakc"], 2, "pakc"),
        (["verify"], 2, "DIR"),
        (["verify", "overlay", "--ful"], 2, "--ful: unknown flag; nearest: --full"),
        (["verify", "overlay", "--root", "base"], 2, "--root"),
        (["overlay", "base", "pack", "--out", "x"], 2, "--draft-report"),
        (["overlay", "base", "pack", "--out", "x", "--draft-unit-scale", "--draft-from-layer", "3"], 2, "several"),
        (["overlay", "base", "pack", "--out", "x", "--draft-from-layer", "2"], 3, "--draft-from-layer"),
        (["overlay", "base", "pack", "--out", "x", "--draft-unit-scale", "--naming", "vllm"], 2, "--naming"),
        (["overlay", "base", "pack", "--out", "base/x", "--draft-unit-scale"], 2, "apart"),
        (["overlay", "base", "pack", "--out", "overlay", "--draft-unit-scale"], 2, "--force"),
        (["overlay", "nowhere", "pack", "--out", "x", "--draft-unit-scale"], 3, "MODEL"),
        (["overlay", "base", "nowhere", "--out", "x", "--draft-unit-scale"], 3, "PACK nowhere"),
        (["overlay", "base", "base", "--out", "x", "--draft-unit-scale"], 3, "kvscales-manifest.json"),
        (["pack", "--report", "nothing.json", "--base", "base", "--out", "x"], 3, "nothing.json"),
        (["pack", "--base", "base", "--out", "x"], 2, "--report"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals_are_one_line_and_write_nothing(
    made: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(made)
    before = sorted(path.name for path in made.iterdir())
    got, out, err = run(capsys, *arguments)
    assert (got, out) == (code, "")
    assert err.startswith("page4: error: ") and err.count("\n") == 1 and words in err
    assert sorted(path.name for path in made.iterdir()) == before


def test_force_replaces_a_folder(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--draft-from-layer", 3, "--out", made / "overlay", "--force")
    assert run(capsys, "overlay", made / "base", made / "pack", *flags)[0] == 0
    assert json.loads((made / "overlay" / PROVENANCE).read_text())["draft"]["source"] == "prototype:layer-3"


def test_no_verb_imports_torch(made: Path) -> None:
    def imported(*arguments: str) -> set[str]:
        command = [sys.executable, "-X", "importtime", "-m", "page4.cli", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return set(re.findall(r"\| +(\w+)$", done.stderr, re.MULTILINE))

    assert not imported("scales", "overlay", "--help") & {"torch", "numpy", "transformers"}
    assert not imported("scales", "verify", str(made / "overlay")) & {"torch", "numpy", "transformers"}

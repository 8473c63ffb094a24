"""SIGKILL at random moments: nothing looks finished, a rerun ends with the same bytes, the base is as it was."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from tests.scales.runs import report_bytes, small_checkpoint, token_samples, tree, write_lines

from page4 import cli

KILLS = 20
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")]


def start(arguments: list[str]) -> int:
    """`page4 ARGUMENTS` in a child of its own, with torch already imported; its process id."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(cli.main(arguments))
    return child


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_killed_at_random_moments(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    prompts = write_lines(tmp_path / "samples.jsonl", token_samples(8))
    base = small_checkpoint()
    before = tree(base)

    def arguments(out: Path) -> list[str]:
        flags = ["--prompts", str(prompts), "--shard-size", "1"]
        return ["calibrate", str(base), *flags, "--out", str(out)]

    began = time.monotonic()
    assert exit_code(start(arguments(tmp_path / "whole"))) == 0
    duration = time.monotonic() - began
    want = report_bytes(tmp_path / "whole")
    unfinished = 0
    for number in range(KILLS):
        out = tmp_path / f"killed-{number}"
        child = start(arguments(out))
        time.sleep(rng.uniform(0.0, 1.1 * duration))
        os.kill(child, signal.SIGKILL)
        exit_code(child)
        report = out / "calibration-report.json"
        assert not report.exists() or report.read_bytes() == want
        unfinished += not report.exists()
        assert exit_code(start(arguments(out))) == 0
        assert report_bytes(out) == want
        assert sorted(path.name for path in out.iterdir()) == ["calibration-report.json", "calibration-run.json"]
        assert report.stat().st_mode & 0o777 == 0o644
        assert tree(base) == before
        shutil.rmtree(out)
    assert unfinished > 0, f"no kill came in time, seed {seed}"


@pytest.mark.parametrize("umask", [0o077, 0o022])
def test_written_files_can_be_read_by_all(tmp_path: Path, umask: int) -> None:
    prompts = write_lines(tmp_path / "samples.jsonl", token_samples(1))
    out = tmp_path / "new" / "out"
    old = os.umask(umask)
    try:
        assert cli.main(["calibrate", str(small_checkpoint()), "--prompts", str(prompts), "--out", str(out)]) == 0
    finally:
        os.umask(old)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (out.parent, out, *out.iterdir())}
    assert modes == {"new": 0o755, "out": 0o755, "calibration-report.json": 0o644, "calibration-run.json": 0o644}

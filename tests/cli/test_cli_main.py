"""One line on stderr and the right exit code, whatever goes wrong; fast help; NO_COLOR."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from page4 import cli
from page4.cli import app, memory, unknown


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def one_line(err: str) -> str:
    assert err.startswith("page4: error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err


def test_help_lists_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--help")
    assert (code, err) == (0, "")
    for verb in ("generate", "calibrate", "doctor", "demo", "scales"):
        assert verb in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import page4

    assert run(capsys, "--version") == (0, f"page4 {page4.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "expected a verb"),
        (["generat"], "generat: unknown verb; nearest: generate"),
        (["serve", "tiny"], "serve: unknown verb; nearest: generate"),
        (["xyzzy"], "xyzzy: unknown verb; nearest: none (verbs: generate, calibrate, doctor, demo, scales)"),
        (["--josn"], "--josn: unknown flag"),
        (["generate"], "MODEL"),
        (["generate", "tiny", "x", "--max-token", "3"], "--max-token: unknown flag; nearest: --max-tokens"),
        (["generate", "tiny", "x", "--max_tokens", "3"], "--max_tokens: unknown flag; nearest: --max-tokens"),
        (["generate", "tiny", "x", "--Max-Tokens=3"], "nearest: --max-tokens"),
        (["generate", "tiny", "x", "--temprature", "1"], "nearest: --temperature"),
        (["generate", "tiny", "x", "--gpu-memory-utilization", "0.9"], "nearest: --kv-cache-memory-bytes"),
        (["generate", "tiny", "x", "--gpu-memory-utilisation", "0.9"], "nearest: --kv-cache-memory-bytes"),
        (["generate", "tiny", "x", "--num-speculative-tokens", "3"], "nearest: --speculative-config"),
        (["generate", "tiny", "x", "--max-new-tokens", "3"], "nearest: --max-tokens"),
        (["generate", "tiny", "x", "--tensor-parallel-size", "2"], "one process uses one device"),
        (["generate", "tiny", "x", "--enforce-eager"], "always eager"),
        (["generate", "tiny", "x", "-q"], "-q: unknown flag"),
        (["generate", "tiny", "x", "--max-tokens", "3q"], "'--max-tokens': expected a number such as"),
        (["generate", "tiny", "x", "--max-tokens"], "--max-tokens"),
        (["generate", "tiny", "x", "--dtype", "int4"], "'float32', 'bfloat16', 'float16'"),
        (["generate", "tiny", "x", "--kv-cache-dtype", "fp8_e5m2"], "'fp8_e4m3'"),
        (["generate", "tiny", "x", "--temperature", "warm"], "--temperature"),
        (["generate", "tiny", "x", "--speculative-config", "{"], "--speculative-config: expected a JSON object"),
        (["doctor", "extra"], "extra"),
    ],
    ids=lambda value: " ".join(value[-2:]) or "nothing" if isinstance(value, list) else "",
)
def test_usage_errors_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert words in one_line(err)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PAGE4_POISON", "0x100", "PAGE4_POISON: expected off or a byte"),
        ("PAGE4_KERNELS", "fast", "auto, torch, reference or triton"),
        ("PAGE4_POISSON", "0x7F", "did you mean PAGE4_POISON?"),
        ("VLLM_SM70_QSA_GROUPED_PAGE4", "yes", "VLLM_SM70_QSA_GROUPED_PAGE4"),
    ],
)
def test_environment_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(name, value)
    code, out, err = run(capsys, "doctor")
    assert (code, out) == (2, "")
    assert words in one_line(err)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError("disk is\nfull"), 3),
        (MemoryError(), 3),
        (KeyboardInterrupt(), 130),
    ],
)
def test_failures_of_the_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(app.env, "check", fail)
    got, out, err = run(capsys, "doctor")
    assert (got, out) == (code, "")
    one_line(err)


def test_a_fault_of_ours_keeps_its_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise AssertionError("ours")

    monkeypatch.setattr(app.env, "check", fail)
    code, out, err = run(capsys, "doctor")
    assert (code, out) == (3, "")
    assert "Traceback" in err
    assert "AssertionError: ours" in err


def test_no_flag_that_we_have_is_listed_as_missing() -> None:
    ours = {
        flag for command in app.build().commands.values() for parameter in command.params for flag in parameter.opts
    }
    assert not ours & set(unknown.ELSEWHERE)
    named = {text.split()[0] for text in unknown.ELSEWHERE.values() if text.startswith("--")}
    assert named <= ours


def test_peak_memory_is_that_of_this_process() -> None:
    before = memory.peak_memory_bytes()
    held = bytearray(b"\1") * (before + (64 << 20))
    assert memory.peak_memory_bytes() >= len(held)
    assert memory.peak_memory_bytes() < 4 * len(held)


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "page4.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        cwd=Path(__file__).parent,
        check=False,
    )


def test_help_imports_no_torch_and_honours_no_color() -> None:
    done = command("generate", "--help", NO_COLOR="1", FORCE_COLOR="1", COLUMNS="140")
    assert done.returncode == 0
    assert "--max-num-batched-tokens" in re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    assert not re.search(r"\x1b\[(?:\d+;)*[349]\d", done.stdout), "a colour in spite of NO_COLOR"
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"torch", "numpy", "transformers", "tokenizers", "huggingface_hub"}

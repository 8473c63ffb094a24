"""`page4 generate` on an engine with known answers: what is passed on, what is printed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.fake_engine import FakeLLM

import page4
from page4 import cli


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    monkeypatch.setattr(page4, "LLM", FakeLLM, raising=False)
    monkeypatch.setattr(FakeLLM, "made", [])
    return FakeLLM


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


MTP = '{"method":"mtp","num_speculative_tokens":3}'


def test_json_holds_exactly_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "generate", "tiny", "ab", "c", "--speculative-config", MTP, "--json")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    value = json.loads(out)
    assert set(value) == {"outputs", "metrics", "lane", "kv_cache"}
    assert value["lane"] == {"kv_dtype": "fp8_e4m3", "warnings": []}
    assert value["kv_cache"] == [
        {"layer": 3, "side": "k", "scale": 0.25, "clipped": 0, "nonfinite": 0},
        {"layer": 3, "side": "v", "scale": 0.5, "clipped": 2, "nonfinite": 0},
    ]
    first, second = value["outputs"]
    assert set(first) == {"prompt_token_ids", "token_ids", "text", "finish_reason"}
    assert first["token_ids"] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert second["token_ids"] == [1, 1, 2, 3, 4, 5, 6, 7]
    assert (first["text"], first["finish_reason"]) == ("text 0\n", "length")
    memory = value["metrics"].pop("peak_memory_bytes")
    assert memory > 1 << 20
    assert value["metrics"] == {
        "prefill_tokens_per_s": 200.0,
        "decode_tokens_per_s": 32.0,
        "target_steps": 10,
        "drafted": 24,
        "accepted": 8,
        "accepted_per_position": [6, 2, 0],
    }


def test_text_goes_to_stdout_and_figures_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "generate", "tiny", "ab", "--speculative-config", MTP)
    assert (code, out) == (0, "text 0\n")
    # 8 tokens in 4 windows; 3, 1 and 0 of the 4 accepted the first, second and third draft.
    assert "prefill 200 tokens/s, decode 32 tokens/s, 5 target steps, 2.00 tokens a step" in err
    assert "acceptance per position 0.75 0.25 0.00" in err
    assert "E4M3 K/V of 1 layers, clipped values: 2 in v of layer 3\n" in err
    assert "\x1b" not in out + err


def test_several_texts_have_headings(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, err = run(capsys, "generate", "tiny", "ab", "c")
    assert out == "--- prompt 0, 8 tokens, length\ntext 0\n--- prompt 1, 8 tokens, length\ntext 1\n"
    assert "acceptance" not in err


def test_notes_and_failed_requests_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLLM, "notes_to_tell", ("something is lower than asked",))
    monkeypatch.setattr(FakeLLM, "finish_reason", "error")
    code, out, err = run(capsys, "generate", "tiny", "ab", "--json")
    assert code == 3
    assert json.loads(out)["outputs"][0]["finish_reason"] == "error"
    assert err == "page4: note: something is lower than asked\npage4: error: prompt 0: the reason\n"


def test_every_flag_reaches_the_engine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("from a file")
    (tmp_path / "ids.json").write_text("[3, 4]")
    flags = (
        f"--prompt-file {tmp_path}/p.txt --prompt-token-ids {tmp_path}/ids.json --max-tokens 1k --min-tokens 2 "
        "--temperature 0.5 --top-p 0.9 --top-k 7 --min-p 0.1 --seed 5 --stop END --stop FIN --stop-token-ids 9 "
        "--stop-token-ids 10 --ignore-eos --n 2 --logprobs 1 --dtype bfloat16 --kv-cache-dtype fp8 "
        "--draft-kv-dtype bfloat16 --allow-unit-scales --allow-prototype-scales --e4m3-mtp "
        f"--speculative-config {MTP} --max-model-len 4K --max-num-batched-tokens 512 --max-num-seqs 3 "
        "--kv-cache-memory-bytes 64M --block-size 32 --device cuda:1 --json"
    )
    code, _, err = run(capsys, "generate", "tiny", "given", *flags.split())
    assert (code, err) == (0, "")
    (llm,) = FakeLLM.made
    assert llm.options == {
        "dtype": "bfloat16",
        "kv_cache_dtype": "fp8",
        "draft_kv_dtype": "bfloat16",
        "max_model_len": 4096,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 64 << 20,
        "block_size": 32,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 3},
        "allow_unit_scales": True,
        "allow_prototype_scales": True,
        "e4m3_mtp": True,
        "seed": 5,
        "device": "cuda:1",
    }
    ((prompts, params),) = llm.calls
    assert len(prompts) == 3
    assert prompts[2] == [3, 4]
    expected: dict[str, Any] = {
        "max_tokens": 1000,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "stop": ("END", "FIN"),
        "stop_token_ids": (9, 10),
        "ignore_eos": True,
        "n": 2,
        "logprobs": 1,
    }
    assert {name: getattr(params, name) for name in expected} == expected


def test_defaults_are_those_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    import inspect

    from page4.engine import LLM, SamplingParams

    run(capsys, "generate", "tiny", "x")
    (llm,) = FakeLLM.made
    signature = inspect.signature(LLM).parameters
    assert llm.options == {name: signature[name].default for name in llm.options}
    assert llm.calls[0][1] == SamplingParams()


def test_text_that_the_terminal_cannot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from page4.cli import console

    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    console.print_text("é")
    stream.seek(0)
    assert stream.read() == "\\xe9"

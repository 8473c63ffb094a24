"""`page4 generate` on the embedded checkpoint: a pipe in, one JSON object out, the same tokens with and without MTP."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers

import page4
from page4 import cli
from page4.assets import held_out_text

MTP = '{"method":"mtp","num_speculative_tokens":3}'
TEXT = held_out_text().read_text()[:1200]
SHORT = ("--max-tokens", "12", "--max-model-len", "1k", "--json")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizers.Tokenizer.from_file(str(page4.embedded_checkpoint() / "tokenizer.json"))


def generate(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["generate", "tiny", *arguments]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_a_pipe_with_and_without_drafts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    pipe(monkeypatch, TEXT)
    drafted = generate(capsys, *SHORT, "--speculative-config", MTP)
    pipe(monkeypatch, TEXT)
    plain = generate(capsys, *SHORT)
    assert drafted["outputs"] == plain["outputs"]
    (output,) = drafted["outputs"]
    assert output["prompt_token_ids"] == tokenizer.encode(TEXT).ids
    # More than the 259 tokens that the indexer's budget sees without pruning.
    assert len(output["prompt_token_ids"]) > 300
    assert len(output["token_ids"]) == 12
    assert output["text"] == tokenizer.decode(output["token_ids"])
    assert output["finish_reason"] == "length"
    metrics = drafted["metrics"]
    assert plain["metrics"]["drafted"] == 0
    # One prefill step, then windows that each emit one token and the accepted drafts.
    assert metrics["target_steps"] == 1 + (11 - metrics["accepted"])
    assert sum(metrics["accepted_per_position"]) == metrics["accepted"] <= metrics["drafted"]
    assert metrics["prefill_tokens_per_s"] > 0
    assert metrics["decode_tokens_per_s"] > 0


def test_token_ids_chat_and_several_prompts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokenizer: Any
) -> None:
    ids = [tokenizer.encode(text).ids for text in ("import os\n", "def main():\n")]
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    by_ids = generate(capsys, "--prompt-token-ids", str(tmp_path / "ids.json"), *SHORT)
    by_text = generate(capsys, "import os\n", "def main():\n", *SHORT)
    assert by_ids["outputs"] == by_text["outputs"]
    assert [output["prompt_token_ids"] for output in by_text["outputs"]] == ids
    chat = generate(capsys, "import os\n", "--chat", *SHORT)
    template = tokenizer.decode(chat["outputs"][0]["prompt_token_ids"], skip_special_tokens=False)
    assert "import os" in template
    assert "<|im_start|>assistant" in template


def test_log_probabilities(capsys: pytest.CaptureFixture[str]) -> None:
    value = generate(capsys, "import os\n", "--logprobs", "2", "--n", "2", "--temperature", "0.7", *SHORT)
    first, second = value["outputs"]
    assert first["prompt_token_ids"] == second["prompt_token_ids"]
    for output in (first, second):
        assert len(output["logprobs"]) == len(output["token_ids"])
        for token, place in zip(output["token_ids"], output["logprobs"], strict=True):
            assert place[0]["token_id"] == token
            assert place[0]["logprob"] <= place[1]["logprob"] <= 0

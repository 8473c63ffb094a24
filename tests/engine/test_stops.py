"""Stop strings, stop ids, end of text and limits give the same at any k, streaming or not (case B38)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tests.engine.lanes import assert_idle, make_llm, prompt_of, tokens

from page4 import LLM, SamplingParams, embedded_checkpoint
from page4.engine import llm as llm_module
from page4.model.weights import load_model

TEXT = "import os\n\n\ndef read(path):\n    with open(path) as file:\n        return file.read()\n\n\ndef main():\n"


@pytest.fixture(scope="module")
def engines() -> list[LLM]:
    """The embedded checkpoint (byte-level tokenizer, trained) with k = 0..3; they share its weights."""
    loaded = load_model(embedded_checkpoint(), torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm_module, "load_model", lambda *args, **kwargs: loaded)
        return [make_llm(embedded_checkpoint(), k, max_model_len=192, max_num_batched_tokens=256) for k in range(4)]


@pytest.fixture(scope="module")
def greedy_tokens(engines: list[LLM]) -> list[int]:
    return engines[0].generate(TEXT, SamplingParams(max_tokens=24, ignore_eos=True))[0].outputs[0].token_ids


def _stops(llm: LLM, greedy: list[int]) -> list[SamplingParams]:
    """Stops at every kind of place in the greedy continuation: inside a token, across tokens, on an id, never."""
    assert llm.tokenizer is not None
    pieces = [llm.tokenizer.decode([token]) for token in greedy]
    text = "".join(pieces)
    across = pieces[5][-1] + pieces[6][0]
    base = SamplingParams(max_tokens=24, ignore_eos=True)
    return [
        base,
        dataclasses.replace(base, max_tokens=7),
        dataclasses.replace(base, stop=[across]),
        dataclasses.replace(base, stop=[text[9:14]], include_stop_str_in_output=True),
        dataclasses.replace(base, stop=[text[30:32], text[12:13], "never there"]),
        dataclasses.replace(base, stop=[across], min_tokens=12),
        dataclasses.replace(base, stop_token_ids=[greedy[6]]),
        dataclasses.replace(base, stop_token_ids=[greedy[6]], min_tokens=8),
        dataclasses.replace(base, stop=["never there"], stop_token_ids=[greedy[10]], max_tokens=11),
        dataclasses.replace(base, ignore_eos=False, min_tokens=24),
    ]


def test_stops_are_those_of_one_token_at_a_time(engines: list[LLM], greedy_tokens: list[int]) -> None:
    """Text, ids, reason and usage are the same for k = 0..3, alone, together and streaming."""
    assert engines[3].tokenizer is not None
    cases = _stops(engines[0], greedy_tokens)
    want = [engines[0].generate(TEXT, params)[0] for params in cases]
    reasons = [result.outputs[0].finish_reason for result in want]
    assert reasons[:3] == ["length", "length", "stop"]
    assert reasons.count("stop") >= 5
    for result, params in zip(want, cases, strict=True):
        [output] = result.outputs
        assert len(output.token_ids) == result.usage.completion_tokens >= min(params.min_tokens, 24)
        assert result.usage.prompt_tokens == len(result.prompt_token_ids)
        if isinstance(output.stop_reason, str) and params.min_tokens == 0:
            assert params.include_stop_str_in_output == (output.stop_reason in output.text)
            full = engines[0].tokenizer.decode(output.token_ids)  # type: ignore[union-attr]  # asserted in _stops
            assert full.startswith(output.text)
            assert output.stop_reason in full
        elif isinstance(output.stop_reason, int):
            assert output.token_ids[-1] == output.stop_reason
    for llm in engines[1:]:
        for got, truth in zip(llm.generate([TEXT] * len(cases), cases), want, strict=True):
            assert got.outputs == truth.outputs
            assert got.usage == truth.usage
        assert llm.metrics.accepted > 0
        assert_idle(llm)
    for params, truth in zip(cases, want, strict=True):
        chunks = list(engines[3].stream(TEXT, params))
        assert "".join(chunk.text for chunk in chunks) == truth.outputs[0].text
        assert [token for chunk in chunks for token in chunk.token_ids] == truth.outputs[0].token_ids
        assert chunks[-1].finish_reason == truth.outputs[0].finish_reason
        assert chunks[-1].stop_reason == truth.outputs[0].stop_reason
        assert chunks[-1].usage == truth.usage
        assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    assert_idle(engines[3])


@pytest.mark.parametrize("k", [1, 2, 3])
def test_end_of_text_inside_a_window(small: Path, k: int) -> None:
    """A token that the model says often is made the end of text: it ends the output and is counted, at any place."""
    prompts = [prompt_of(length, 48) for length in (6, 18, 40, 41)]
    free = [tokens(make_llm(small, 0), prompt, 24) for prompt in prompts]
    for eos in {found[9] for found in free}:
        llm = make_llm(small, k)
        llm.core._eos_ids = frozenset({eos})
        for found, result in zip(free, llm.generate(prompts, SamplingParams(max_tokens=24)), strict=True):
            [output] = result.outputs
            cut = found.index(eos) + 1 if eos in found else 24
            assert output.token_ids == found[:cut]
            assert output.finish_reason == ("stop" if eos in found else "length")
            assert output.stop_reason is None
            assert result.usage.completion_tokens == cut
        assert_idle(llm)

"""The face of the engine: refusals before memory, streaming, aborts, failures that stay with their request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.lanes import assert_idle, collect, make_llm, prompt_of, tokens
from tests.oracle import random_checkpoint

from page4 import LLM, Page4Error, SamplingParams, embedded_checkpoint
from page4.engine import llm as llm_module
from page4.errors import CacheError, RequestError, ScaleError, UsageError

MTP = {"method": "mtp", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"dtype": "int8"}, UsageError, "dtype: expected auto"),
        ({"kv_cache_dtype": "fp4"}, UsageError, "kv_cache_dtype"),
        ({"draft_kv_dtype": "fp4"}, UsageError, "draft_kv_dtype"),
        ({"speculative_config": {**MTP, "num_speculative_tokens": 8}}, RequestError, "0 to 7, got 8"),
        (
            {"speculative_config": {**MTP, "num_speculative_token": 3}},
            UsageError,
            "did you mean num_speculative_tokens",
        ),
        ({"speculative_config": {**MTP, "method": "ngram"}}, UsageError, "expected mtp, got 'ngram'"),
        ({"speculative_config": {**MTP, "num_speculative_tokens": "3"}}, UsageError, "an integer"),
        ({"max_model_len": 100_000}, UsageError, "max_model_len: expected 1 to 512"),
        ({"kv_cache_memory_bytes": 40_000}, CacheError, "at least"),
        ({"block_size": 6}, CacheError, "block in page"),
        ({"kv_cache_dtype": "fp8_e4m3"}, ScaleError, "k_scale"),
        ({"max_num_seqs": 0}, UsageError, "max_num_seqs"),
        ({"max_num_batched_tokens": 3, "speculative_config": MTP}, UsageError, "max_num_batched_tokens"),
    ],
)
def test_refusals_come_before_weights_and_memory(
    small: Path, options: dict[str, Any], error: type[Page4Error], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("weights were read or memory was taken before the refusal")

    monkeypatch.setattr(llm_module, "load_model", never)
    monkeypatch.setattr(llm_module, "Arena", never)
    with pytest.raises(error) as caught:
        LLM(small, **options)
    text = str(caught.value)
    assert words in text
    assert "\n" not in text
    assert caught.value.exit_code in (2, 3)


def test_drafts_need_a_head(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, seed=3, mtp=False, vocab_size=24, max_position_embeddings=128)
    with pytest.raises(RequestError, match="no MTP head"):
        LLM(folder, speculative_config=MTP)
    assert len(tokens(make_llm(folder, 0, max_model_len=64), [5, 6], 3)) == 3


@pytest.mark.parametrize(
    ("name", "value"), [("PAGE4_POISON", "0x1FF"), ("PAGE4_KERNELS", "fast"), ("PAGE4_POISN", "off")]
)
def test_a_bad_environment_is_refused(small: Path, name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="PAGE4_"):
        make_llm(small, 0)


def test_bad_requests_leave_nothing_behind(small: Path) -> None:
    llm = make_llm(small, 3, max_model_len=64)
    for prompt, words in (
        ([], "at least one token"),
        ([5] * 65, "at most 64 tokens"),
        ([5, 24], "0 to 23, got 24"),
        ([-1], "0 to 23"),
    ):
        with pytest.raises(RequestError, match=words):
            llm.generate([[5, 6], prompt])
    with pytest.raises(UsageError, match="token ids without a tokenizer"):
        llm.generate("text")
    with pytest.raises(UsageError, match="stop"):
        llm.generate([[5]], SamplingParams(stop="x"))
    llm.add_request("a", [5, 6], SamplingParams(max_tokens=2))
    with pytest.raises(UsageError, match="not in use"):
        llm.add_request("a", [5, 6])
    while llm.has_unfinished():
        llm.step()
    assert_idle(llm)


@pytest.mark.parametrize("k", [0, 3])
def test_a_stream_gives_what_generate_gives(k: int) -> None:
    llm = make_llm(embedded_checkpoint(), k, max_model_len=256)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    want = llm.generate("class Queue:\n    def", params)[0].outputs[0]
    chunks = list(llm.stream("class Queue:\n    def", params))
    assert [token for chunk in chunks for token in chunk.token_ids] == want.token_ids
    assert "".join(chunk.text for chunk in chunks) == want.text
    assert [chunk.finish_reason for chunk in chunks][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 40
    assert_idle(llm)


def test_closing_a_stream_aborts(small: Path) -> None:
    llm = make_llm(small, 3)
    stream = llm.stream(prompt_of(40, 1), SamplingParams(max_tokens=50, ignore_eos=True))
    assert next(stream).token_ids
    assert llm.core.allocator.owners
    stream.close()  # type: ignore[attr-defined]  # it is a generator behind its Iterator type
    collect(llm.step(), {}, {})
    assert_idle(llm)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_stops_do_not_depend_on_drafts(k: int) -> None:
    """Stop string across tokens, stop id, min_tokens: text, ids, reason and usage as without drafts (case B38)."""
    folder, prompt = embedded_checkpoint(), "def add(a, b):\n    "
    plain, llm = make_llm(folder, 0, max_model_len=256), make_llm(folder, k, max_model_len=256)
    free = plain.generate(prompt, SamplingParams(max_tokens=30, ignore_eos=True))[0].outputs[0]
    middle = free.text[9:14]
    assert middle
    for params in (
        SamplingParams(max_tokens=30, ignore_eos=True, stop=middle),
        SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=[free.token_ids[7]]),
        SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=[free.token_ids[7]], min_tokens=12),
    ):
        want, got = (engine.generate(prompt, params)[0] for engine in (plain, llm))
        assert got.outputs[0] == want.outputs[0]
        assert got.usage == want.usage
        assert got.usage.completion_tokens == len(got.outputs[0].token_ids)
    cut = llm.generate(prompt, SamplingParams(max_tokens=30, ignore_eos=True, stop=middle))[0].outputs[0]
    assert cut.finish_reason == "stop"
    assert cut.text == free.text[: free.text.index(middle)]
    assert_idle(llm)


def test_a_failing_step_ends_its_requests_and_nothing_else(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(small, 3)
    want = tokens(llm, prompt_of(20, 2), 8)
    forward, calls = llm.core.model.forward, 0

    def fails_once(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("planted")
        return forward(*args, **kwargs)

    monkeypatch.setattr(llm.core.model, "forward", fails_once)
    output = llm.generate([prompt_of(20, 2)], SamplingParams(max_tokens=8, ignore_eos=True))[0].outputs[0]
    assert output.finish_reason == "error"
    assert output.error == "RuntimeError: planted"
    assert output.token_ids == want[: len(output.token_ids)]
    assert llm.metrics.failed_steps == 1
    assert_idle(llm)
    assert tokens(llm, prompt_of(20, 2), 8) == want


def test_a_value_that_is_not_finite_faults_its_own_request_by_name(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(small, 2, kv_cache_dtype="fp8_e4m3", allow_unit_scales=True, max_num_batched_tokens=256)
    good, bad = prompt_of(12, 3), [23, *prompt_of(12, 4, vocab=22)]
    assert 23 not in good
    alone = tokens(llm, good, 6)
    assert 23 not in alone
    embed = llm.core.model.embed
    poisoned = embed.clone()
    poisoned[23] = torch.inf
    monkeypatch.setattr(llm.core.model, "embed", poisoned)
    llm.add_request("good", good, SamplingParams(max_tokens=6, ignore_eos=True))
    llm.add_request("bad", bad, SamplingParams(max_tokens=6, ignore_eos=True))
    found: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    errors = []
    while llm.has_unfinished():
        chunks = llm.step()
        collect(chunks, found, ends)
        errors += [chunk.error for chunk in chunks if chunk.error]
    assert ends == {"good": "length", "bad": "error"}
    assert found["good"] == alone
    assert len(errors) == 1
    assert "request bad" in errors[0]
    assert "not finite" in errors[0]
    assert_idle(llm)


@pytest.mark.parametrize("k", [0, 3])
def test_samples_depend_on_their_seed_alone(small: Path, k: int) -> None:
    """Not on batch mates, chunks or preemption; completion 0 of n is that of n = 1."""
    prompt, mates = prompt_of(40, 6), [prompt_of(length, length) for length in (9, 30, 61)]
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, top_k=12, seed=7)
    want = make_llm(small, k, max_num_batched_tokens=256).generate([prompt], params)[0].outputs[0].token_ids
    llm = make_llm(small, k, max_num_batched_tokens=24)
    other = SamplingParams(max_tokens=25, ignore_eos=True, temperature=0.7, seed=1)
    results = llm.generate([*mates, prompt], [other] * 3 + [params])
    assert results[-1].outputs[0].token_ids == want
    many = llm.generate(
        [prompt], SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, top_k=12, seed=7, n=3)
    )
    assert many[0].outputs[0].token_ids == want
    assert len({tuple(output.token_ids) for output in many[0].outputs}) == 3
    assert many[0].usage.completion_tokens == 60
    assert_idle(llm)

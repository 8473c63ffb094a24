"""Log probabilities at the edges: preempted prompts, full models, filters, stops inside a window (case B40)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.engine.lanes import assert_idle, make_llm, prompt_of
from tests.oracle import oracle_logits

from page4 import LLM, SamplingParams
from page4.engine.output import RequestOutput
from page4.engine.sampling import Logprobs

PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((17, 46, 48, 53, 67, 60, 82, 98), start=31)]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=2)
TOLERANCE = 1e-4


def _by_oracle(folder: Path, result: RequestOutput, index: int = 0) -> tuple[list[int], torch.Tensor]:
    """The whole sequence, and the oracle's log probabilities of what follows each of its tokens [T, V]."""
    ids = result.prompt_token_ids + result.outputs[index].token_ids
    return ids, oracle_logits(folder, ids).double().log_softmax(-1)


def _check(entries: list[Logprobs], tokens: list[int], want: torch.Tensor, most: int) -> None:
    assert len(entries) == len(tokens)
    for entry, token, row in zip(entries, tokens, want, strict=True):
        own, best = entry[0], entry[1:]
        assert own.token_id == token
        assert len(best) == most
        assert [item.rank for item in best] == list(range(1, most + 1))
        for item in entry:
            assert item.logprob == pytest.approx(float(row[item.token_id]), abs=TOLERANCE)
            assert item.logprob < 0, "no token of a random checkpoint is certain"
        # The reported best really are the best: the oracle has no better token outside them.
        others = [float(row[t]) for t in range(len(row)) if t not in {item.token_id for item in best}]
        assert all(item.logprob > max(others) - TOLERANCE for item in best)


def _check_result(folder: Path, result: RequestOutput) -> None:
    output, prompt = result.outputs[0], result.prompt_token_ids
    ids, want = _by_oracle(folder, result)
    assert output.logprobs is not None
    _check(output.logprobs, output.token_ids, want[len(prompt) - 1 : len(ids) - 1], 3)
    assert output.cumulative_logprob == pytest.approx(sum(entry[0].logprob for entry in output.logprobs))
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None, "nothing precedes the first token"
    entries = [entry for entry in result.prompt_logprobs if entry is not None]
    _check(entries, prompt[1:], want[: len(prompt) - 1], 2)


@pytest.fixture(scope="module")
def first(small: Path) -> list[RequestOutput]:
    """Without drafts, one request at a time."""
    return make_llm(small, 0, max_num_batched_tokens=32, max_num_seqs=1).generate(PROMPTS, PARAMS)


def _agree(got: list[RequestOutput], want: list[RequestOutput]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
        pairs = [(mine.outputs[0].logprobs, theirs.outputs[0].logprobs), (mine.prompt_logprobs, theirs.prompt_logprobs)]
        for a, b in pairs:
            assert a is not None
            assert b is not None
            assert len(a) == len(b)
            for left, right in zip(a, b, strict=True):
                if left is None or right is None:
                    assert left is right
                    continue
                by_token = {item.token_id: item.logprob for item in right}
                for item in left:
                    assert item.logprob == pytest.approx(by_token[item.token_id], abs=TOLERANCE)


@pytest.mark.parametrize(("k", "running"), [(0, 1), (0, 8), (3, 1), (3, 8)])
def test_logprobs_are_the_oracles(small: Path, first: list[RequestOutput], k: int, running: int) -> None:
    llm = make_llm(small, k, max_num_batched_tokens=32, max_num_seqs=running)
    results = llm.generate(PROMPTS, PARAMS)
    for result in results:
        _check_result(small, result)
    _agree(results, first)
    if k:
        assert 0 < llm.metrics.accepted < llm.metrics.drafted, "the test must see acceptance and rejection"
    assert_idle(llm)


def _tight(folder: Path, k: int, **options: int) -> LLM:
    """An engine with states for three requests, and too few pages for their K/V."""
    roomy = make_llm(folder, k, block_size=4)
    pages = 4 * roomy.core.scheduler.sizes.pages_per_state + 2
    memory = pages * roomy.core.arena.layout.page_bytes
    return make_llm(folder, k, block_size=4, max_model_len=112, kv_cache_memory_bytes=memory, **options)


@pytest.mark.parametrize("k", [0, 3])
def test_logprobs_survive_preemption(small: Path, first: list[RequestOutput], k: int) -> None:
    llm = _tight(small, k, max_num_batched_tokens=32)
    results = llm.generate(PROMPTS, PARAMS)
    assert llm.metrics.preemptions > 0, "the test must see preemption"
    _agree(results, first)
    assert_idle(llm)


def test_a_prompt_is_scored_once_when_preempted_half_way(small: Path, first: list[RequestOutput]) -> None:
    llm = make_llm(small, 3, max_num_batched_tokens=32)
    llm.add_request("r", PROMPTS[7], PARAMS)
    llm.step()
    llm.step()
    [request] = llm.core.scheduler.running
    assert 0 < request.num_computed < request.prompt_len
    llm.core.scheduler.preempt(request)
    while llm.has_unfinished():
        llm.step()
    found = llm.prompt_logprobs("r")
    want = first[7].prompt_logprobs
    assert want is not None
    assert len(found) == len(want) == 98
    for mine, theirs in zip(found[1:], want[1:], strict=True):
        assert mine[0].token_id == theirs[0].token_id
        assert mine[0].logprob == pytest.approx(theirs[0].logprob, abs=TOLERANCE)


def test_logprobs_of_a_prompt_that_fills_the_model(small: Path) -> None:
    """No token follows, but the prompt is scored, and the request ends with `length`."""
    llm = make_llm(small, 3, max_model_len=46, max_num_batched_tokens=32)
    [result] = llm.generate([PROMPTS[1]], PARAMS)
    assert (result.outputs[0].token_ids, result.outputs[0].finish_reason) == ([], "length")
    assert result.outputs[0].logprobs == []
    assert result.prompt_logprobs is not None
    _, want = _by_oracle(small, result)
    _check([entry for entry in result.prompt_logprobs if entry is not None], PROMPTS[1][1:], want[:-1], 2)
    assert_idle(llm)


@pytest.mark.parametrize("k", [0, 3])
def test_logprobs_are_raw_whatever_filters_draw(small: Path, k: int) -> None:
    """Temperature and filters change what is drawn, not what is reported; a masked end token does neither."""
    params = SamplingParams(
        max_tokens=9, min_tokens=9, temperature=0.7, top_k=4, top_p=0.9, seed=5, n=2, logprobs=0, stop_token_ids=[7]
    )
    llm = make_llm(small, k, max_num_batched_tokens=32)
    for result in llm.generate(PROMPTS[:3], params):
        assert result.prompt_logprobs is None
        for index, output in enumerate(result.outputs):
            ids, want = _by_oracle(small, result, index)
            assert output.logprobs is not None
            _check(output.logprobs, output.token_ids, want[len(result.prompt_token_ids) - 1 : len(ids) - 1], 0)
            assert not {2, 7} & set(output.token_ids), "min_tokens forbids the end of text and stop ids"


def test_logprob_counts_follow_the_stop_inside_a_window(small: Path, first: list[RequestOutput]) -> None:
    """A stop token cuts tokens, log probabilities and usage at the same place."""
    tokens = first[4].outputs[0].token_ids
    for place in range(2, 9):
        stop = tokens[place]
        cut = tokens.index(stop) + 1
        params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1, stop_token_ids=[stop])
        [result] = make_llm(small, 3, max_num_batched_tokens=32).generate([PROMPTS[4]], params)
        [output] = result.outputs
        assert output.token_ids == tokens[:cut]
        assert output.logprobs is not None
        assert len(output.logprobs) == result.usage.completion_tokens == cut
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)

"""Streams, calls and aborts share an engine: every chunk reaches its owner, and what ends is free at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.lanes import assert_idle, collect, make_llm, prompt_of, tokens

from page4 import SamplingParams

PROMPT = prompt_of(20, 41)


@pytest.mark.parametrize("k", [0, 3])
def test_a_stream_is_generate_in_pieces(small: Path, k: int) -> None:
    llm = make_llm(small, k)
    params = SamplingParams(max_tokens=15, ignore_eos=True, logprobs=1, n=2, temperature=0.8, seed=4)
    [want] = llm.generate([PROMPT], params)
    chunks = list(llm.stream(PROMPT, params))
    for index, output in enumerate(want.outputs):
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert [token for chunk in mine for token in chunk.token_ids] == output.token_ids
        assert [entry for chunk in mine for entry in chunk.logprobs or ()] == output.logprobs
        assert [chunk.finish_reason for chunk in mine] == [None] * (len(mine) - 1) + ["length"]
        assert mine[-1].usage.completion_tokens == len(output.token_ids)
    assert len({chunk.request_id for chunk in chunks}) == 1
    assert_idle(llm)


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_closing_a_stream_frees_everything(small: Path, taken: int) -> None:
    llm = make_llm(small, 3)
    stream = llm.stream(prompt_of(60, 42), SamplingParams(max_tokens=40, ignore_eos=True, prompt_logprobs=0))
    for _ in range(taken):
        next(stream)
    stream.close()
    assert_idle(llm)
    assert list(stream) == []
    forgotten = llm.stream(PROMPT)
    del forgotten
    assert_idle(llm)


def test_streams_and_calls_share_an_engine(small: Path) -> None:
    """Whoever steps the engine, each chunk reaches the one who asked for it."""
    llm = make_llm(small, 2)
    prompts = [prompt_of(length, 43) for length in (9, 14, 22, 30)]
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    alone = [tokens(make_llm(small, 0), prompt, 10) for prompt in prompts]
    llm.add_request("mine", prompts[3], params)
    streams = [llm.stream(prompt, params) for prompt in prompts[:2]]
    found: list[list[int]] = [list(next(stream).token_ids) for stream in streams]
    assert llm.generate([prompts[2]], params)[0].outputs[0].token_ids == alone[2]
    for mine, stream in zip(found, streams, strict=True):
        for chunk in stream:
            mine.extend(chunk.token_ids)
    low: dict[str, list[int]] = {}
    while llm.has_unfinished():
        collect(llm.step(), low, {})
    assert [*found, alone[2], low["mine"]] == alone
    assert set(low) == {"mine"}
    assert_idle(llm)


@pytest.mark.parametrize("steps", range(7))
def test_abort_at_any_time(small: Path, steps: int) -> None:
    """Waiting, half a prompt, first token, mid-window: all is free at once, and the others do not notice."""
    llm = make_llm(small, 3, max_num_seqs=2, max_num_batched_tokens=24)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    for number in range(4):
        llm.add_request(str(number), prompt_of(40, 50 + number), params)
    found: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    for _ in range(steps):
        collect(llm.step(), found, ends)
    for name in ("0", "2", "3", "3", "nobody"):
        llm.abort(name)
    held = {owner.split(":")[1] for owner in llm.core.allocator.owners}
    assert held <= {"1"}
    while llm.has_unfinished():
        collect(llm.step(), found, ends)
    assert ends == {"0": "abort", "1": "length", "2": "abort", "3": "abort"}
    assert found["1"] == tokens(make_llm(small, 0), prompt_of(40, 51), 12)
    assert_idle(llm)


def test_a_batch_with_a_mixture_of_parameters(small: Path) -> None:
    """Greedy, sampled, scored, stopped and repeated requests in one call equal their own calls."""
    each = [
        SamplingParams(max_tokens=9, ignore_eos=True),
        SamplingParams(max_tokens=5, temperature=1.3, seed=7, ignore_eos=True, n=3),
        SamplingParams(max_tokens=12, temperature=0.5, top_k=5, min_p=0.02, seed=8, logprobs=2),
        SamplingParams(max_tokens=None, stop_token_ids=[9, 10], min_tokens=3, prompt_logprobs=0),
        SamplingParams(max_tokens=1, ignore_eos=True),
    ]
    prompts = [prompt_of(length, 49) for length in (3, 38, 20, 50, 11)]
    llm = make_llm(small, 3, max_model_len=96)
    seen: list[str] = []
    together = llm.generate(prompts, each, on_chunk=lambda chunk: seen.append(chunk.request_id))
    assert {result.request_id for result in together} == set(seen)
    for prompt, params, result in zip(prompts, each, together, strict=True):
        [alone] = make_llm(small, 3, max_model_len=96).generate([prompt], params)
        assert [o.token_ids for o in result.outputs] == [o.token_ids for o in alone.outputs]
        assert [(o.finish_reason, o.stop_reason) for o in result.outputs] == [
            (o.finish_reason, o.stop_reason) for o in alone.outputs
        ]
        assert result.usage == alone.usage
        assert len(result.outputs) == params.n
        assert (result.prompt_logprobs is None) == (params.prompt_logprobs is None)
        assert all((o.logprobs is None) == (params.logprobs is None) for o in result.outputs)
    assert llm.generate([], SamplingParams()) == []
    assert_idle(llm)

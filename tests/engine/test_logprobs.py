"""Log probabilities are the target's at the emitted positions, whatever k, chunks, batch mates or preemption (case B40)."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.lanes import make_llm, prompt_of
from tests.oracle import oracle_logits

from page4 import LLM, SamplingParams
from page4.engine.output import RequestOutput

LENGTHS = (17, 46, 48, 53, 67, 60, 82, 98)
PROMPTS = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS, start=31)]
COUNT = 12
PARAMS = SamplingParams(max_tokens=COUNT, ignore_eos=True, logprobs=2, prompt_logprobs=0)


@pytest.fixture(scope="module")
def expected(small: Path) -> list[tuple[list[float], list[list[float]]]]:
    """From transformers: log probability of each prompt token but the first, and all values at each output position."""
    found = []
    plain = make_llm(small, 0, max_num_batched_tokens=512)
    for prompt in PROMPTS:
        output = plain.generate([prompt], SamplingParams(max_tokens=COUNT, ignore_eos=True))[0].outputs[0].token_ids
        rows = oracle_logits(small, [*prompt, *output]).double().log_softmax(-1)
        own = [float(rows[i, token]) for i, token in enumerate(prompt[1:])]
        found.append((own, rows[len(prompt) - 1 : len(prompt) - 1 + COUNT].tolist()))
    return found


def check(result: RequestOutput, prompt: list[int], want: tuple[list[float], list[list[float]]]) -> None:
    own, rows = want
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(prompt)
    assert result.prompt_logprobs[0] is None
    for entry, token, value in zip(result.prompt_logprobs[1:], prompt[1:], own, strict=True):
        assert entry is not None
        assert entry[0].token_id == token
        assert entry[0].logprob == pytest.approx(value, abs=1e-4)
        assert entry[0].logprob < 0.0
    output = result.outputs[0]
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids) == COUNT
    for entry, token, row in zip(output.logprobs, output.token_ids, rows, strict=True):
        assert entry[0].token_id == token
        assert entry[0].logprob == pytest.approx(row[token], abs=1e-4)
        assert entry[0].logprob < 0.0
        assert [top.logprob for top in entry[1:]] == pytest.approx(sorted(row, reverse=True)[:2], abs=1e-4)
    assert output.cumulative_logprob == pytest.approx(sum(entry[0].logprob for entry in output.logprobs))


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("together", [False, True])
def test_b40_logprobs_do_not_depend_on_drafts_chunks_or_batch_mates(
    small: Path, expected: list[tuple[list[float], list[list[float]]]], k: int, together: bool
) -> None:
    llm = make_llm(small, k, max_num_batched_tokens=32)
    if together:
        results = llm.generate(PROMPTS, PARAMS)
    else:
        results = [llm.generate([prompt], PARAMS)[0] for prompt in PROMPTS]
    for result, prompt, want in zip(results, PROMPTS, expected, strict=True):
        check(result, prompt, want)


def test_logprobs_survive_preemption(small: Path, expected: list[tuple[list[float], list[list[float]]]]) -> None:
    sizes = make_llm(small, 3, block_size=4).core.scheduler.sizes
    memory = (4 * sizes.pages_per_state + 2) * sizes.page_bytes
    llm: LLM = make_llm(small, 3, block_size=4, max_model_len=128, kv_cache_memory_bytes=memory)
    results = llm.generate(PROMPTS, PARAMS)
    assert llm.metrics.preemptions > 0
    for result, prompt, want in zip(results, PROMPTS, expected, strict=True):
        check(result, prompt, want)

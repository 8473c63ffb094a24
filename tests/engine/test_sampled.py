"""Sampled decoding end to end: the target's exact distribution at any k (B37), and results that depend on nothing else.

The statistics run many short requests together. Their expected values come from transformers' logits alone.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.lanes import assert_idle, make_llm, prompt_of
from tests.oracle import oracle_model, total_order
from torch import Tensor

from page4 import LLM, SamplingParams
from page4.engine import core
from page4.engine.verifying import verify

PROMPT = prompt_of(5, 61)
FILTERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 6},
    {"temperature": 1.4, "top_p": 0.7},
    {"temperature": 1.2, "min_p": 0.3},
    {"temperature": 0.9, "top_k": 10, "top_p": 0.9, "min_p": 0.1},
]
SAMPLES = 1024


def _target(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """[V] -> [V] fp64: the distribution after the filters, token by token in plain Python."""
    weights = {t: math.exp((float(x) - float(logits.max())) / temperature) for t, x in enumerate(logits)}
    weights = {t: w for t, w in weights.items() if w >= min_p}
    best = sorted(weights, key=lambda t: (-weights[t], t))[: top_k or None]
    total, kept, mass = sum(weights[t] for t in best), [], 0.0
    for token in best:
        if mass < top_p * total:
            kept.append(token)
        mass += weights[token]
    out = torch.zeros(len(logits), dtype=torch.float64)
    for token in kept:
        out[token] = weights[token] / sum(weights[t] for t in kept)
    return out


Oracle = tuple[Tensor, Tensor, Tensor]


def _oracle(folder: Path, prompt: list[int]) -> Oracle:
    """transformers' logits after a prompt [V], after it and a token [V, V], after it and two tokens [V, V, V]."""
    model, vocab = oracle_model(folder), 24
    ends = [[*prompt, a, b] for a in range(vocab) for b in range(vocab)]
    with torch.no_grad(), total_order():
        logits = model(torch.tensor(ends), use_cache=False).logits.view(vocab, vocab, len(prompt) + 2, vocab)
    return logits[0, 0, -3], logits[:, 0, -2], logits[:, :, -1]


@pytest.fixture(scope="module")
def oracle(small: Path) -> Oracle:
    return _oracle(small, PROMPT)


def _exact(oracle: Oracle, filters: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The exact distributions [V] of the first three tokens, what comes before each marginalised."""
    first = _target(oracle[0], **filters)
    pairs = first[:, None] * torch.stack([_target(row, **filters) for row in oracle[1]])
    third = torch.zeros_like(first)
    for a, b in pairs.nonzero().tolist():
        third += pairs[a, b] * _target(oracle[2][a, b], **filters)
    return first, pairs.sum(0), third


def _worst_sigma(tokens: list[int], p: Tensor) -> float:
    """Largest deviation of a token's count from its expectation, in standard deviations; inf for an impossible one."""
    n, counts = len(tokens), torch.bincount(torch.tensor(tokens), minlength=len(p)).double()
    worst = 0.0
    for count, probability in zip(counts.tolist(), p.tolist(), strict=True):
        if probability == 0 or probability == 1:
            worst = max(worst, math.inf if count != n * probability else 0.0)
        elif n * probability >= 5:  # below, a count is no normal variable
            worst = max(worst, abs(count - n * probability) / math.sqrt(n * probability * (1 - probability)))
    return worst


def _samples(llm: LLM, prompt: list[int], filters: dict[str, Any], count: int = SAMPLES) -> list[list[int]]:
    """Three tokens of `count` completions, each of another seed, all in flight together."""
    params = SamplingParams(max_tokens=3, ignore_eos=True, seed=1234, n=count, **filters)
    return [output.token_ids for output in llm.generate([prompt], params)[0].outputs]


def _big(folder: Path, k: int) -> LLM:
    return make_llm(folder, k, max_model_len=64, max_num_seqs=128, max_num_batched_tokens=6000)


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_tokens_have_the_targets_exact_distribution(
    small: Path, oracle: Oracle, k: int, filters: dict[str, Any]
) -> None:
    """Drafts or not, each place has the distribution that follows from the oracle's logits, within 4 sigma."""
    llm = _big(small, k)
    found = _samples(llm, PROMPT, filters)
    for place, p in enumerate(_exact(oracle, filters)):
        worst = _worst_sigma([tokens[place] for tokens in found], p)
        assert worst < 4, f"token {place}: {worst:.2f} sigma"
    if k:
        assert 0.02 < llm.metrics.accepted / llm.metrics.drafted < 0.98, "the test must see both outcomes"
    assert_idle(llm)


@pytest.mark.parametrize("swapped", [False, True], ids=["right", "swapped"])
def test_draft_probabilities_belong_to_their_request(
    small: Path, oracle: Oracle, swapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts side by side (case B37). The power check: with each other's q the statistic has to fail."""

    def verify_swapped(logits: Tensor, asked: Any, q: dict[str, Tensor]) -> Any:
        """Every request gets the q of one with the other prompt, as if it were looked up by row."""
        sides = [[owner for owner in q if owner.split(":")[1] == name] for name in ("first", "second")]
        partner = dict(zip(sides[0], sides[1], strict=False)) | dict(zip(sides[1], sides[0], strict=False))
        exchanged = {owner: q[partner.get(owner, owner)] for owner in q}
        # A window may be longer than the other's: what is missing keeps its own rows.
        whole = {o: torch.cat([rows, q[o][rows.shape[0] :]]) for o, rows in exchanged.items()}
        return verify(logits, asked, whole)

    if swapped:
        monkeypatch.setattr(core, "verify", verify_swapped)
    other = prompt_of(6, 77)
    llm = _big(small, 2)
    params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=1.0, seed=99, n=SAMPLES)
    found: dict[str, dict[int, list[int]]] = {"first": {}, "second": {}}
    # Queued by turns, so that both prompts are in every step.
    for name, prompt in (("first", PROMPT), ("second", other)):
        llm.add_request(name, prompt, params)
    llm.core.scheduler.waiting.sort(key=lambda request: request.index)
    while llm.has_unfinished():
        for chunk in llm.step():
            found[chunk.request_id].setdefault(chunk.index, []).extend(chunk.token_ids)
    worst = 0.0
    for name, logits in (("first", oracle), ("second", _oracle(small, other))):
        for place, p in enumerate(_exact(logits, {"temperature": 1.0})):
            tokens = [found[name][index][place] for index in range(SAMPLES)]
            worst = max(worst, _worst_sigma(tokens, p))
    if swapped:
        assert worst > 6, f"{worst:.2f} sigma: the test is too weak to see a wrong q"
    else:
        assert worst < 4, f"{worst:.2f} sigma"


def _tight(folder: Path, k: int, requests: int) -> LLM:
    """States for `requests` requests and too few pages for their K/V, so that windows have to preempt."""
    roomy = make_llm(folder, k, block_size=4)
    pages = (1 + requests) * roomy.core.scheduler.sizes.pages_per_state + 2
    memory = pages * roomy.core.arena.layout.page_bytes
    return make_llm(folder, k, block_size=4, max_model_len=100, kv_cache_memory_bytes=memory)


@pytest.mark.parametrize("k", [0, 3])
def test_a_seed_fixes_the_tokens_whatever_else_happens(small: Path, k: int) -> None:
    """Batch mates, chunk sizes, preemption, and seeds of other requests change nothing; another seed does."""
    prompts = [prompt_of(length, 70 + length) for length in (1, 9, 36, 50, 64, 70)]
    params = [SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9, seed=100 + i) for i in range(6)]
    lone = make_llm(small, k, max_num_seqs=1)
    alone = [
        lone.generate([prompt], each)[0].outputs[0].token_ids for prompt, each in zip(prompts, params, strict=True)
    ]
    tight = _tight(small, k, 3)
    engines = [make_llm(small, k), make_llm(small, k, max_num_batched_tokens=9, max_num_seqs=2), tight]
    for llm in engines:
        results = llm.generate(prompts, params)
        assert [result.outputs[0].token_ids for result in results] == alone
        backwards = llm.generate(prompts[::-1], params[::-1])
        assert [result.outputs[0].token_ids for result in backwards][::-1] == alone
        assert_idle(llm)
    assert tight.metrics.preemptions > 0, "the test must see preemption"
    again = engines[0].generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9, seed=3))
    assert [result.outputs[0].token_ids for result in again] != alone
    if k:
        assert 0 < engines[0].metrics.accepted < engines[0].metrics.drafted


def test_a_request_without_a_seed_follows_the_engines(small: Path) -> None:
    """Engines of one seed agree, request by request in order of arrival; no two requests share their numbers."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0)
    runs = [make_llm(small, 2, seed=seed).generate([PROMPT] * 3, params) for seed in (5, 5, 6)]
    found = [[result.outputs[0].token_ids for result in run] for run in runs]
    assert found[0] == found[1]
    assert found[0] != found[2]
    assert len({tuple(tokens) for tokens in found[0]}) == 3


@pytest.mark.parametrize("k", [0, 3])
def test_n_completions(small: Path, k: int) -> None:
    """They differ from each other; the first is what n = 1 gives; usage counts them all and the prompt once."""
    llm = make_llm(small, k)
    settings: dict[str, Any] = {"max_tokens": 18, "ignore_eos": True, "temperature": 1.0, "seed": 21}
    [one] = llm.generate([PROMPT], SamplingParams(**settings))
    [three] = llm.generate([PROMPT], SamplingParams(**settings, n=3))
    assert [output.index for output in three.outputs] == [0, 1, 2]
    assert three.outputs[0] == one.outputs[0]
    assert len({tuple(output.token_ids) for output in three.outputs}) == 3
    assert (three.usage.prompt_tokens, three.usage.completion_tokens) == (len(PROMPT), 54)
    [greedy] = llm.generate([PROMPT], SamplingParams(max_tokens=6, ignore_eos=True, n=3))
    assert len({tuple(output.token_ids) for output in greedy.outputs}) == 1
    assert_idle(llm)


def test_top_k_of_one_is_greedy(small: Path) -> None:
    greedy = SamplingParams(max_tokens=16, ignore_eos=True)
    narrow = SamplingParams(max_tokens=16, ignore_eos=True, temperature=2.0, top_k=1, seed=8)
    [want] = make_llm(small, 0).generate([PROMPT], greedy)
    for k in (0, 3):
        assert make_llm(small, k).generate([PROMPT], narrow)[0].outputs[0].token_ids == want.outputs[0].token_ids

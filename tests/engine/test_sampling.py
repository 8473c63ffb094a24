"""Distributions against exact arithmetic, draws against their law, log probabilities against a table by hand."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from page4.engine.chance import Purpose, uniform
from page4.engine.params import SamplingParams
from page4.engine.sampling import Filters, distribution, draw, greedy, logprobs, mask_tokens

CPU = torch.device("cpu")


def filtered(p: list[float], **params: Any) -> list[float]:
    settings = SamplingParams(**{"temperature": 1.0, **params})
    logits = torch.tensor([p]).log()
    return [float(x) for x in distribution(logits, Filters.of([settings], CPU))[0].tolist()]


def by_hand(p: list[Fraction], params: SamplingParams) -> list[Fraction]:
    """The same filters on exact numbers (temperature 1)."""
    alive = [x > 0 and x >= Fraction(params.min_p) * max(p) for x in p]
    order = sorted((i for i in range(len(p)) if alive[i]), key=lambda i: (-p[i], i))
    if params.top_k > 0:
        order = order[: params.top_k]
    total = sum(p[i] for i in order)
    kept, mass = [], Fraction(0)
    for i in order:
        if params.top_p < 1 and mass >= Fraction(params.top_p) * total:
            break
        kept.append(i)
        mass += p[i]
    left = sum(p[i] for i in kept)
    return [p[i] / left if i in kept else Fraction(0) for i in range(len(p))]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.5, 0.25, 0.125, 0.125]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 3}, [4 / 7, 2 / 7, 1 / 7, 0]),
        ({"top_k": 9}, [0.5, 0.25, 0.125, 0.125]),
        ({"top_p": 0.5}, [1, 0, 0, 0]),
        ({"top_p": 0.51}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.8}, [4 / 7, 2 / 7, 1 / 7, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"min_p": 0.3}, [2 / 3, 1 / 3, 0, 0]),
        ({"min_p": 1.0}, [1, 0, 0, 0]),
        ({"top_k": 2, "top_p": 0.7}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 2, "top_p": 0.6}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, [16 / 22, 4 / 22, 1 / 22, 1 / 22]),
        ({"temperature": 1e-300}, [1, 0, 0, 0]),
    ],
)
def test_filters_by_hand(params: dict[str, Any], expected: list[float]) -> None:
    assert filtered([0.5, 0.25, 0.125, 0.125], **params) == pytest.approx(expected, abs=1e-6)


# No sum of these weights lies on the edge of one of these top_p, where rounding decides.
@given(
    st.lists(st.integers(0, 12), min_size=2, max_size=12).filter(any),
    st.integers(0, 13),
    st.sampled_from([1.0, 0.999, 0.9001, 0.7303, 0.3107, 0.0503]),
    st.sampled_from([0.0, 0.07, 0.43, 0.97]),
)
def test_filters_against_exact_arithmetic(weights: list[int], top_k: int, top_p: float, min_p: float) -> None:
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    exact = [Fraction(w, sum(weights)) for w in weights]
    got = filtered([float(x) for x in exact], top_k=top_k, top_p=top_p, min_p=min_p)
    assert got == pytest.approx([float(x) for x in by_hand(exact, params)], abs=1e-5)


def test_a_row_does_not_depend_on_the_filters_of_other_rows(generator: torch.Generator) -> None:
    logits = torch.randn(4, 300, generator=generator) * 3
    params = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.3, top_k=5),
        SamplingParams(temperature=1.7, top_p=0.8),
        SamplingParams(temperature=0.9, min_p=0.1),
    ]
    together = distribution(logits, Filters.of(params, CPU))
    for i, one in enumerate(params):
        assert torch.equal(together[i : i + 1], distribution(logits[i : i + 1], Filters.of([one], CPU)))


def test_greedy_takes_the_lowest_id_of_equals_and_reports_unusable_rows() -> None:
    nan, inf = math.nan, math.inf
    rows = [[1.0, 3.0, 3.0], [-inf, -inf, -2.0], [nan, 1.0, 2.0], [1.0, inf, 0.0], [-inf] * 3, [0.0, -0.0, 0.0]]
    tokens, usable = greedy(torch.tensor(rows))
    assert usable == [True, True, False, False, False, True]
    assert [tokens[i] for i in (0, 1, 5)] == [1, 2, 0]


def test_masked_tokens_are_masked_in_a_copy() -> None:
    logits = torch.zeros(3, 4)
    assert mask_tokens(logits, [0, 1], [[], []]) is logits
    masked = mask_tokens(logits, [0, 2], [[1, 3], [0]])
    assert masked.isinf().nonzero().tolist() == [[0, 1], [0, 3], [2, 0]]
    assert not logits.isinf().any()


def test_draws_follow_the_weights_and_never_give_a_zero() -> None:
    weights = torch.tensor([[0.0, 0.2, 0.0, 0.5, 0.3, 0.0]])
    n = 40_000
    tokens = draw(weights.expand(n, 6), [uniform(1, i, Purpose.TOKEN) for i in range(n)])
    for token, p in enumerate(weights[0].tolist()):
        sigma = math.sqrt(n * p * (1 - p))
        assert abs(tokens.count(token) - n * p) <= 4 * sigma


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_draws_at_the_ends(u: float) -> None:
    weights = torch.tensor([[0.0, 1e-30, 0.7, 1e-30, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0, 0.0]])
    tokens = draw(weights, [u] * 3)
    assert tokens[0] in (1, 2, 3) and tokens[1:] == [4, 0]


def test_logprobs_by_hand() -> None:
    p = [[0.5, 0.25, 0.125, 0.125], [0.125, 0.5, 0.25, 0.125]]
    first, second, none = logprobs(torch.tensor([*p, p[0]]).log() + 3, [3, 1, 0], [2, 1, 0])
    assert [(e.token_id, e.rank) for e in first] == [(3, 4), (0, 1), (1, 2)]
    assert [e.logprob for e in first] == pytest.approx([math.log(x) for x in (0.125, 0.5, 0.25)], abs=1e-6)
    assert [(e.token_id, e.rank) for e in second] == [(1, 1), (1, 1)]
    assert [(e.token_id, e.rank) for e in none] == [(0, 1)]
    assert logprobs(torch.zeros(0, 4), [], []) == []


def test_a_logprob_is_zero_only_for_certainty() -> None:
    nearly = torch.tensor([[30.0, 0.0]])
    assert logprobs(nearly, [0], [0])[0][0].logprob == pytest.approx(-math.exp(-30), rel=1e-3)
    certain = torch.tensor([[0.0, -math.inf]])
    assert logprobs(certain, [0], [0])[0][0].logprob == 0.0


def test_more_logprobs_than_tokens_gives_all_tokens() -> None:
    (entry,) = logprobs(torch.zeros(1, 3), [2], [20])
    assert [e.token_id for e in entry] == [2, 0, 1, 2]


def row_of(logits: Tensor, i: int) -> Tensor:
    return logits[i : i + 1]


def test_logprobs_do_not_depend_on_batch_mates(generator: torch.Generator) -> None:
    logits = torch.randn(5, 100, generator=generator)
    together = logprobs(logits, [1, 2, 3, 4, 5], [0, 1, 2, 3, 4])
    assert together == [logprobs(row_of(logits, i), [i + 1], [i])[0] for i in range(5)]

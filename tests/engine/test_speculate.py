"""Accepting drafts: exact rules for greedy, exact distribution for samples (cases B07, B37)."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from page4.engine.chance import Purpose, uniform
from page4.engine.sampling import draw
from page4.engine.speculate import Window, accept_greedy, last_accepted_rows, verify_sampled


def test_next_draft_rows_are_those_of_the_last_accepted_tokens() -> None:
    buffer = [100 + r for r in range(12)]
    rows = last_accepted_rows([0, 4, 8], [0, 3, 1])
    assert [buffer[r] for r in rows] == [100, 107, 109]
    assert last_accepted_rows([0, 1, 9], [0, 7, 2]) == [0, 8, 11]
    with pytest.raises(ValueError, match="zip"):
        last_accepted_rows([0, 4], [1])


@pytest.mark.parametrize(
    ("drafts", "choices", "emitted"),
    [
        ([], [5], [5]),
        ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]),
        ([1, 2, 3], [9, 2, 3, 4], [9]),
        ([1, 2, 3], [1, 9, 3, 4], [1, 9]),
        ([1, 2, 3], [1, 2, 9, 4], [1, 2, 9]),
    ],
)
def test_greedy_accepts_while_the_draft_is_the_choice(
    drafts: list[int], choices: list[int], emitted: list[int]
) -> None:
    assert accept_greedy(drafts, choices) == emitted


SAMPLES = 40_000
P = {1: [0.7, 0.1, 0.1, 0.1], 2: [0.1, 0.1, 0.1, 0.7], 3: [0.4, 0.3, 0.2, 0.1], 4: [0.25, 0.25, 0.5, 0.0]}
UNIFORM = [0.25] * 4
Q = {1: [0.1, 0.2, 0.3, 0.4], 2: [0.5, 0.3, 0.1, 0.1], 3: [0.0, 0.0, 0.5, 0.5], 4: [0.4, 0.1, 0.1, 0.4]}


def sample_windows(
    batch: int,
    q_of: dict[int, list[float]],
    rng: random.Random,
    *,
    lookup: dict[int, int] | None = None,
    k: int = 1,
    samples: int = 10_000,
) -> dict[int, list[Counter[int]]]:
    """Verify `samples` windows of each of 2 requests (more ids repeat them), rows permuted between draft and verify.

    `lookup` says whose q the verifier uses for a request (a fault when it is not its own). Counts by request and place.
    """
    requests = [1] if batch == 1 else [1 + i % 2 for i in range(batch)]
    rounds = -(-samples // min(requests.count(r) for r in set(requests)))
    q_rows = {r: torch.tensor([q] * k) for r, q in q_of.items()}
    counts = {r: [Counter[int]() for _ in range(k + 1)] for r in set(requests)}
    steps_in_one_call = 500
    for start in range(0, rounds, steps_in_one_call):
        entries = [
            (step, slot) for step in range(start, min(rounds, start + steps_in_one_call)) for slot in range(batch)
        ]
        drafted: dict[tuple[int, int], list[int]] = {}
        for j in range(k):
            weights = torch.tensor([q_of[requests[slot]] for _, slot in entries])
            numbers = [uniform(1000 + slot, (k + 1) * step + j, Purpose.DRAFT) for step, slot in entries]
            for entry, token in zip(entries, draw(weights, numbers), strict=True):
                drafted.setdefault(entry, []).append(token)
        rng.shuffle(entries)
        rows = [P[requests[slot]] for _, slot in entries for _ in range(k + 1)]
        windows = []
        for i, (step, slot) in enumerate(entries):
            owner = requests[slot] if lookup is None else lookup[requests[slot]]
            windows.append(Window((k + 1) * i, drafted[step, slot], q_rows[owner], 1000 + slot, (k + 1) * step))
        emitted = verify_sampled(torch.tensor(rows), windows)
        for (_, slot), tokens in zip(entries, emitted, strict=True):
            for place, token in enumerate(tokens):
                counts[requests[slot]][place][token] += 1
    return counts


def worst_sigma(counts: Counter[int], p: list[float]) -> float:
    total = sum(counts.values())
    worst = 0.0
    for token, probability in enumerate(p):
        if probability == 0:
            assert counts[token] == 0
            continue
        sigma = (total * probability * (1 - probability)) ** 0.5
        worst = max(worst, abs(counts[token] - total * probability) / sigma)
    return worst


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_uniform_drafts_leave_the_targets_distribution(batch: int, rng: random.Random) -> None:
    counts = sample_windows(batch, {1: UNIFORM, 2: UNIFORM}, rng, samples=SAMPLES)
    for request, places in counts.items():
        assert sum(places[0].values()) >= SAMPLES
        assert worst_sigma(places[0], P[request]) < 4


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_any_drafts_leave_the_targets_distribution(batch: int, rng: random.Random) -> None:
    for request, places in sample_windows(batch, Q, rng).items():
        assert worst_sigma(places[0], P[request]) < 4


def test_later_places_and_the_bonus_token_have_the_targets_distribution_too(rng: random.Random) -> None:
    for request, places in sample_windows(2, Q, rng, k=3).items():
        for counts in places:
            assert sum(counts.values()) > 200
            assert worst_sigma(counts, P[request]) < 4


def test_the_check_has_power_against_swapped_rows_of_q(rng: random.Random) -> None:
    """The same seeds with the q of the other request must fail, or the tests above see nothing.

    With a uniform q for both requests a swap changes nothing at all, so the swap is of drafts that differ.
    """
    wrong = sample_windows(2, Q, rng, lookup={1: 2, 2: 1})
    assert max(worst_sigma(places[0], P[request]) for request, places in wrong.items()) > 10


@pytest.mark.parametrize("request_id", [3, 4])
def test_tokens_that_the_draft_or_the_target_excludes(request_id: int) -> None:
    n = 10_000
    q = torch.tensor([Q[request_id]])
    drafts = draw(q.expand(n, 4), [uniform(9, i, Purpose.DRAFT) for i in range(n)])
    windows = [Window(2 * i, [d], q, 9, i) for i, d in enumerate(drafts)]
    emitted = verify_sampled(torch.tensor([P[request_id]]).expand(2 * n, 4), windows)
    assert worst_sigma(Counter(tokens[0] for tokens in emitted), P[request_id]) < 4


def test_drafts_without_a_distribution_are_certain_drafts() -> None:
    n = 10_000
    windows = [Window(2 * i, [1], None, 11, i) for i in range(n)]
    emitted = verify_sampled(torch.tensor([P[3]]).expand(2 * n, 4), windows)
    assert worst_sigma(Counter(tokens[0] for tokens in emitted), P[3]) < 4
    assert 0.28 < sum(len(tokens) == 2 for tokens in emitted) / n < 0.32


def test_equal_distributions_accept_everything_and_disjoint_ones_nothing() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0]] * 3)
    other = torch.tensor([[0.0, 0.0, 0.5, 0.5]] * 2)
    for position in range(50):
        assert len(verify_sampled(p, [Window(0, [0, 1], p[:2], 3, position)])[0]) == 3
        (only,) = verify_sampled(p, [Window(0, [2, 3], other, 3, position)])[0]
        assert only in (0, 1)


def test_a_window_does_not_depend_on_its_batch_mates(generator: torch.Generator) -> None:
    def make(i: int) -> tuple[Tensor, Tensor, list[int]]:
        p, q = (torch.rand(rows, 50, generator=generator).softmax(-1) for rows in (4, 3))
        return p, q, draw(q, [uniform(i, 10 + j, Purpose.DRAFT) for j in range(3)])

    made = [make(i) for i in range(6)]
    alone = [verify_sampled(p, [Window(0, d, q, i, 10)])[0] for i, (p, q, d) in enumerate(made)]
    order = [4, 0, 5, 2, 1, 3]
    p = torch.cat([made[i][0] for i in order])
    windows = [Window(4 * n, made[i][2], made[i][1], i, 10) for n, i in enumerate(order)]
    assert verify_sampled(p, windows) == [alone[i] for i in order]

"""Commit: the state after a accepted rows is the state of those rows alone; rejected rows leave no trace."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests import oracle
from tests.model.conftest import Checkpoints
from tests.model.lanes import Lane, Sequence


def _assert_same_state(lane: Lane, a: Sequence, other: Lane, b: Sequence) -> None:
    want = other.state(b)
    for name, got in lane.state(a).items():
        torch.testing.assert_close(got, want[name], rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("prompt_length", [1, 2, 5, 67, 70])
@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 4])
def test_state_is_that_of_the_accepted_rows(tiny: Path, prompt_length: int, accepted: int) -> None:
    rng = random.Random(prompt_length)
    ids = [rng.randrange(1, 250) for _ in range(prompt_length + 4)]
    lane, alone = Lane(tiny), Lane(tiny, byte=0x11)
    a, b = lane.add(), alone.add()
    lane.run(a, ids[:prompt_length], [prompt_length])
    alone.run(b, ids[:prompt_length], [prompt_length])
    lane.step([(a, ids[prompt_length:])], [accepted])
    for token in ids[prompt_length : prompt_length + accepted]:
        alone.step([(b, [token])])
    assert (a.done, a.ids) == (b.done, b.ids)
    _assert_same_state(lane, a, alone, b)


def test_forward_alone_changes_no_state(tiny: Path) -> None:
    lane = Lane(tiny)
    a = lane.add()
    lane.run(a, list(range(3, 40)), [37])
    before = lane.state(a)
    lane.forward([(a, [9, 8, 7, 6])])
    lane.forward([(a, list(range(3, 60)))])
    after = lane.state(a)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_rejected_drafts_leave_no_trace(tiny: Path, rng: random.Random) -> None:
    """Two runs of the same request that reject different drafts at every step end in the same state."""
    ids = [rng.randrange(3, 250) for _ in range(110)]
    lanes = [Lane(tiny), Lane(tiny)]
    sequences = [lane.add() for lane in lanes]
    for lane, sequence in zip(lanes, sequences, strict=True):
        lane.run(sequence, ids[:60], [60])
    while sequences[0].done < 104:
        accepted = rng.randint(1, 4)
        start = sequences[0].done
        outputs = []
        for lane, sequence in zip(lanes, sequences, strict=True):
            wrong = [rng.randrange(1, 250) for _ in range(4 - accepted)]
            (logits,) = lane.step([(sequence, ids[start : start + accepted] + wrong)], [accepted])
            outputs.append(logits[:accepted])
        torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-5)
    _assert_same_state(lanes[0], sequences[0], lanes[1], sequences[1])
    rest = ids[sequences[0].done :]
    want = oracle.oracle_logits(tiny, ids)[-len(rest) :]
    for lane, sequence in zip(lanes, sequences, strict=True):
        (got,) = lane.step([(sequence, rest)])
        assert float((got - want).abs().max()) <= 1e-4


@pytest.mark.parametrize("drafter", ["always_wrong", "always_right", "alternating"])
def test_b30_stub_drafters_give_the_greedy_tokens(tiny: Path, drafter: str) -> None:
    """64 greedy tokens with windows of 4 rows, whatever the drafts are."""
    prompt = [3 + (11 * i) % 200 for i in range(66)]
    want = oracle.oracle_greedy(tiny, prompt, 72)
    lane = Lane(tiny)
    a = lane.add()
    tokens = [int(lane.run(a, prompt, [66])[-1].argmax())]
    step = 0
    while len(tokens) < 64:
        right = drafter == "always_right" or (drafter == "alternating" and step % 2 == 0)
        drafts = [t if right else (t + 1) % 256 for t in want[len(tokens) : len(tokens) + 3]]
        batch, output = lane.forward([(a, [tokens[-1], *drafts])])
        best = lane.model.logits(output.streams).argmax(-1).tolist()
        kept = 0
        while kept < 3 and drafts[kept] == best[kept]:
            kept += 1
        lane.model.commit(batch, output.pending, lane.arena, torch.tensor([kept + 1]))
        a.ids += [tokens[-1], *drafts[:kept]]
        a.done += kept + 1
        tokens += best[: kept + 1]
        step += 1
    assert tokens[:64] == want[:64]
    assert step == (16 if drafter == "always_right" else 63) or drafter == "alternating"


def test_windows_of_several_requests_with_different_lengths(checkpoints: Checkpoints, rng: random.Random) -> None:
    folder = checkpoints("commit_two_ple", seed=8, ple_layer_ids=[1, 2], linear_num_key_heads=1)
    lane = Lane(folder, tokens=1536)
    solo = [Lane(folder) for _ in range(4)]
    sequences, alone = [lane.add() for _ in range(4)], [other.add() for other in solo]
    for _ in range(6):
        parts = [(s, [rng.randrange(1, 250) for _ in range(rng.choice((1, 2, 4, 7, 20)))]) for s in sequences]
        rng.shuffle(parts)
        accepted = [len(t) if len(t) > 16 else rng.randint(0, len(t)) for _, t in parts]
        lane.step(parts, accepted)
        for (s, tokens), count in zip(parts, accepted, strict=True):
            i = sequences.index(s)
            for token in tokens[:count]:
                solo[i].step([(alone[i], [token])])
    for i, sequence in enumerate(sequences):
        _assert_same_state(lane, sequence, solo[i], alone[i])


def test_a_long_span_commits_whole(tiny: Path) -> None:
    lane = Lane(tiny)
    with pytest.raises(AssertionError, match="commits whole"):
        lane.step([(lane.add(), list(range(3, 40)))], [5])

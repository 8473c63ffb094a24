"""The checkpoint in the package against transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests import oracle
from tests.model.lanes import Lane, ragged

from page4.assets import embedded_checkpoint
from page4.model.batch import StepBatch


@pytest.fixture(scope="module")
def embedded() -> Path:
    return embedded_checkpoint()


def test_logits_whole_and_ragged(embedded: Path, rng: random.Random) -> None:
    """300 tokens: budget 256, so the last 41 rows are pruned."""
    ids = [rng.randrange(1, 4096) for _ in range(300)]
    want = oracle.oracle_logits(embedded, ids)
    lane = Lane(embedded, tokens=1024, states=2)
    for chunks in ([300], ragged(300, rng)):
        sequence = lane.add()
        assert float((lane.run(sequence, ids, chunks) - want).abs().max()) <= 1e-4
        lane.free(sequence)


def test_64_greedy_tokens(embedded: Path, rng: random.Random) -> None:
    prompt = [rng.randrange(1, 4096) for _ in range(230)]
    lane = Lane(embedded, tokens=512, states=2)
    sequence = lane.add()
    last = lane.run(sequence, prompt, [230])[-1]
    assert lane.greedy(sequence, last, 64) == oracle.oracle_greedy(embedded, prompt, 64)


def test_first_drafts(embedded: Path, rng: random.Random) -> None:
    ids = [rng.randrange(1, 4096) for _ in range(60)]
    lane = Lane(embedded, tokens=512, states=2)
    sequence, draft = lane.add(), lane.model.draft
    assert draft is not None
    _, output = lane.forward([(sequence, ids)])
    sequence.ids = ids
    span = lane.span(sequence, ids[1:])
    got = draft.forward(StepBatch.build([span], lane.geometry), output.streams[:-1], lane.arena)
    _, want = oracle.oracle_mtp(embedded, ids)
    assert float((draft.logits(got.streams) - want).abs().max()) <= 1e-4
    assert torch.equal(draft.logits(got.streams).argmax(-1), want.argmax(-1))

"""The draft head against the plain reference of the oracle."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import oracle
from tests.model.conftest import Checkpoints
from tests.model.lanes import Lane, Sequence, ragged

from page4.model.batch import RowSpan, StepBatch

CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "budget_16": {"indexer_budget": 16, "num_key_value_heads": 2, "hc_count": 4, "prefix": "model.language_model."},
    "biases": {"attention_bias": True, "hidden_size": 64, "ple_layer_ids": [], "experts": "split"},
}


def _draft_batch(lane: Lane, sequence: Sequence, tokens: list[int], first: int) -> StepBatch:
    return StepBatch.build([RowSpan(tokens, first, sequence.pages, sequence.slot)], lane.geometry)


@pytest.mark.parametrize("name", CONFIGS)
def test_first_iteration_in_any_chunks(checkpoints: Checkpoints, name: str, rng: random.Random) -> None:
    folder = checkpoints(f"mtp_{name}", seed=31, **CONFIGS[name])
    ids = [rng.randrange(1, 250) for _ in range(110)]
    want_streams, want_logits = oracle.oracle_mtp(folder, ids)
    lane = Lane(folder)
    draft = lane.model.draft
    assert draft is not None
    for chunks in ([109], ragged(109, rng)):
        sequence = lane.add()
        _, output = lane.forward([(sequence, ids)])
        start, got = 0, []
        for chunk in chunks:
            batch = _draft_batch(lane, sequence, ids[start + 1 : start + 1 + chunk], start)
            got.append(draft.forward(batch, output.streams[start : start + chunk], lane.arena).streams)
            start += chunk
        streams = torch.cat(got)
        assert float((streams - want_streams).abs().max()) <= 1e-3  # streams are about 8 in size
        assert float((draft.logits(streams) - want_logits).abs().max()) <= 1e-4
        lane.free(sequence)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("length", [2, 9, 66, 67, 68, 107, 110])
def test_seven_drafts_reuse_the_first_selection(checkpoints: Checkpoints, name: str, length: int) -> None:
    folder = checkpoints(f"mtp_{name}", seed=31, **CONFIGS[name])
    rng = random.Random(length)
    ids = [rng.randrange(1, 250) for _ in range(length)]
    lane = Lane(folder)
    draft = lane.model.draft
    assert draft is not None
    sequence = lane.add()
    _, output = lane.forward([(sequence, ids)])
    batch = _draft_batch(lane, sequence, ids[1:], 0)
    first = draft.forward(batch, output.streams[:-1], lane.arena)
    last = torch.tensor([length - 2])
    reuse = (first.selection.take(last), batch.rows.positions[last])
    streams = first.streams[-1:]
    drafts = [int(draft.logits(streams).argmax())]
    for position in range(length - 1, length + 5):
        step = draft.forward(_draft_batch(lane, sequence, drafts[-1:], position), streams, lane.arena, reuse)
        streams = step.streams
        drafts.append(int(draft.logits(streams).argmax()))
    assert drafts == oracle.oracle_drafts(folder, ids, 7)


def test_drafts_of_several_requests_at_once(tiny: Path, rng: random.Random) -> None:
    lane = Lane(tiny)
    draft = lane.model.draft
    assert draft is not None
    prompts = [[rng.randrange(1, 250) for _ in range(n)] for n in (90, 12, 75)]
    sequences = [lane.add() for _ in prompts]
    _, output = lane.forward(list(zip(sequences, prompts, strict=True)))
    spans = [RowSpan(p[1:], 0, s.pages, s.slot) for s, p in zip(sequences, prompts, strict=True)]
    ends = torch.tensor([90, 102, 177])
    keep = torch.tensor([r for r in range(177) if r + 1 not in ends.tolist()])
    batch = StepBatch.build(spans, lane.geometry)
    first = draft.forward(batch, output.streams[keep], lane.arena)
    last = torch.tensor([batch.row_starts[n + 1] - 1 for n in range(3)])
    reuse, streams = (first.selection.take(last), batch.rows.positions[last]), first.streams[last]
    drafts = [draft.logits(streams).argmax(-1).tolist()]
    for j in range(3):
        spans = [
            RowSpan([drafts[-1][n]], len(p) - 1 + j, sequences[n].pages, sequences[n].slot)
            for n, p in enumerate(prompts)
        ]
        streams = draft.forward(StepBatch.build(spans, lane.geometry), streams, lane.arena, reuse).streams
        drafts.append(draft.logits(streams).argmax(-1).tolist())
    for n, prompt in enumerate(prompts):
        assert [row[n] for row in drafts] == oracle.oracle_drafts(tiny, prompt, 4)


def test_without_mtp_tensors_there_is_no_draft(checkpoints: Checkpoints) -> None:
    assert Lane(checkpoints("no_mtp", seed=5, mtp=False)).model.draft is None

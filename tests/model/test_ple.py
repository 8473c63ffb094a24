"""N-gram hashing: against plain Python integers, and its context across chunk edges and eos."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tests import oracle
from tests.model.conftest import Checkpoints
from tests.model.lanes import Lane, ragged

from page4.geometry import Geometry
from page4.model.batch import RowSpan, StepBatch
from page4.model.ple import ngram_ids, shifted_tokens


def _plain_shift(ids: list[int], position: int, shift: int, eos: int) -> int:
    for back in range(1, shift + 1):
        if position - back < 0 or ids[position - back] == eos:
            return eos
    return ids[position - shift]


def _plain_ids(ids: list[int], position: int, geometry: Geometry) -> list[int]:
    """Wrapping signed 64-bit products, xor, and the remainder of Python (never negative)."""
    ple = geometry.ple
    assert ple is not None
    multipliers, sizes, offsets = ple.multipliers(0), ple.head_vocab_sizes(0), ple.head_offsets(0)
    out = []
    for head, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        mixed = 0
        for s in range(head // ple.heads_per_ngram + 2):
            product = _plain_shift(ids, position, s, 2) * multipliers[s] if s else ids[position] * multipliers[0]
            mixed ^= (product + (1 << 63)) % (1 << 64) - (1 << 63)
        out.append(mixed % size + offset)
    return out


def test_ids_equal_plain_integers_in_any_cut(checkpoints: Checkpoints, rng: random.Random) -> None:
    folder = checkpoints("ple_4gram", seed=4, ngram_size=4, ple_embed_dim=48, vocab_size=256)
    lane = Lane(folder)
    weights = lane.model.layers[1].ple
    assert weights is not None
    ids = [rng.choice((2, 2, 5, 9, 250, 255)) for _ in range(60)]
    start = 0
    for chunk in ragged(60, rng, (1, 2, 3, 7)):
        span = RowSpan(ids[start : start + chunk], start, [1], 1, ids[max(0, start - 3) : start])
        other = RowSpan([7, 8], 0, [1], 1, [])
        for spans, first in (([span], 0), ([other, span, other], 2)):
            batch = StepBatch.build(spans, lane.geometry)
            got = ngram_ids(shifted_tokens(batch, 4, 2), weights.weights)[first : first + chunk]
            assert got.tolist() == [_plain_ids(ids, p, lane.geometry) for p in range(start, start + chunk)]
        start += chunk


def test_eos_inside_and_at_chunk_edges(tiny: Path, rng: random.Random) -> None:
    ids = [rng.choice((2, 2, 2, 7, 8, 9)) for _ in range(60)]
    want = oracle.oracle_logits(tiny, ids)
    lane = Lane(tiny)
    for chunks in ([60], [1] * 60, ragged(60, rng, (1, 2, 3, 4))):
        sequence = lane.add()
        assert float((lane.run(sequence, ids, chunks) - want).abs().max()) <= 1e-4
        lane.free(sequence)


def test_longer_context_than_needed_is_cut(tiny: Path) -> None:
    geometry = Lane(tiny).geometry
    batch = StepBatch.build([RowSpan([5], 9, [1], 1, [1, 2, 3, 4]), RowSpan([6], 1, [1], 1, [9])], geometry)
    assert torch.equal(batch.ngram_context, torch.tensor([[3, 4], [2, 9]]))

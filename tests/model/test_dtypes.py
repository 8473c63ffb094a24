"""16-bit weights and E4M3 K/V: near the fp32 oracle, and non-finite K/V reported by row."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests import oracle
from tests.model.lanes import Lane

from page4.codec import Scale


def _ids(count: int) -> list[int]:
    rng = random.Random(count)
    return [rng.randrange(1, 250) for _ in range(count)]


def _row_errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    return (got - want).pow(2).mean(1).sqrt()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_is_as_near_to_fp32_as_transformers_is(tiny: Path, dtype: torch.dtype) -> None:
    """Median over rows: a single row may be far off, in theirs as in ours, when rounding flips an expert."""
    ids = _ids(67)
    want = oracle.oracle_logits(tiny, ids)
    theirs = _row_errors(oracle.oracle_logits(tiny, ids, dtype), want).median()
    lane = Lane(tiny, dtype=dtype)
    for chunks in ([67], [30, 1, 1, 4, 31]):
        got = lane.run(lane.add(), ids, chunks)
        assert got.dtype is torch.float32
        assert _row_errors(got, want).median() <= 1.25 * theirs


def test_e4m3_needs_its_scales_on_both_sides(tiny: Path) -> None:
    """Calibrated scales stay near fp32; the result differs from unit scales, so they take effect."""
    ids = _ids(60)
    want = oracle.oracle_logits(tiny, ids)
    lane = Lane(tiny)
    sequence = lane.add()
    lane.run(sequence, ids, [60])
    kv = lane.arena.layer_kv(3)
    pages = torch.tensor(sequence.pages[:3])
    scales = tuple(Scale.from_max_abs(float(view[pages].abs().max())) for view in (kv.k, kv.v))
    errors = {}
    for name, pair in (
        ("calibrated", scales),
        ("unit", (Scale(1.0), Scale(1.0))),
        ("tiny", (Scale(1e-3), Scale(1e-3))),
    ):
        e4m3 = Lane(tiny, kv_dtype=torch.uint8, scales={3: pair, 4: pair})
        got = e4m3.run(e4m3.add(), ids, [40, 1, 19])
        errors[name] = float((got - want).pow(2).mean().sqrt())
    assert errors["calibrated"] < 0.05 < errors["tiny"]
    assert errors["calibrated"] != errors["unit"]


def test_non_finite_kv_names_its_rows(tiny: Path) -> None:
    one = (Scale(1.0), Scale(1.0))
    lane = Lane(tiny, kv_dtype=torch.uint8, scales={3: one, 4: one})
    sequence, other = lane.add(), lane.add()
    _, output = lane.forward([(sequence, _ids(9))])
    assert output.nonfinite_rows is not None
    assert not output.nonfinite_rows.any()
    embed = lane.model.embed
    saved = embed[77].clone()
    try:
        embed[77] = torch.nan
        _, output = lane.forward([(sequence, [5, 6]), (other, [77])])
    finally:
        embed[77] = saved
    assert output.nonfinite_rows is not None
    assert output.nonfinite_rows.tolist() == [False, False, True]

"""From statistics to a scale: each rule against exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.scales.test_observe import squared_error, stats

from page4.codec import Scale, count
from page4.errors import ScaleError, UsageError
from page4.scales.rules import Rule, curve_scales

positive = st.floats(width=32, min_value=2.0**-100, max_value=2.0**100)


@given(st.lists(positive, min_size=1, max_size=30))
def test_absmax_is_the_least_scale_that_clips_nothing(a: list[float]) -> None:
    found = Rule.parse("absmax").scale(stats(a), "x")
    top = Fraction(max(a))
    below = np.nextafter(np.float32(found.value), np.float32(0))
    assert Fraction(float(below)) * 448 < top <= Fraction(found.value) * 448
    assert int(count(torch.tensor(a), found).clipped) == stats(a).clipped(found) == 0


def test_a_percentile_clips_what_lies_above_it() -> None:
    a = [*range(1, 1000), 100_000]
    rule = Rule.parse("percentile:99.9")
    scale = rule.scale(stats(a), "x")
    assert 999 <= scale.value * 448 <= 999 * (1 + 2**-8) + 1e-3
    assert stats(a).clipped(scale) == int(count(torch.tensor(a, dtype=torch.float32), scale).clipped) == 1
    assert Rule.parse("percentile:100").scale(stats(a), "x") == Scale.from_max_abs(100_000)
    assert Rule.parse("percentile:50").scale(stats(a), "x").value * 448 == pytest.approx(500, rel=2**-7)


def test_mse_gives_up_a_value_far_out_for_the_rest() -> None:
    x = torch.cat((torch.randn(4000, generator=torch.Generator().manual_seed(1)) * 2.0**-9, torch.tensor([1.0])))
    found = stats(x.tolist())
    chosen, largest = Rule.parse("mse").scale(found, "x"), Scale.from_max_abs(found.max_abs)
    values = x.double().numpy()
    assert squared_error(values, chosen.value).mean() <= squared_error(values, largest.value).mean() * 1.02
    best = min(squared_error(values, largest.value * k / 64).mean() for k in range(4, 65))
    assert squared_error(values, chosen.value).mean() <= best * 1.05


def test_mse_keeps_absmax_where_nothing_is_better() -> None:
    # All values are E4M3 values at this scale: the error is 0, and a smaller scale would clip.
    assert Rule.parse("mse").scale(stats([448.0] * 5 + [1.0, 3.5, 240.0]), "x").value <= 1.0


@pytest.mark.parametrize("text", ["", "max", "percentile", "percentile:0", "percentile:100.1", "percentile:x", "MSE"])
def test_other_rules_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="rule: expected absmax, mse or percentile:P"):
        Rule.parse(text)


def test_nothing_to_keep_is_refused_by_name() -> None:
    with pytest.raises(ScaleError, match=r"layers\.3\.v: expected a value above 0 to keep"):
        Rule.parse("percentile:50").scale(stats([0.0, 0.0, 0.0, 1.0]), "layers.3.v")


def test_the_curve_covers_the_scale_and_both_sides() -> None:
    points = [scale.value for scale in curve_scales(Scale(0.5))]
    assert points == sorted(points, reverse=True)
    assert points[0] == 1.0 and 0.5 in points and points[-1] == 0.5 * 5 / 128
    assert len(points) == len(set(points)) == 24

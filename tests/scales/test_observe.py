"""What is counted, and when: exact statistics against numpy, and only requests tagged as calibration."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from page4.codec import Scale
from page4.errors import ScaleError
from page4.scales.kv_statistics import Statistics, merge_all
from page4.scales.observe import KvStatistics, Observer, check_complete, merge_ranks

floats = st.floats(width=32, allow_nan=True, allow_infinity=True)
rows = st.lists(floats, min_size=1, max_size=40)


def stats(values: object, dtype: torch.dtype = torch.float32) -> KvStatistics:
    """One head of one channel: a value a token."""
    return KvStatistics.of(torch.tensor(values, dtype=dtype).view(-1, 1, 1))


def heads(*shape: int, peak: float, seed: int = 0) -> torch.Tensor:
    """Values in [-1, 1] and one of `peak`."""
    x = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    x.view(-1)[seed % x.numel()] = peak
    return x


# E4M3 magnitudes by hand: subnormals m * 2**-9, normals (8 + m) * 2**(e - 10), the largest 448.
GRID = np.array([m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)])
GRID = GRID[GRID <= 448.0]


def squared_error(x: np.ndarray, scale: float) -> np.ndarray:
    """Distance to the nearest E4M3 value times the scale, squared, in float64."""
    distance = np.abs(np.abs(x)[:, None] - GRID[None, :] * scale).min(1)
    return distance * distance


@given(rows, rows, rows)
def test_merging_is_counting_together_in_any_order(a: list[float], b: list[float], c: list[float]) -> None:
    x, y, z = stats(a), stats(b), stats(c)
    assert x.merge(y) == y.merge(x)
    assert x.merge(y).merge(z) == x.merge(y.merge(z)) == stats(a + b + c) == stats(c + a + b)
    assert x.merge(KvStatistics()) == x


@given(rows)
def test_a_file_keeps_every_bit(a: list[float]) -> None:
    found = stats(a)
    assert KvStatistics.from_object(json.loads(json.dumps(found.as_object()))) == found


@given(rows)
def test_counts_follow_numpy(a: list[float]) -> None:
    found, x = stats(a), np.array(a, dtype=np.float32)
    finite = np.abs(x[np.isfinite(x)])
    assert found.tokens == len(a)
    assert found.values == finite.size
    assert found.nonfinite == x.size - finite.size
    assert found.zeros == int((finite == 0).sum())
    assert found.max_abs == (float(finite.max()) if finite.size else 0.0)
    exponents = np.maximum(np.frexp(finite[finite > 0].astype(np.float64))[1] - 1, -127)
    unique, counts = np.unique(exponents, return_counts=True)
    assert found.log2_histogram() == {str(e): int(n) for e, n in zip(unique, counts, strict=True)}


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=60), st.data())
def test_percentiles_are_at_most_a_bin_above_the_true_ones(a: list[float], data: st.DataObject) -> None:
    percent = Fraction(data.draw(st.integers(1, 1000)), 10)
    x = np.sort(np.abs(np.array(a, dtype=np.float32)).astype(np.float64))
    true = float(x[max(1, -(-percent.numerator * x.size // (percent.denominator * 100))) - 1])
    got = stats(a).percentile(percent)
    assert true <= got <= true * (1 + 2**-8) + 2**-134


@pytest.mark.parametrize("share", [1.0, 0.7, 0.25, 0.04])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_errors_and_clips_follow_a_table_by_hand(dtype: torch.dtype, share: float) -> None:
    x = (torch.randn(3000, generator=torch.Generator().manual_seed(5)) * 3).to(dtype)
    values = x.double().numpy()
    found, scale = stats(x.tolist(), dtype), Scale.from_max_abs(float(x.abs().max()) * share)
    true = squared_error(values, scale.value).mean()
    bound = 2**-9 * np.sqrt((values**2).mean())
    assert abs(np.sqrt(found.mean_squared_error(scale)) - np.sqrt(true)) <= bound
    assert found.mean_squared_error(scale) == pytest.approx(true, rel=0.02)
    clipped = int((np.abs(values) > 448 * scale.value).sum())
    near = int((np.abs(np.abs(values) / (448 * scale.value) - 1) < 2**-8).sum())
    assert abs(found.clipped(scale) - clipped) <= near


def test_b12_one_value_far_out_is_one_clip() -> None:
    v = [*np.linspace(-8, 8, 4096, dtype=np.float32).tolist(), 900.0]
    assert stats(v).clipped(Scale(1.0)) == 1
    assert stats(v).clipped(Scale.from_max_abs(900.0)) == 0


def test_b17_only_calibration_requests_count() -> None:
    observer = Observer()
    observer(3, heads(4, 1, 8, peak=1e4), heads(4, 1, 8, peak=1e4))  # dummy batch
    observer(3, heads(16, 1, 8, peak=1e5), heads(16, 1, 8, peak=1e5))  # graph capture
    with observer.counting("calibration", request="r1"):
        observer(3, heads(7, 1, 8, peak=3.5), heads(7, 1, 8, peak=-2.0))
    observer(3, heads(1, 1, 8, peak=50.0), heads(1, 1, 8, peak=50.0))  # health probe
    statistics, forwards = observer.take()
    assert forwards == 1
    assert statistics[3, "k"].tokens == statistics[3, "v"].tokens == 7
    assert Scale.from_max_abs(statistics[3, "k"].max_abs).value == 3.5 / 448 == 0.0078125
    assert statistics[3, "v"].max_abs == 2.0


def test_b17_nothing_counted_is_refused() -> None:
    observer = Observer()
    observer(3, heads(4, 1, 8, peak=1.0), heads(4, 1, 8, peak=1.0))
    statistics, forwards = observer.take()
    with pytest.raises(ScaleError, match="counted forwards: expected at least 1, got 0"):
        check_complete(statistics, [3], tokens=4, counted_forwards=forwards)


@pytest.mark.parametrize("purpose", ["warm-up", "capture", "health", ""])
def test_b17_no_other_purpose_may_count(purpose: str) -> None:
    observer = Observer()
    with pytest.raises(ScaleError, match="expected calibration"), observer.counting(purpose, request="r1"):
        pass
    assert observer.take() == ({}, 0)


def test_a_request_that_fails_half_way_spoils_the_statistics() -> None:
    observer = Observer()
    with pytest.raises(ZeroDivisionError), observer.counting("calibration", request="r7"):
        observer(3, heads(4, 1, 8, peak=1.0), heads(4, 1, 8, peak=1.0))
        raise ZeroDivisionError
    with pytest.raises(ScaleError, match="r7, which failed half-way"):
        observer.take()


def test_two_requests_do_not_count_at_once() -> None:
    observer = Observer()
    with (
        observer.counting("calibration", request="r1"),
        pytest.raises(ScaleError, match="one at a time"),
        observer.counting("calibration", request="r2"),
    ):
        pass


def seen(tokens: dict[int, int]) -> Statistics:
    found: Statistics = {}
    for layer, count in tokens.items():
        found[layer, "k"] = found[layer, "v"] = KvStatistics.of(heads(count, 1, 2, peak=1.0))
    return found


def test_b18_a_layer_that_was_never_seen_is_named() -> None:
    with pytest.raises(ScaleError) as refusal:
        check_complete(seen({3: 1000, 7: 1000, 15: 1000}), [3, 7, 11, 15], tokens=1000, counted_forwards=1)
    text = str(refusal.value)
    assert "model.layers.11.self_attn.k_scale: saw no token" in text
    assert "model.layers.11.self_attn.v_scale: saw no token" in text
    assert "layers.7." not in text


def test_b18_unequal_counts_are_named() -> None:
    with pytest.raises(ScaleError, match=r"model\.layers\.15\.self_attn\.k_scale: saw 990 tokens"):
        check_complete(seen({3: 1000, 7: 1000, 11: 1000, 15: 990}), [3, 7, 11, 15], tokens=1000, counted_forwards=1)


@pytest.mark.parametrize(
    ("value", "words"), [(0.0, "all values are zero"), (np.nan, "not finite"), (np.inf, "not finite")]
)
def test_b18_zero_and_nonfinite_layers_are_named(value: float, words: str) -> None:
    statistics = seen({3: 4, 7: 4})
    statistics[7, "v"] = KvStatistics.of(torch.full((4, 1, 2), value))
    with pytest.raises(ScaleError, match=rf"model\.layers\.7\.self_attn\.v_scale: .*{words}"):
        check_complete(statistics, [3, 7], tokens=4, counted_forwards=1)


def test_b18_a_layer_that_nobody_expects_is_named() -> None:
    with pytest.raises(ScaleError, match=r"layers\.5\..*no such layer"):
        check_complete(seen({3: 4, 5: 4}), [3], tokens=4, counted_forwards=1)
    check_complete(seen({3: 4, 5: 4}), [3, 5], tokens=4, counted_forwards=1)


def test_b20_order_and_ranks_do_not_matter() -> None:
    batches = [{(3, "k"): KvStatistics.of(heads(5, 1, 8, peak=peak, seed=n))} for n, peak in enumerate((1.0, 8.0, 2.0))]
    found = [merge_all(list(order)) for order in itertools.permutations(batches)]
    found.append(merge_ranks([batches[0], merge_all(batches[1:])]))
    found.append(merge_ranks([merge_all(batches[1:]), batches[0]]))
    assert all(statistics == found[0] for statistics in found)
    assert found[0][3, "k"].max_abs == 8.0
    assert found[0][3, "k"].tokens == 15
    assert {json.dumps(statistics[3, "k"].as_object()) for statistics in found} == {
        json.dumps(found[0][3, "k"].as_object())
    }


def test_b20_a_rank_that_raises_fails_the_run() -> None:
    good: Statistics = {(3, "k"): KvStatistics.of(heads(5, 1, 8, peak=8.0))}
    with pytest.raises(ScaleError, match=r"rank 1: expected statistics, got RuntimeError\('all-reduce'\)"):
        merge_ranks([good, RuntimeError("all-reduce"), good])
    with pytest.raises(ScaleError, match=r"rank 1: expected the layers of rank 0, .*model\.layers\.7"):
        merge_ranks([good, {**good, (7, "v"): good[3, "k"]}])

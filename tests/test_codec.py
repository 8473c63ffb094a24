"""E4M3 against a table computed from the bit fields and against rounding in exact rationals."""

from __future__ import annotations

import bisect
import itertools
import math
import random
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from page4 import codec
from page4.codec import Scale
from page4.errors import KernelError, ScaleError

# Written by hand from the format's definition.
BY_HAND = {
    0x00: 0.0, 0x01: 2.0**-9, 0x07: 7 * 2.0**-9, 0x08: 2.0**-6, 0x09: 1.125 * 2.0**-6, 0x30: 0.5, 0x38: 1.0,
    0x39: 1.125, 0x40: 2.0, 0x44: 3.0, 0x7D: 416.0, 0x7E: 448.0, 0x81: -(2.0**-9), 0xB8: -1.0, 0xFE: -448.0,
}  # fmt: skip


def exact_value(byte: int) -> Fraction | None:
    """The value from the bit fields; None for NaN."""
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return None
    if exponent == 0:
        magnitude = Fraction(mantissa, 8) * Fraction(1, 2**6)
    else:
        magnitude = (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    return -magnitude if sign else magnitude


MAGNITUDES = [exact_value(byte) for byte in range(0x7F)]


def fp32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def fp32_quotient(x: float, scale: float) -> Fraction:
    """x / scale rounded to fp32 (nearest even), from exact rationals: an independent division."""
    exact = Fraction(x) / Fraction(scale)
    if exact == 0:
        return Fraction(0)
    exponent = max(math.floor(math.log2(abs(exact))), -126)
    while abs(exact) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while exponent > -126 and abs(exact) < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** (exponent - 23)
    return round(exact / step) * step  # round() of a Fraction is to nearest even


def expected_byte(x: float, scale: float) -> int:
    """Nearest even over the 127 magnitudes, saturating."""
    quotient = fp32_quotient(x, scale)
    sign = 0x80 if math.copysign(1.0, x) < 0 else 0
    magnitude = abs(quotient)
    above = bisect.bisect_left(MAGNITUDES, magnitude)
    if above == len(MAGNITUDES):
        return sign | 0x7E
    if MAGNITUDES[above] == magnitude or above == 0:
        return sign | above
    down, up = magnitude - MAGNITUDES[above - 1], MAGNITUDES[above] - magnitude
    below = above - 1
    return sign | (below if down < up or (down == up and below % 2 == 0) else above)


def test_all_256_bytes_decode_to_the_bit_field_values() -> None:
    values = codec.decode(torch.arange(256).to(torch.uint8)).tolist()
    for byte, value in enumerate(values):
        exact = exact_value(byte)
        if exact is None:
            assert math.isnan(value), hex(byte)
        else:
            assert Fraction(value) == exact, hex(byte)
            assert math.copysign(1.0, value) == (-1.0 if byte & 0x80 else 1.0), hex(byte)
    for byte, value in BY_HAND.items():
        assert values[byte] == value, hex(byte)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_decoding_is_exact_in_every_dtype(dtype: torch.dtype) -> None:
    values = codec.decode(torch.arange(256).to(torch.uint8), dtype)
    assert values.dtype is dtype
    for byte, value in enumerate(values.double().tolist()):
        exact = exact_value(byte)
        assert math.isnan(value) if exact is None else Fraction(value) == exact


def test_every_finite_byte_survives_a_round_trip() -> None:
    byte = torch.tensor([b for b in range(256) if exact_value(b) is not None], dtype=torch.uint8)
    for scale in (1.0, 0.5, 2.0**-20, 0.0078125, 3.0):
        x = codec.decode(byte) * torch.tensor(scale)
        assert torch.equal(codec.encode(x, Scale(scale)), byte), scale


def test_decode_reads_strided_views() -> None:
    pages = torch.randint(0, 0x7F, (3, 4, 2, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    view = pages.transpose(1, 2)[..., 8:]
    assert torch.equal(codec.decode(view), codec.decode(pages).transpose(1, 2)[..., 8:])


def boundary_values() -> list[float]:
    """Every magnitude, every tie between two neighbours, and the fp32 neighbours of both; zeros and the edges."""
    points = [float(m) for m in MAGNITUDES]
    points += [float((a + b) / 2) for a, b in itertools.pairwise(MAGNITUDES)]
    points += [463.99997, 464.0, 464.00003, 480.0, 512.0, 1e9, 3.4028234663852886e38, 1e-30, 1.4012984643e-45]
    near = torch.tensor(points, dtype=torch.float32)
    up, down = torch.nextafter(near, torch.tensor(math.inf)), torch.nextafter(near, torch.tensor(-math.inf))
    positive = torch.cat((near, up[up.isfinite()], down))
    return torch.cat((positive, -positive)).tolist()


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.1, 3.0, 1.7e-3, 900 / 448, 2.0**-126, 1e-44, 1e30])
def test_boundary_values_round_as_exact_rationals_do(scale: float) -> None:
    value = Scale(scale)
    xs = [x for x in boundary_values() if math.isfinite(x)]
    xs += [fp32(x * value.value) for x in xs if math.isfinite(x * value.value) and abs(x * value.value) < 3.4e38]
    got = codec.encode(torch.tensor(xs, dtype=torch.float32), value).tolist()
    for x, byte in zip(xs, got, strict=True):
        assert byte == expected_byte(x, value.value), (x.hex(), value.value.hex())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_random_values_round_as_exact_rationals_do(dtype: torch.dtype, rng: random.Random) -> None:
    for _ in range(20):
        scale = Scale(math.exp(rng.uniform(-12, 6)))
        xs = torch.tensor([rng.gauss(0, 1) * scale.value * 2 ** rng.uniform(-12, 11) for _ in range(200)]).to(dtype)
        xs = xs[xs.isfinite()]
        got = codec.encode(xs, scale).tolist()
        assert got == [expected_byte(x, scale.value) for x in xs.float().tolist()]


def test_saturates_above_448_whatever_the_plain_cast_of_this_torch_does() -> None:
    x = torch.tensor([448.0, 463.9, 464.0, 464.1, 500.0, 1e30, -500.0])
    assert codec.encode(x, Scale(1.0)).tolist() == [0x7E] * 6 + [0xFE]


def test_signed_zero_infinity_and_nan() -> None:
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan])
    got = codec.encode(x, Scale(0.25)).tolist()
    assert got[:4] == [0x00, 0x80, 0x7E, 0xFE]
    assert got[4] in codec.NAN_BYTES


def test_no_finite_value_becomes_a_nan_byte() -> None:
    """All 65,536 bf16 patterns at scales that overflow, underflow and fit."""
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    finite = patterns[patterns.isfinite()]
    for scale in (1e-40, 1e-3, 1.0, 1e30):
        assert not (codec.encode(finite, Scale(scale)) & 0x7F == 0x7F).any()


def test_counts_clips_and_nonfinite_separately() -> None:
    x = torch.tensor([448.0, 448.00003, 450.0, -449.0, 1e30, math.inf, -math.inf, math.nan, 0.0])
    stats = codec.count(x, Scale(1.0))
    assert (int(stats.clipped), int(stats.nonfinite)) == (4, 3)
    counters = torch.tensor([10, 20])
    codec.encode(x, Scale(1.0), counters=counters)
    codec.encode(x, Scale(4.0), counters=counters)
    assert counters.tolist() == [10 + 4 + 1, 20 + 3 + 3]


def test_a_finite_value_whose_quotient_overflows_is_a_clip() -> None:
    stats = codec.count(torch.tensor([3e38]), Scale(1e-10))
    assert (int(stats.clipped), int(stats.nonfinite)) == (1, 0)
    assert codec.encode(torch.tensor([3e38]), Scale(1e-10)).tolist() == [0x7E]


def test_one_outlier_at_unit_scale_is_one_clip() -> None:
    """4096 values within 8 and one at 900: one clip at scale 1, none at 900/448."""
    values = torch.rand(4096, generator=torch.Generator().manual_seed(0)) * 16 - 8
    values[1234] = 900.0
    assert int(codec.count(values, Scale(1.0)).clipped) == 1
    assert int(codec.count(values, Scale.from_max_abs(900.0)).clipped) == 0


@given(st.floats(min_value=1e-38, max_value=3.4e38))
def test_scale_from_max_abs_is_the_ceiling(max_abs: float) -> None:
    value = Scale.from_max_abs(max_abs).value
    exact = Fraction(max_abs) / 448
    assert Fraction(value) >= exact
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    before = struct.unpack("<f", struct.pack("<I", bits - 1))[0]
    assert Fraction(before) < exact
    if Fraction(fp32(max_abs)) == Fraction(max_abs):
        assert int(codec.count(torch.tensor([max_abs]), Scale(value)).clipped) == 0


def test_scale_from_max_abs_by_hand() -> None:
    assert Scale.from_max_abs(3.5).value == 0.0078125
    assert Scale.from_max_abs(448.0).value == 1.0
    assert Scale.from_max_abs(1.0).value == fp32(1 / 448)  # fp32(1/448) lies above 1/448


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, math.nan, math.inf, -math.inf, 1e39, 1e-60])
def test_bad_scales_are_refused_with_their_value(value: float) -> None:
    with pytest.raises(ScaleError, match="finite positive"):
        Scale(value)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e60])
def test_bad_max_abs_is_refused(value: float) -> None:
    with pytest.raises(ScaleError):
        Scale.from_max_abs(value)


def test_a_scale_is_its_fp32_value_and_one_tensor() -> None:
    scale = Scale(0.1)
    assert scale.value == fp32(0.1) and scale == Scale(fp32(0.1))
    assert scale.tensor() is scale.tensor("cpu")
    assert scale.tensor().item() == scale.value and scale.tensor().shape == ()


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(KernelError, match="float64"):
        codec.encode(torch.zeros(2, dtype=torch.float64), Scale(1.0))
    with pytest.raises(KernelError, match="int8"):
        codec.decode(torch.zeros(2, dtype=torch.int8))

"""The arithmetic of a scale without torch: rounding to fp32, and the rule from the largest magnitude to the scale."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

from page4.errors import ScaleError, message

MAX_E4M3 = 448.0


def scale_of(max_abs: float) -> float:
    """The smallest fp32 scale that clips nothing up to `max_abs`: ceil_to_fp32(max_abs / 448).

    Raises `ScaleError` when `max_abs` or the scale is not finite and positive.
    """
    if not (math.isfinite(max_abs) and max_abs > 0.0):
        do = "measure the layer again; it saw no usable value"
        raise ScaleError(message("max_abs", allowed="a finite positive number", got=repr(max_abs), do=do))
    exact = Fraction(max_abs) / Fraction(MAX_E4M3)
    value = to_fp32(max_abs / MAX_E4M3)
    return value if math.isinf(value) or Fraction(value) >= exact else next_fp32(value)


def to_fp32(value: float) -> float:
    """The nearest fp32 number; infinity beyond the largest."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def next_fp32(value: float) -> float:
    """The fp32 number after a positive one."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return float(struct.unpack("<f", struct.pack("<I", bits + 1))[0])

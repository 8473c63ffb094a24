"""What was seen of one side (K or V) of one layer, in integers only: any order and any split give the same bits.

Bins are cut on the fp32 bit pattern of |x|: 8 exponent and 8 mantissa bits, 65,536 bins. A bin is 2**-8 of its octave
wide, so no value is further than 2**-9 |x| from the middle of its bin (2**-135 below 2**-126). From that follow the
bounds: a percentile is at most 2**-8 above the true one; and since the distance to the nearest E4M3 value is
1-Lipschitz, a root mean squared error is off by at most 2**-9 of the root mean square of the values. `max_abs`, `zeros`
and all counts are exact.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, reduce
from typing import Any, Literal

import torch
from torch import Tensor

from page4 import codec
from page4.codec import MAX_E4M3, Scale

Side = Literal["k", "v"]
Place = tuple[int, Side]

MANTISSA_BITS = 8
_DROPPED_BITS = 23 - MANTISSA_BITS
_MAGNITUDE_MASK = 0x7FFFFFFF
_INFINITY_BITS = 0x7F800000
_FIRST_NONFINITE_BIN = _INFINITY_BITS >> _DROPPED_BITS


@dataclass(frozen=True)
class KvStatistics:
    """`bins` counts every value, ascending; `max_bits` is the largest finite |x| as fp32 bits; tokens are rows."""

    tokens: int = 0
    zeros: int = 0
    max_bits: int = 0
    bins: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, x: Tensor) -> KvStatistics:
        """x: [R, J, D] fp32 | fp16 | bf16."""
        bits = x.float().contiguous().view(-1).view(torch.int32) & _MAGNITUDE_MASK
        finite = bits[bits < _INFINITY_BITS]
        counts = torch.bincount(bits >> _DROPPED_BITS)
        seen = counts.nonzero().squeeze(1)
        return cls(
            tokens=x.shape[0],
            zeros=int((bits == 0).sum()),
            max_bits=int(finite.max()) if finite.numel() else 0,
            bins=dict(zip(seen.tolist(), counts[seen].tolist(), strict=True)),
        )

    def merge(self, other: KvStatistics) -> KvStatistics:
        """Both together: counts add up, the larger maximum stays. Commutative and associative, to the bit."""
        bins = Counter(self.bins)
        bins.update(other.bins)
        return KvStatistics(
            tokens=self.tokens + other.tokens,
            zeros=self.zeros + other.zeros,
            max_bits=max(self.max_bits, other.max_bits),
            bins=dict(sorted(bins.items())),
        )

    @property
    def max_abs(self) -> float:
        """The largest finite |x|, exact."""
        return _fp32(self.max_bits)

    @cached_property
    def nonfinite(self) -> int:
        """Infinities and NaN."""
        return sum(count for place, count in self.bins.items() if place >= _FIRST_NONFINITE_BIN)

    @cached_property
    def values(self) -> int:
        """Finite values."""
        return sum(self.bins.values()) - self.nonfinite

    @cached_property
    def _finite(self) -> list[tuple[int, int]]:
        return [(place, count) for place, count in self.bins.items() if place < _FIRST_NONFINITE_BIN]

    @cached_property
    def _middles(self) -> tuple[Tensor, Tensor]:
        """The middle of every bin that holds something, and how much it holds: [B] fp32, [B] fp64."""
        middles = torch.tensor([_fp32(_middle_bits(place)) for place, _ in self._finite], dtype=torch.float32)
        return middles, torch.tensor([count for _, count in self._finite], dtype=torch.float64)

    def percentile(self, percent: Fraction) -> float:
        """A value that `percent` of all |x| do not exceed: the upper end of the bin of that rank, at most `max_abs`."""
        rank = max(1, math.ceil(percent * self.values / 100))
        if rank <= self.zeros:
            return 0.0
        below = 0
        for place, count in self._finite:
            below += count
            if below >= rank:
                return min(_fp32(((place + 1) << _DROPPED_BITS) - 1), self.max_abs)
        return self.max_abs

    def clipped(self, scale: Scale) -> int:
        """Values that the encoder saturates: exactly 0 up to `max_abs`, else those in bins whose middle is clipped."""
        limit = MAX_E4M3 * scale.value
        if self.max_abs <= limit:
            return 0
        return sum(count for place, count in self._finite if _fp32(_middle_bits(place)) > limit)

    def mean_squared_error(self, scale: Scale) -> float:
        """Mean of (decode(encode(x)) - x)**2 over the middles of the bins; the sum is exact before it is rounded."""
        if not self.values:
            return 0.0
        middles, counts = self._middles
        read = codec.decode(codec.encode(middles, scale)).double() * scale.value
        error = read - middles.double()
        return math.fsum((error * error * counts).tolist()) / self.values

    def log2_histogram(self) -> dict[str, int]:
        """Count by floor(log2 |x|), exact; -127 stands for all below 2**-126, zeros are left out."""
        found: Counter[int] = Counter()
        for place, count in self._finite:
            found[(place >> MANTISSA_BITS) - 127] += count
        found[-127] -= self.zeros
        return {str(exponent): count for exponent, count in sorted(found.items()) if count}

    def as_object(self) -> dict[str, Any]:
        """For a file; `from_object` reads it back to the bit."""
        pairs = [[place, count] for place, count in self.bins.items()]
        return {"tokens": self.tokens, "zeros": self.zeros, "max_bits": self.max_bits, "bins": pairs}

    @classmethod
    def from_object(cls, value: Mapping[str, Any]) -> KvStatistics:
        """What `as_object` wrote."""
        bins = {int(place): int(count) for place, count in value["bins"]}
        return cls(int(value["tokens"]), int(value["zeros"]), int(value["max_bits"]), bins)


Statistics = dict[Place, KvStatistics]


def merge_all(parts: list[Statistics]) -> Statistics:
    """All parts together, in the order of layers; the order of the parts does not matter."""
    places = sorted({place for part in parts for place in part})
    return {place: reduce(KvStatistics.merge, [part[place] for part in parts if place in part]) for place in places}


def _middle_bits(place: int) -> int:
    return (place << _DROPPED_BITS) | (1 << (_DROPPED_BITS - 1))


def _fp32(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])

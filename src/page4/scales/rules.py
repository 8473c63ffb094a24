"""From what was observed to a scale: `absmax`, `percentile:P` or `mse`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from page4.codec import MAX_E4M3, Scale
from page4.errors import ScaleError, UsageError, message
from page4.scales.kv_statistics import KvStatistics

_PERCENTILE = re.compile(r"percentile:([0-9]{1,3}(?:\.[0-9]{1,9})?)")
# The candidates of `mse`: largest kept values from max_abs down to a sixteenth of it, 32 an octave.
_MSE_OCTAVES, _MSE_STEPS = 4, 32


@dataclass(frozen=True)
class Rule:
    """How a scale is chosen. `absmax` clips nothing; the other two accept the clips that the report counts."""

    name: Literal["absmax", "percentile", "mse"]
    percent: Fraction = Fraction(100)
    text: str = "absmax"

    @classmethod
    def parse(cls, text: str) -> Rule:
        """`absmax`, `mse`, or `percentile:P` with 0 < P <= 100. Raises `UsageError`."""
        if text == "absmax":
            return cls("absmax")
        if text == "mse":
            return cls("mse", text="mse")
        match = _PERCENTILE.fullmatch(text)
        if match is None or not 0 < Fraction(match.group(1)) <= 100:
            allowed = "absmax, mse or percentile:P with 0 < P <= 100"
            raise UsageError(message("rule", allowed=allowed, got=repr(text), do="use percentile:99.99, for example"))
        return cls("percentile", Fraction(match.group(1)), text)

    def scale(self, statistics: KvStatistics, name: str) -> Scale:
        """The scale of the tensor called `name`. Raises `ScaleError` when nothing was seen that has one."""
        kept = statistics.percentile(self.percent) if self.name == "percentile" else statistics.max_abs
        if not kept > 0.0:
            do = "raise the percentile or send other samples"
            raise ScaleError(message(name, allowed="a value above 0 to keep", got=f"{kept} by {self.text}", do=do))
        scale = Scale.from_max_abs(kept)
        return _least_error(statistics, scale) if self.name == "mse" else scale


def _least_error(statistics: KvStatistics, largest: Scale) -> Scale:
    """The candidate with the least mean squared error; of equals the largest, which clips least."""
    shares = [
        Fraction(2 * _MSE_STEPS - step, 2 * _MSE_STEPS * 2**octave)
        for octave in range(_MSE_OCTAVES)
        for step in range(_MSE_STEPS)
    ]
    candidates = [_scale_of(largest, share) for share in shares]
    return min(candidates, key=lambda scale: (statistics.mean_squared_error(scale), -scale.value))


def curve_scales(scale: Scale) -> list[Scale]:
    """Scales to draw the error over: `scale` times 2, 7/4, 3/2, 5/4, 1, .. 5/128; what fp32 cannot hold is left out."""
    factors = [Fraction(eighths, 8) * Fraction(2) ** power for power in range(1, -5, -1) for eighths in (8, 7, 6, 5)]
    return [_scale_of(scale, factor) for factor in factors if _holds(scale.value * float(factor))]


def _scale_of(scale: Scale, factor: Fraction) -> Scale:
    return Scale(float(Fraction(scale.value) * factor)) if _holds(scale.value * float(factor)) else scale


def _holds(value: float) -> bool:
    """Whether `value` is a scale whose full range fp32 can hold."""
    return 2.0**-126 <= value <= 2.0**127 / MAX_E4M3

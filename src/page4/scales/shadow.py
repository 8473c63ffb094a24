"""What attention would have given over other K/V: shadow caches that live beside the one under test.

A shadow holds K and V of a layer at the same places as the cache does, as numbers: those that the model computed, or
what is left of them after E4M3 at some pair of scales (`decode(encode(x / scale)) * scale`). Attention over a shadow
has no scales at all, so nothing that an engine does with its scales, on either side, can hide in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from page4.attend import attend
from page4.cache.append import append_kv
from page4.cache.rows import Rows
from page4.cache.storage import LayerKV
from page4.codec import Scale, decode, encode
from page4.model.attention import Attended

Pair = tuple[Scale, Scale]


class ShadowKV:
    """K/V of one layer as fp32 numbers, rounded as E4M3 at `scales` would (None: as they are)."""

    def __init__(self, like: LayerKV, scales: Pair | None) -> None:
        self.scales = scales
        # Zeros, not poison: a shadow is the yardstick, and only what was written to it is ever attended to.
        k, v = (torch.zeros(like.k.shape, dtype=torch.float32, device=like.k.device) for _ in range(2))
        self._kv = LayerKV(k, v)

    def write(self, k: Tensor, v: Tensor, rows: Rows) -> None:
        """k, v: [R, J, D] as the model computed them."""
        k, v = k.float(), v.float()
        if self.scales is not None:
            k, v = (decode(encode(x, scale)) * scale.value for x, scale in zip((k, v), self.scales, strict=True))
        append_kv(self._kv, k, v, rows)

    def attend(self, seen: Attended) -> Tensor:
        """The heads [R, H, D] fp32 that `seen` would have got from these numbers."""
        q, gate = seen.queries.q.float().contiguous(), seen.queries.gate.float()
        return attend(q, self._kv, seen.selection, seen.rows, gate=gate)


@dataclass(frozen=True)
class Distance:
    """How far attention is from where it should be: sums of squares over all rows that were seen."""

    reference: float = 0.0
    difference: float = 0.0

    def plus(self, heads: Tensor, other: Tensor, reference: Tensor) -> Distance:
        """With more rows: `heads` against `other`, measured in `reference`."""
        square = float(reference.double().square().sum())
        return Distance(self.reference + square, self.difference + float((heads.double() - other).square().sum()))

    @property
    def relative(self) -> float:
        """The root of the ratio, NaN where it is none."""
        return (self.difference / self.reference) ** 0.5 if self.reference > 0 else float("nan")

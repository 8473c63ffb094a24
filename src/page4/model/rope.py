"""Rotary position embedding over the first `rotary_dim` channels of a head.

With text all three MRoPE axes carry the same position, so the interleaved sections of an MRoPE config pick from three
equal tables: one table serves both kinds of config.
"""

from __future__ import annotations

import torch
from torch import Tensor

from page4.geometry import Geometry


class Rope:
    """Tables for one geometry; `cos_sin` is computed once a step and shared by its layers."""

    def __init__(self, geometry: Geometry, dtype: torch.dtype, device: torch.device | str) -> None:
        self.dtype = dtype
        steps = torch.arange(0, geometry.rotary_dim, 2, dtype=torch.float32, device=device) / geometry.rotary_dim
        self.inv_freq = 1.0 / (geometry.rope_theta**steps)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: [R] int64 -> cos, sin: [R, rotary_dim] in the model dtype; sin's first half is negated."""
        angles = torch.outer(positions.float(), self.inv_freq)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1).to(self.dtype), torch.cat((-sin, sin), -1).to(self.dtype)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [R, heads, d], cos and sin: [R, rotary_dim] of `Rope.cos_sin`; turns x's first channels in place."""
    part = x[..., : cos.shape[-1]]
    # Channel i turns with channel i + rotary_dim / 2, so rolling by half brings each one's partner into place.
    partner = part.roll(cos.shape[-1] // 2, -1)
    part.mul_(cos.unsqueeze(1)).addcmul_(partner, sin.unsqueeze(1))
    return x

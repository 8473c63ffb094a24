"""A projection without bias."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class Linear:
    """weight: [out, in]; calling it maps [..., in] to [..., out] in the weight's dtype."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out]."""
        return F.linear(x, self.weight)

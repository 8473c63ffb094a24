"""Projections. On a CPU the larger weights are kept in oneDNN's packed layout.

A step of a few rows is bound by reading weights, and there MKL's plain layout costs two to three times the packed one
(4 rows of 256 -> 4096 in fp32 on two cores: 247 us plain, 66 us packed); at 2,048 rows packing gains a tenth.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# Below this a call's fixed cost (about 15 us) outweighs the faster reads.
PACKED_ELEMENTS = 100_000
_PACKED_DTYPES = (torch.float32, torch.bfloat16)


# The overload itself: looking it up by name at every call costs as much as a small product.
_packet = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_packed_linear: Callable[..., Tensor] | None = getattr(_packet, "default", None)


class Linear:
    """weight: [out, in], bias: [out] or None; calling it maps [..., in] to [..., out] in the weight's dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias
        self.packed = weight.numel() >= PACKED_ELEMENTS and min(weight.shape) >= 64 and can_pack(weight)
        self.weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out]."""
        if self.packed and _packed_linear is not None:
            return _packed_linear(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


def can_pack(weight: Tensor) -> bool:
    """Whether this build of torch packs such a weight: oneDNN is optional, and bf16 needs instructions for it."""
    if weight.device.type != "cpu" or weight.dtype not in _PACKED_DTYPES:
        return False
    available: Callable[[], bool] = torch.backends.mkldnn.is_available
    if not (available() and _packed_linear is not None):
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return True

"""RMSNorm in fp32, with weights stored as 1 + w."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """x: [..., d] fp32 -> [..., 1] fp32, 1 / sqrt(mean(x^2) + eps).

    vector_norm is one vectorised pass on a CPU, where pow and mean are two and slower.
    """
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.mul_(x.shape[-1] ** -0.5).square_().add_(eps).rsqrt_()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [..., d], weight: [..., d] fp32 (1 + w) -> [..., d] in x's dtype, normalised over the last axis."""
    wide = x.float()
    return (wide * inverse_rms(wide, eps)).mul_(weight).to(x.dtype)


def unit_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x: [..., d] fp32 -> x / sqrt(sum(x^2) + eps)."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * norm.square_().add_(eps).rsqrt_()

"""RMSNorm in fp32, with weights stored as 1 + w."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.lru_cache(maxsize=64)
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)


def _inverse_norm(x: Tensor, eps: float, scale: float) -> Tensor:
    """1 / sqrt(scale * sum(x^2) + eps) over the last axis, kept as [..., 1].

    vector_norm is one vectorised pass on a CPU, where pow and mean are two and slower.
    """
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_constant(eps, x.device), norm, norm, value=scale).rsqrt_()


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """x: [..., d] fp32 -> [..., 1] fp32, 1 / sqrt(mean(x^2) + eps)."""
    return _inverse_norm(x, eps, 1.0 / x.shape[-1])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [..., d], weight: [..., d] fp32 (1 + w) -> [..., d] in x's dtype, normalised over the last axis."""
    wide = x.float()
    return (wide * inverse_rms(wide, eps)).mul_(weight).to(x.dtype)


def unit_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x: [..., d] fp32 -> x / sqrt(sum(x^2) + eps)."""
    return x * _inverse_norm(x, eps, 1.0)

"""Vectorised scoring and selection: what a CPU runs unless PAGE4_KERNELS=reference.

Kernels know tensors only: no rows, no layouts, no choices. The operations (select, plan, attend) own those.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def top_blocks(scores: Tensor, visible: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The best min(top_k, visible) columns of each row: score descending, then column ascending.

    scores: [R, B] fp32 without NaN in visible columns; visible: [R] int64, columns at and after it do not count.
    Returns ids [R, min(top_k, B)] int32 ascending with -1 after the last, and counts [R] int32.

    The k-th best value splits a row into columns above it, all taken, and columns equal to it, of which the lowest ids
    fill what is left: exact for any ties, and -0.0 equals +0.0 because comparisons say so.
    """
    columns = torch.arange(scores.shape[1], device=scores.device)
    chosen = columns < visible.unsqueeze(1)
    width = min(top_k, scores.shape[1])
    counts = visible.clamp(max=width)
    if scores.shape[1] > top_k:
        masked = scores.masked_fill(~chosen, -math.inf)
        kth = masked.topk(top_k, dim=1, sorted=False).values.amin(1, keepdim=True)
        chosen.logical_and_(masked >= kth)
        tied = (chosen.sum(1) > counts).nonzero().squeeze(1)
        if tied.numel():
            chosen[tied] = _break_ties(masked[tied], chosen[tied], kth[tied], top_k)
    return ids_of_mask(chosen, counts, width), counts.int()


def _break_ties(masked: Tensor, chosen: Tensor, kth: Tensor, top_k: int) -> Tensor:
    """Of the columns at or above the k-th value, all above it and the lowest ids equal to it, top_k in all."""
    above = masked > kth
    equal = chosen & ~above
    left = top_k - above.sum(1, keepdim=True)
    return above.logical_or_(equal.logical_and_(equal.cumsum(1, dtype=torch.int32) <= left))


def ids_of_mask(chosen: Tensor, counts: Tensor, width: int) -> Tensor:
    """Ascending ids of set columns: chosen [R, B] bool with counts [R] of them set -> [R, width] int32, -1 padded."""
    ids = torch.full((chosen.shape[0], width), -1, dtype=torch.int32, device=chosen.device)
    places = torch.arange(width, device=chosen.device) < counts.unsqueeze(1)
    ids[places] = chosen.nonzero()[:, 1].int()
    return ids


def index_scores(index_q: Tensor, keys: Tensor) -> Tensor:
    """Sum over heads of relu(q . key) / sqrt(E): index_q [n, T, I, E], keys [n, B, E] -> [n, T, B] fp32."""
    n, rows, heads, dim = index_q.shape
    dots = torch.bmm(index_q.float().view(n, rows * heads, dim), keys.float().transpose(1, 2))
    return dots.relu_().view(n, rows, heads, -1).sum(2).div_(math.sqrt(dim))

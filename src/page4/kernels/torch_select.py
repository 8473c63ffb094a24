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
    """
    return checked_top_blocks(scores, visible, top_k)[:2]


def checked_top_blocks(scores: Tensor, visible: Tensor, top_k: int) -> tuple[Tensor, Tensor, int | None]:
    """As `top_blocks`, and the first row with a NaN in a visible column, whose ids mean nothing; None when none has.

    Where the k-th and the next value differ, the k best are one set in any order. Where they do not, the row is split
    at that value: columns above it are all taken, and of the columns equal to it the lowest ids fill what is left.
    Exact for any ties, and -0.0 equals +0.0 because comparisons say so.
    """
    width = min(top_k, scores.shape[1])
    columns = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    hidden = columns >= visible.int().unsqueeze(1)
    counts = visible.clamp(max=width)
    masked = scores.masked_fill(hidden, -math.inf)
    if scores.shape[1] <= top_k:
        bad = masked.isnan().any(1)
        ids = torch.where(hidden, -1, columns)
    else:
        values, found = masked.topk(top_k + 1, dim=1)
        bad = values[:, 0].isnan()  # topk sorts NaN before every number
        ids = found[:, :top_k].sort(1).values.int()
        # A NaN is above and equal to nothing, so a row with one has too few ids to split.
        tied = (values[:, top_k - 1] == values[:, top_k]).logical_and_(~bad).nonzero().squeeze(1)
        if tied.numel():
            kth = values[:, top_k - 1 : top_k]
            ids[tied] = _break_ties(masked[tied], kth[tied], ~hidden[tied], counts[tied], top_k)
    return ids, counts.int(), int(bad.nonzero()[0]) if bool(bad.any()) else None


def _break_ties(masked: Tensor, kth: Tensor, seen: Tensor, counts: Tensor, top_k: int) -> Tensor:
    """Ids of all columns above the k-th value and of the lowest columns equal to it, top_k in all: [R, top_k] int32."""
    above = masked > kth
    equal = (masked == kth).logical_and_(seen)
    left = top_k - above.sum(1, keepdim=True)
    chosen = above.logical_or_(equal.logical_and_(equal.cumsum(1, dtype=torch.int32) <= left))
    ids = torch.full((chosen.shape[0], top_k), -1, dtype=torch.int32, device=chosen.device)
    places = torch.arange(top_k, device=chosen.device) < counts.unsqueeze(1)
    ids[places] = chosen.nonzero()[:, 1].int()
    return ids


def index_scores(index_q: Tensor, keys: Tensor) -> Tensor:
    """Sum over heads of relu(q . key) / sqrt(E): index_q [n, T, I, E], keys [n, B, E] -> [n, T, B] fp32."""
    n, rows, heads, dim = index_q.shape
    dots = torch.bmm(index_q.float().reshape(n, rows * heads, dim), keys.float().transpose(1, 2))
    return dots.relu_().view(n, rows, heads, -1).sum(2).div_(math.sqrt(dim))

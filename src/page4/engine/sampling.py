"""From logits to tokens, many rows at once: greedy, filtered distributions, draws, log probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from page4.engine.params import SamplingParams


def greedy(logits: Tensor) -> tuple[list[int], list[bool]]:
    """logits: [M, V] fp32 -> most likely token of each row (ties: lowest id), and whether the row is usable.

    A row with a NaN or +inf, or with nothing but -inf, has no most likely token and is not usable.
    """
    best = logits.max(dim=-1)
    values = best.values.tolist()
    return best.indices.tolist(), [math.isfinite(value) for value in values]


def mask_tokens(logits: Tensor, rows: Sequence[int], stop_ids: Sequence[Sequence[int]]) -> Tensor:
    """Logits whose row `rows[i]` cannot give `stop_ids[i]`: a copy, or the input itself when nothing is masked."""
    pairs = [(row, token) for row, ids in zip(rows, stop_ids, strict=True) for token in ids]
    if not pairs:
        return logits
    masked = logits.clone()
    row_index, tokens = torch.tensor(pairs, device=logits.device).unbind(1)
    masked[row_index, tokens] = -math.inf
    return masked


@dataclass(frozen=True)
class Filters:
    """The sampling parameters of M rows as columns [M, 1]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    sorts: bool
    cuts: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> Filters:
        """Columns from one parameter object a row."""

        def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

        return cls(
            temperature=column([p.temperature for p in params], torch.float64),
            top_k=column([p.top_k if p.top_k > 0 else 2**31 for p in params], torch.int64),
            top_p=column([p.top_p for p in params]),
            min_p=column([p.min_p for p in params]),
            sorts=any(p.top_k > 0 or p.top_p < 1 for p in params),
            cuts=any(p.min_p > 0 for p in params),
        )


def distribution(logits: Tensor, filters: Filters) -> Tensor:
    """The distribution that a row's tokens are drawn from: [M, V] fp32 logits -> [M, V] fp32 probabilities.

    In the order of vLLM: temperature, min-p (relative to the most likely token), top-k, top-p over what is left. Each
    row depends on nothing but itself. At the edge of top-k and top-p the lower id of equal tokens stays.
    """
    highest = logits.max(dim=-1, keepdim=True).values
    # fp64: a temperature of 1e-300 must still divide 0 to 0 and everything else to -inf.
    scaled = ((logits - highest).double() / filters.temperature).float()
    if filters.cuts:
        # exp(scaled) is the probability relative to the most likely token.
        scaled = scaled.masked_fill(scaled.exp() < filters.min_p, -math.inf)
    if filters.sorts:
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(ordered.shape[-1], device=logits.device)
        drop = rank >= filters.top_k
        kept = ordered.masked_fill(drop, -math.inf).softmax(dim=-1)
        before = kept.cumsum(dim=-1) - kept
        drop |= (before >= filters.top_p) & (filters.top_p < 1) & (rank > 0)
        scaled = scaled.masked_fill(torch.zeros_like(drop).scatter_(1, order, drop), -math.inf)
    return scaled.softmax(dim=-1)


def draw(weights: Tensor, uniforms: Sequence[float]) -> list[int]:
    """One token a row by inverting the cumulative sum: weights [M, V] of 0 or more, one number in [0, 1) a row.

    A token of weight 0 is never drawn. Weights need not sum to 1.
    """
    cumulative = weights.double().cumsum(dim=-1)
    u = torch.tensor(uniforms, dtype=torch.float64, device=weights.device).unsqueeze(1)
    # The first token whose cumulative weight exceeds u * total; u < 1, but the product may round up to the total.
    tokens = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True).squeeze(1)
    last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).int().argmax(dim=-1)
    found: list[int] = torch.minimum(tokens, last).tolist()
    return found


@dataclass(frozen=True)
class TokenLogprob:
    """One token's log probability and its rank (1 is the most likely) in the target's raw distribution."""

    token_id: int
    logprob: float
    rank: int


# The emitted token first, then the most likely ones, best first (the emitted one among them when it is).
Logprobs = tuple[TokenLogprob, ...]


def logprobs(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[Logprobs]:
    """For each row of logits [M, V] the log probability of `tokens[i]` and of the `counts[i]` most likely tokens."""
    if not tokens:
        return []
    chosen = torch.tensor(tokens, device=logits.device).unsqueeze(1)
    # fp64 after the raw logits: exactly 0.0 must mean that the token is certain.
    values = logits.double().log_softmax(dim=-1)
    own = values.gather(1, chosen)
    # Ties count as in the greedy order: a token's rank is one more than the tokens that greedy would take before it.
    ids = torch.arange(values.shape[-1], device=logits.device)
    rank = ((values > own) | ((values == own) & (ids < chosen))).sum(dim=-1) + 1
    most = min(max(counts), values.shape[-1])
    top_values, top_ids = _top(values, most)
    rows = zip(
        tokens, own.squeeze(1).tolist(), rank.tolist(), top_ids.tolist(), top_values.tolist(), counts, strict=True
    )
    return [
        (
            TokenLogprob(token, value, place),
            *(TokenLogprob(i, v, n + 1) for n, (i, v) in enumerate(zip(ids_[:count], values_[:count], strict=True))),
        )
        for token, value, place, ids_, values_, count in rows
    ]


def _top(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row [M, V], value descending, then id ascending."""
    if count == 0:
        empty = values[:, :0]
        return empty, empty.long()
    ordered, order = values.sort(dim=-1, descending=True, stable=True)
    return ordered[:, :count], order[:, :count]

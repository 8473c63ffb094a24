"""Where two greedy runs of one prompt part, and whether rounding explains it.

A window computes a row beside other rows, so in a 16-bit type its sums round differently than alone. Two tokens whose
logits are closer than that may change places; anything else is an error of the engine. In fp32 nothing is excused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from page4.errors import UsageError, message

ROUNDED_TYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Difference:
    """The first place where two runs differ: `tokens` of the plain and of the other run, None for one that ended.

    top2_gap: between the plain run's two best logits there; tolerance: what rounding may move that gap by.
    """

    position: int
    tokens: tuple[int | None, int | None]
    top2_gap: float
    tolerance: float
    dtype: torch.dtype

    @property
    def is_rounding(self) -> bool:
        """Whether the type's rounding explains the difference."""
        return self.dtype in ROUNDED_TYPES and self.top2_gap <= self.tolerance

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        verdict = "within the rounding" if self.is_rounding else "NOT explained by the rounding"
        return (
            f"token {self.position}: {self.tokens[0]} or {self.tokens[1]}, top-2 gap {self.top2_gap:.3g}, "
            f"{verdict} of {name} ({self.tolerance:.3g})"
        )


def first_difference(
    plain: Sequence[int], other: Sequence[int], logits: Tensor, dtype: torch.dtype
) -> Difference | None:
    """The first difference between the emitted tokens of two greedy runs, None when they are equal.

    logits: [T, V], the plain run's, row j for its token j. Each run rounds each of the two best logits, by half a unit
    in the last place: together two units of the larger one. A token that is not among the two best, or a run that ended
    early, is never rounding (its gap is infinite), and neither is any difference in fp32. Raises `UsageError` when
    `logits` has no row for a token.
    """
    if logits.ndim != 2 or logits.shape[0] < len(plain):
        do = "pass the logits of every token of the plain run"
        raise UsageError(message("logits", allowed=f"[{len(plain)}, V]", got=list(logits.shape), do=do))
    for position in range(max(len(plain), len(other))):
        tokens = tuple(run[position] if position < len(run) else None for run in (plain, other))
        if tokens[0] == tokens[1]:
            continue
        gap, tolerance = float("inf"), 0.0
        if None not in tokens:
            row = logits[position].double()
            best = row.topk(min(2, row.numel()))
            ranked = [int(token) for token in tokens if token is not None]
            # The two tokens need not be the first two of a tie: what counts is that both have the best two values.
            if float(row[ranked].min()) >= float(best.values[-1]):
                gap = float(best.values[0] - best.values[-1])
            if dtype in ROUNDED_TYPES:
                tolerance = 2 * torch.finfo(dtype).eps * float(best.values.abs().max())
        return Difference(position, (tokens[0], tokens[1]), gap, tolerance, dtype)
    return None

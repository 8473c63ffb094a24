"""Accepting and rejecting drafts. Greedy: while they are the target's own choice. Sampled: rejection sampling.

A window is the newest token and k drafts; row j of the target's output gives the distribution p of the token after row
j, which draft j proposes from its own distribution q. Accept a draft x with probability min(1, p(x) / q(x)); at the
first refusal draw from max(p - q, 0), normalised; after k acceptances draw a bonus token from the last row. The emitted
tokens have distribution p exactly (Leviathan, Kalman and Matias, 2023; Chen et al., 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from page4.engine.chance import Purpose, uniform
from page4.engine.sampling import draw


def accept_greedy(drafts: Sequence[int], choices: Sequence[int]) -> list[int]:
    """The tokens that a window emits: drafts while they are the target's choice, then the target's choice.

    `choices[j]` is the target's token after row j of the window: one more than there are drafts.
    """
    accepted = 0
    for draft, choice in zip(drafts, choices, strict=False):
        if draft != choice:
            break
        accepted += 1
    return [*drafts[:accepted], choices[accepted]]


def last_accepted_rows(row_starts: Sequence[int], accepted: Sequence[int]) -> list[int]:
    """Rows of the next draft step in a buffer that holds each request's rows from `row_starts[n]` on (case B07).

    `accepted` counts drafts, so the row is that of the last accepted token: 0 is the row of the verified token.
    """
    return [start + count for start, count in zip(row_starts, accepted, strict=True)]


@dataclass(frozen=True)
class Window:
    """One sampled request's window: `start` is its first row in p; q: [k, V], or None when drafts are certain.

    `position` is the position (in the request) of the first token that the window emits.
    """

    start: int
    drafts: Sequence[int]
    q: Tensor | None
    seed: int
    position: int


def verify_sampled(p: Tensor, windows: Sequence[Window]) -> list[list[int]]:
    """The tokens that each window emits. p: [M, V] fp32, the target's distributions after the request's own filters."""
    q = _draft_distributions(p, windows)
    accepted = _accepted(p, q, windows)
    rows = last_accepted_rows([w.start for w in windows], accepted)
    weights = p[torch.tensor(rows, device=p.device)]
    refused = [i for i, (w, count) in enumerate(zip(windows, accepted, strict=True)) if count < len(w.drafts)]
    if refused:
        q_starts = _starts(windows)
        at = torch.tensor(refused, device=p.device)
        q_rows = torch.tensor([q_starts[i] + accepted[i] for i in refused], device=p.device)
        left = (weights[at] - q[q_rows]).clamp_(min=0)
        # Where a draft is refused p and q differ, so something is left; if rounding says otherwise, p itself is right.
        weights[at] = torch.where(left.any(dim=-1, keepdim=True), left, weights[at])
    numbers = [uniform(w.seed, w.position + a, Purpose.TOKEN) for w, a in zip(windows, accepted, strict=True)]
    tokens = draw(weights, numbers)
    return [[*w.drafts[:a], token] for w, a, token in zip(windows, accepted, tokens, strict=True)]


def _accepted(p: Tensor, q: Tensor, windows: Sequence[Window]) -> list[int]:
    rows = [w.start + j for w in windows for j in range(len(w.drafts))]
    if not rows:
        return [0] * len(windows)
    drafts = torch.tensor([d for w in windows for d in w.drafts], device=p.device)
    p_draft = p[torch.tensor(rows, device=p.device), drafts].tolist()
    q_draft = q.gather(1, drafts.unsqueeze(1)).squeeze(1).tolist()
    counts = []
    for window, row in zip(windows, _starts(windows), strict=True):
        count = 0
        for j in range(len(window.drafts)):
            number = uniform(window.seed, window.position + j, Purpose.ACCEPT)
            # u < p / q without the division: a draft with p = 0 is never accepted, one with p >= q always.
            if not number * q_draft[row + j] < p_draft[row + j]:
                break
            count += 1
        counts.append(count)
    return counts


def _starts(windows: Sequence[Window]) -> list[int]:
    """Each window's first row where the drafts of all windows follow each other."""
    return list(accumulate((len(w.drafts) for w in windows), initial=0))[:-1]


def _draft_distributions(p: Tensor, windows: Sequence[Window]) -> Tensor:
    """[all drafts, V]: each window's q by its owner, not by its row; a certain draft is one-hot."""
    parts = []
    for window in windows:
        if window.q is not None:
            parts.append(window.q[: len(window.drafts)])
        elif window.drafts:
            drafts = torch.tensor(window.drafts, device=p.device)
            parts.append(torch.nn.functional.one_hot(drafts, p.shape[-1]).to(p.dtype))
    return torch.cat(parts) if parts else p[:0]

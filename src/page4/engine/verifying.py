"""The target side of a step: which rows need logits, and which tokens they give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from page4.engine.request import Request
from page4.engine.sampling import Filters, Logprobs, distribution, greedy, logprobs, mask_tokens
from page4.engine.scheduler import Work
from page4.engine.speculate import Window, accept_greedy, verify_sampled


@dataclass(frozen=True)
class Asked:
    """Rows of one request whose logits give tokens: `start` is the first among the step's asked rows."""

    work: Work
    start: int

    @property
    def request(self) -> Request:
        """The request."""
        return self.work.request

    @property
    def drafts(self) -> list[int]:
        """Drafts that the window verifies."""
        return list(self.work.token_ids[1:]) if self.work.is_window else []

    @property
    def num_rows(self) -> int:
        """Rows asked for: a whole window, or the last row of a prompt."""
        return 1 + len(self.drafts)


def gives_token(work: Work) -> bool:
    """Whether a step's rows of a request lead to tokens: a window, or the end of a prompt that has emitted nothing."""
    request = work.request
    return work.is_window or (
        request.num_emitted == 0 and work.first_position + work.num_rows == request.prefill_target
    )


@dataclass(frozen=True)
class Verified:
    """Tokens of one request in order, and their log probabilities when asked for; `usable` is False on NaN logits."""

    tokens: list[int]
    logprobs: list[Logprobs] | None
    usable: bool


def verify(logits: Tensor, asked: Sequence[Asked], q: Mapping[str, Tensor]) -> dict[str, Verified]:
    """logits: [M, V] fp32 of all asked rows; q: distributions of sampled drafts by owner. Returns tokens by owner."""
    rows, stops = [], []
    for entry in asked:
        for offset in range(entry.num_rows):
            if entry.request.needs_eos_mask(offset):
                rows.append(entry.start + offset)
                stops.append(sorted(entry.request.stop_ids))
    masked = mask_tokens(logits, rows, stops)
    choices, usable = greedy(masked)
    tokens: dict[str, list[int]] = {}
    ok: dict[str, bool] = {}
    for entry in asked:
        if entry.request.params.greedy:
            span = slice(entry.start, entry.start + entry.num_rows)
            tokens[entry.request.owner] = accept_greedy(entry.drafts, choices[span])
    sampled = [e for e in asked if not e.request.params.greedy]
    if sampled:
        for entry, drawn in zip(sampled, _sample(masked, sampled, q), strict=True):
            tokens[entry.request.owner] = drawn
    for entry in asked:
        # Only rows that gave a token count: what follows a refused draft is nobody's.
        owner = entry.request.owner
        ok[owner] = all(usable[entry.start : entry.start + len(tokens[owner])])
    scored = _logprobs(logits, asked, tokens, ok)
    return {
        entry.request.owner: Verified(
            tokens.get(entry.request.owner, []), scored.get(entry.request.owner), ok[entry.request.owner]
        )
        for entry in asked
    }


def _sample(masked: Tensor, sampled: Sequence[Asked], q: Mapping[str, Tensor]) -> list[list[int]]:
    rows = [entry.start + i for entry in sampled for i in range(entry.num_rows)]
    params = [entry.request.params for entry in sampled for _ in range(entry.num_rows)]
    p = distribution(masked[torch.tensor(rows, device=masked.device)], Filters.of(params, masked.device))
    windows, start = [], 0
    for entry in sampled:
        request = entry.request
        windows.append(Window(start, entry.drafts, q.get(request.owner), request.seed, request.num_tokens))
        start += entry.num_rows
    return verify_sampled(p, windows)


def _logprobs(
    logits: Tensor, asked: Sequence[Asked], tokens: Mapping[str, list[int]], ok: Mapping[str, bool]
) -> dict[str, list[Logprobs]]:
    """The target's raw log probabilities of the tokens, for the requests that want them."""
    wanting = [e for e in asked if e.request.params.logprobs is not None and ok[e.request.owner]]
    if not wanting:
        return {}
    rows = [e.start + i for e in wanting for i in range(len(tokens[e.request.owner]))]
    flat = [token for e in wanting for token in tokens[e.request.owner]]
    counts = [e.request.params.logprobs or 0 for e in wanting for _ in tokens[e.request.owner]]
    found = iter(logprobs(logits[torch.tensor(rows, device=logits.device)], flat, counts))
    return {e.request.owner: [next(found) for _ in tokens[e.request.owner]] for e in wanting}

"""A watch over each request's drafts: two patterns that no healthy request shows for long.

Acceptance of zero over many windows costs speed and says that the draft head looks at something else than the target.
Acceptance that is high and flat while the text repeats itself exactly says that target and drafts agree on a loop: the
state behind both may be broken. Either way the request goes on without drafts, which changes no token, and the event is
recorded for whoever serves it (case B36).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Signature = Literal["zero acceptance", "flat acceptance over a loop"]

# A head whose first draft is right one time in ten has 64 such windows in a row with probability 0.9 ** 64 = 0.001.
ZERO_WINDOWS = 64
# Flat: every position of a window is accepted almost always, over at least this many windows.
FLAT_WINDOWS = 48
FLAT_SHARE = 0.9
# A loop: one run of tokens of up to MAX_PERIOD, again and again, for at least so many tokens and so many times. A count
# ("1, 2, 3, ..") or a table repeats its separators, but not whole runs.
MAX_PERIOD = 32
LOOP_TOKENS = 160
LOOP_TIMES = 25


@dataclass(frozen=True)
class WatchdogEvent:
    """An alarm: whose, which pattern, at which token of the request."""

    request_id: str
    index: int
    signature: Signature
    num_tokens: int


@dataclass
class Watchdog:
    """The windows of one request. Feed every window that had drafts; `alarm` is set at most once."""

    windows: int = 0
    accepted: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    zero_run: int = 0
    alarm: Signature | None = None

    @property
    def acceptance(self) -> float | None:
        """Accepted drafts a draft; None before there is enough to say anything."""
        if self.windows < FLAT_WINDOWS:
            return None
        return self.accepted / sum(self.drafted_per_position)

    def observe(self, drafted: int, accepted: int, token_ids: Sequence[int]) -> Signature | None:
        """One window of `drafted` drafts, `accepted` of them; token_ids: all of the request. Returns a new alarm."""
        if not drafted or self.alarm is not None:
            return None
        self.windows += 1
        self.accepted += accepted
        self.zero_run = 0 if accepted else self.zero_run + 1
        for position in range(drafted):
            if position == len(self.drafted_per_position):
                self.drafted_per_position.append(0)
                self.accepted_per_position.append(0)
            self.drafted_per_position[position] += 1
            self.accepted_per_position[position] += position < accepted
        if self.zero_run >= ZERO_WINDOWS:
            self.alarm = "zero acceptance"
        elif self._is_flat() and period_of_loop(token_ids) is not None:
            self.alarm = "flat acceptance over a loop"
        return self.alarm

    def _is_flat(self) -> bool:
        if self.windows < FLAT_WINDOWS:
            return False
        pairs = zip(self.accepted_per_position, self.drafted_per_position, strict=True)
        return all(accepted >= FLAT_SHARE * drafted for accepted, drafted in pairs)


def period_of_loop(token_ids: Sequence[int]) -> int | None:
    """The shortest period with which the newest tokens repeat exactly, long enough to be a loop; else None."""
    for period in range(1, MAX_PERIOD + 1):
        length = max(LOOP_TOKENS, LOOP_TIMES * period)
        if len(token_ids) < length:
            return None
        newest = list(token_ids[-length:])
        if newest[period:] == newest[:-period]:
            return period
    return None

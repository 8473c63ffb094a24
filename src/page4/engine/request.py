"""One completion in the engine: its tokens, how far its state has come, what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from page4.cache.pages import StateSlot
from page4.engine.params import SamplingParams
from page4.engine.watchdog import Watchdog

FinishReason = Literal["stop", "length", "abort", "error"]


class Status(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """A completion: `token_ids` is the prompt and everything emitted; `num_computed` tokens of it are in the state.

    `arrival` orders requests by age and makes `owner` unique, so that bookkeeping never depends on row order or on
    an id that a caller uses twice. `drafts` are the tokens proposed to follow the last token of `token_ids`.
    `drafts_off` is set when the draft head cannot compute the request, and when its watchdog has raised an alarm.
    """

    request_id: str
    index: int
    arrival: int
    params: SamplingParams
    prompt_len: int
    token_ids: list[int]
    seed: int
    length_limit: int
    stop_ids: frozenset[int] = frozenset()
    status: Status = Status.WAITING
    num_computed: int = 0
    slot: StateSlot | None = None
    drafts: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    preemptions: int = 0
    drafts_off: bool = False
    watchdog: Watchdog = field(default_factory=Watchdog)

    @property
    def owner(self) -> str:
        """The key of this completion wherever something is kept for it."""
        return f"{self.arrival}:{self.request_id}:{self.index}"

    @property
    def num_tokens(self) -> int:
        """Prompt and emitted tokens."""
        return len(self.token_ids)

    @property
    def num_emitted(self) -> int:
        """Tokens emitted so far."""
        return len(self.token_ids) - self.prompt_len

    @property
    def prefill_target(self) -> int:
        """Tokens to compute before windows: the prompt, or after a preemption all but the newest token."""
        return self.prompt_len if self.num_emitted == 0 else self.num_tokens - 1

    @property
    def decoding(self) -> bool:
        """Whether the next step is a window: the newest token is emitted, and all before it are computed."""
        return self.num_emitted > 0 and self.num_computed == self.num_tokens - 1

    @property
    def finished(self) -> bool:
        """Whether nothing more will be emitted."""
        return self.status is Status.FINISHED

    def draft_room(self) -> int:
        """Drafts that could still be emitted: the window's own token takes the last place before the limit."""
        return 0 if self.drafts_off else max(0, self.length_limit - self.num_tokens - 1)

    def needs_eos_mask(self, offset: int = 0) -> bool:
        """Whether the token emitted after `offset` more tokens may not be a stop id yet (min_tokens)."""
        return self.num_emitted + offset < self.params.min_tokens

    def context(self, position: int, tokens: int) -> list[int]:
        """Up to `tokens` tokens that precede `position`, fewer at the start."""
        return self.token_ids[max(0, position - tokens) : position]

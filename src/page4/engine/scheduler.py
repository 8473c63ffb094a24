"""Which rows the next step computes. No torch here.

Decode windows come first, oldest request first, and always whole; the rest of the token budget goes to prompts, first
those under way, then waiting ones, as many as fit. A waiting request enters when its state and the pages of all its
tokens so far are free, so a prefill never stalls half way. When a window lacks a page the newest running request is
preempted: it gives back everything and computes its prompt and emitted tokens again later. The oldest request is never
preempted for another and fits alone (admission), so every request ends.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from page4.cache.pages import PageAllocator, StateSlot
from page4.engine.admission import Sizes
from page4.engine.request import Request, Status


@dataclass(frozen=True)
class Work:
    """The rows of one request in a step: a decode window (newest token, then drafts) or a part of a prompt."""

    request: Request
    is_window: bool
    first_position: int
    token_ids: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Rows in the step."""
        return len(self.token_ids)

    @property
    def num_drafts(self) -> int:
        """Rows that hold drafts."""
        return self.num_rows - 1 if self.is_window else 0


@dataclass(frozen=True)
class StepPlan:
    """Windows first, then prompt chunks; and who was preempted for them."""

    windows: tuple[Work, ...]
    chunks: tuple[Work, ...]
    preempted: tuple[Request, ...]

    @property
    def work(self) -> tuple[Work, ...]:
        """All rows of the step by request, in row order."""
        return self.windows + self.chunks

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return sum(work.num_rows for work in self.work)

    def parts(self) -> tuple[StepPlan, ...]:
        """The same work one request a step; of a single window its first row alone; nothing when it is that already."""
        if len(self.work) > 1:
            windows = [StepPlan((work,), (), ()) for work in self.windows]
            return (*windows, *(StepPlan((), (work,), ()) for work in self.chunks))
        short = [replace(work, token_ids=work.token_ids[:1]) for work in self.windows if work.num_drafts]
        return tuple(StepPlan((work,), (), ()) for work in short)


def _on_enter(request: Request, slot: StateSlot) -> None:
    del request, slot


def _on_leave(request: Request) -> None:
    del request


@dataclass
class Scheduler:
    """Queues of requests and the pages that they hold.

    `on_enter` is called when a request got its state slot (the runner zeroes it), `on_leave` when it lost everything.
    """

    allocator: PageAllocator
    sizes: Sizes
    budget: int
    max_running: int
    max_model_len: int
    drafts: int = 0
    on_enter: Callable[[Request, StateSlot], None] = _on_enter
    on_leave: Callable[[Request], None] = _on_leave
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)

    def add(self, request: Request) -> None:
        """Queue a request by its age."""
        request.status = Status.WAITING
        insort(self.waiting, request, key=lambda r: r.arrival)

    def finish(self, request: Request) -> None:
        """Take the request out of the queues and give back all that it holds; finishing twice is fine."""
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        self._release(request)
        request.status = Status.FINISHED

    def has_unfinished(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def schedule(self) -> StepPlan:
        """Plan one step; the pages of its rows are allocated when this returns."""
        preempted: list[Request] = []
        windows = self._windows(preempted)
        left = self.budget - sum(work.num_rows for work in windows)
        chunks: list[Work] = []
        for request in self.running:
            if not request.decoding and left > 0:
                chunks.append(self._chunk(request, left))
                left -= chunks[-1].num_rows
        while not preempted and left > 0 and self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            if not self._enter(request):
                break
            chunks.append(self._chunk(request, left))
            left -= chunks[-1].num_rows
        return StepPlan(tuple(windows), tuple(chunks), tuple(preempted))

    def _windows(self, preempted: list[Request]) -> list[Work]:
        windows: list[Work] = []
        for request in [r for r in self.running if r.decoding]:
            tokens = self._reach(request, 1 + len(request.drafts))
            while request.status is Status.RUNNING and not self._grow(request, tokens):
                victim = self.running[-1]
                self.preempt(victim)
                preempted.append(victim)
            if request.status is Status.RUNNING:
                rows = (request.token_ids[-1], *request.drafts)
                windows.append(Work(request, True, request.num_computed, rows))
        return windows

    def _chunk(self, request: Request, left: int) -> Work:
        end = min(request.prefill_target, request.num_computed + left)
        return Work(request, False, request.num_computed, tuple(request.token_ids[request.num_computed : end]))

    def _reach(self, request: Request, rows: int) -> int:
        """Tokens whose K/V the step and the drafts after it may write."""
        return min(self.max_model_len, request.num_computed + rows + self.drafts)

    def _grow(self, request: Request, tokens: int) -> bool:
        missing = self.sizes.pages_for_tokens(tokens) - len(self.allocator.pages(request.owner))
        return missing <= 0 or self.allocator.allocate_pages(request.owner, missing) is not None

    def _enter(self, request: Request) -> bool:
        """Give a waiting request its state and the pages of all its tokens so far; nothing is kept on failure."""
        slot = self.allocator.allocate_state(request.owner)
        if slot is None:
            return False
        tokens = min(self.max_model_len, request.prefill_target + 1 + self.drafts)
        if not self._grow(request, tokens):
            self.allocator.free(request.owner)
            return False
        self.waiting.remove(request)
        request.slot = slot
        request.num_computed = 0
        request.status = Status.RUNNING
        insort(self.running, request, key=lambda r: r.arrival)
        self.on_enter(request, slot)
        return True

    def preempt(self, request: Request) -> None:
        """Take everything back from a running request; its tokens and drafts stay, so it goes on as if nothing was."""
        self.running.remove(request)
        self._release(request)
        request.num_computed = 0
        request.preemptions += 1
        self.add(request)

    def _release(self, request: Request) -> None:
        self.allocator.free(request.owner)
        request.slot = None
        self.on_leave(request)

"""What the tests of the engine share; no torch here."""

from __future__ import annotations

from typing import Any

from page4.cache.pages import PageAllocator
from page4.engine.admission import Sizes
from page4.engine.params import SamplingParams
from page4.engine.request import Request
from page4.engine.scheduler import Scheduler, StepPlan


def make_request(
    name: str, arrival: int, prompt: int | list[int], *, max_model_len: int = 1 << 30, **params: Any
) -> Request:
    """A request with a prompt of that many tokens, or of those ids."""
    tokens = list(range(1, prompt + 1)) if isinstance(prompt, int) else list(prompt)
    settings = SamplingParams(**params)
    most = max_model_len if settings.max_tokens is None else len(tokens) + settings.max_tokens
    return Request(
        request_id=name,
        index=0,
        arrival=arrival,
        params=settings,
        prompt_len=len(tokens),
        token_ids=tokens,
        seed=arrival,
        length_limit=min(max_model_len, most),
    )


def make_scheduler(
    *,
    num_pages: int = 64,
    pages_per_state: int = 2,
    page_tokens: int = 4,
    budget: int = 32,
    max_running: int = 4,
    max_model_len: int = 96,
    drafts: int = 0,
) -> Scheduler:
    """A scheduler over a small allocator."""
    return Scheduler(
        allocator=PageAllocator(num_pages, pages_per_state),
        sizes=Sizes(page_bytes=256, page_tokens=page_tokens, pages_per_state=pages_per_state),
        budget=budget,
        max_running=max_running,
        max_model_len=max_model_len,
        drafts=drafts,
    )


def pretend_to_run(scheduler: Scheduler, plan: StepPlan, accept: int = 0) -> list[Request]:
    """Do to the requests what a step does, with `accept` drafts accepted (at most); returns who finished."""
    finished = []
    for work in plan.work:
        request = work.request
        taken = min(accept, work.num_drafts)
        request.num_computed += (1 + taken) if work.is_window else work.num_rows
        if work.is_window:
            request.token_ids.extend([7] * (taken + 1))
        elif request.num_emitted == 0 and request.num_computed == request.prompt_len:
            request.token_ids.append(7)
        if work.is_window or request.num_computed == request.num_tokens - 1:
            request.drafts = [9] * min(scheduler.drafts, request.draft_room())
        if request.num_tokens >= request.length_limit:
            scheduler.finish(request)
            finished.append(request)
    return finished

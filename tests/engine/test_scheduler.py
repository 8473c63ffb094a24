"""The scheduler as a state machine: never over budget, nobody starves, every page comes back."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tests.engine.helpers import make_request, make_scheduler, pretend_to_run

from page4.engine.request import Request, Status
from page4.engine.scheduler import Scheduler, StepPlan


def rows(plan: StepPlan) -> list[tuple[str, bool, int, int]]:
    return [(w.request.request_id, w.is_window, w.first_position, w.num_rows) for w in plan.work]


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    assert plan.num_rows <= scheduler.budget
    assert len(scheduler.running) <= scheduler.max_running
    owners = [w.request.owner for w in plan.work]
    assert len(owners) == len(set(owners))
    for work in plan.work:
        request = work.request
        assert work.num_rows >= 1
        assert work.first_position == request.num_computed
        assert request.slot is not None
        scheduler.allocator.check_slot(request.slot)
        held = len(scheduler.allocator.pages(request.owner)) * scheduler.sizes.page_tokens
        assert held >= work.first_position + work.num_rows
        assert work.is_window == (request.num_emitted > 0 and work.first_position == request.num_tokens - 1)
    pages = [p for r in scheduler.running for p in scheduler.allocator.pages(r.owner)]
    assert len(pages) == len(set(pages)) and 0 not in pages
    for request in scheduler.waiting:
        assert request.slot is None and not scheduler.allocator.pages(request.owner)


def test_prompts_share_a_step_and_long_ones_are_cut() -> None:
    scheduler = make_scheduler(budget=20)
    for i, length in enumerate((6, 30, 5)):
        scheduler.add(make_request(f"r{i}", i, length, max_tokens=4))
    plan = scheduler.schedule()
    assert rows(plan) == [("r0", False, 0, 6), ("r1", False, 0, 14)]
    pretend_to_run(scheduler, plan)
    plan = scheduler.schedule()
    assert rows(plan) == [("r0", True, 6, 1), ("r1", False, 14, 16), ("r2", False, 0, 3)]
    pretend_to_run(scheduler, plan)
    assert rows(scheduler.schedule()) == [("r0", True, 7, 1), ("r1", True, 30, 1), ("r2", False, 3, 2)]


def test_windows_are_whole_and_come_first() -> None:
    scheduler = make_scheduler(budget=16, drafts=3)
    scheduler.add(make_request("a", 0, 4, max_tokens=20))
    pretend_to_run(scheduler, scheduler.schedule())
    scheduler.add(make_request("b", 1, 40, max_tokens=20))
    assert rows(scheduler.schedule()) == [("a", True, 4, 4), ("b", False, 0, 12)]


def test_the_newest_is_preempted_and_comes_back_with_its_tokens_and_drafts() -> None:
    # Two requests of 8 + 12 tokens need 2 * (2 + 5) pages; 11 pages are there.
    scheduler = make_scheduler(num_pages=12, drafts=1)
    old, new = make_request("old", 0, 8, max_tokens=12), make_request("new", 1, 8, max_tokens=12)
    scheduler.add(old)
    scheduler.add(new)
    for _ in range(40):
        plan = scheduler.schedule()
        check_plan(scheduler, plan)
        if plan.preempted:
            break
        pretend_to_run(scheduler, plan)
    assert plan.preempted == (new,) and new.status is Status.WAITING and new.num_computed == 0
    tokens, drafts = list(new.token_ids), list(new.drafts)
    while not old.finished:
        pretend_to_run(scheduler, plan)
        plan = scheduler.schedule()
    assert new.token_ids == tokens and new.drafts == drafts
    assert rows(plan) == [("new", False, 0, len(tokens) - 1)]
    pretend_to_run(scheduler, plan)
    assert rows(scheduler.schedule()) == [("new", True, len(tokens) - 1, 1 + len(drafts))]


def test_a_request_that_does_not_fit_now_holds_back_those_behind_it() -> None:
    scheduler = make_scheduler(num_pages=24, budget=96)
    scheduler.add(make_request("first", 0, 40, max_tokens=2))
    pretend_to_run(scheduler, scheduler.schedule())
    scheduler.add(make_request("large", 1, 60, max_tokens=2))
    scheduler.add(make_request("small", 2, 4, max_tokens=2))
    assert rows(scheduler.schedule()) == [("first", True, 40, 1)]
    assert scheduler.allocator.free_pages == 23 - 2 - 11


def test_finish_in_every_state_returns_everything() -> None:
    scheduler = make_scheduler()
    requests = [make_request(f"r{i}", i, 40, max_tokens=4) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    plan = scheduler.schedule()
    assert [w.request for w in plan.work] == requests[:1]
    for request in requests:
        scheduler.finish(request)
        scheduler.finish(request)
    assert not scheduler.has_unfinished()
    assert scheduler.allocator.free_pages == scheduler.allocator.num_usable_pages


class World:
    """A scheduler under random arrivals, aborts and acceptance; small enough to preempt often."""

    def __init__(self, drafts: int, budget: int, pages: int, max_running: int) -> None:
        self.max_model_len = 40
        least = 1 + 2 + 10
        self.scheduler = make_scheduler(
            num_pages=least + pages,
            budget=max(budget, max_running * (drafts + 1)),
            max_running=max_running,
            max_model_len=self.max_model_len,
            drafts=drafts,
        )
        self.alive: list[Request] = []
        self.arrivals = 0

    def add(self, prompt: int, tokens: int) -> None:
        name = f"r{self.arrivals}"
        request = make_request(name, self.arrivals, prompt, max_tokens=tokens, max_model_len=self.max_model_len)
        self.arrivals += 1
        self.alive.append(request)
        self.scheduler.add(request)

    def step(self, accept: int) -> None:
        plan = self.scheduler.schedule()
        check_plan(self.scheduler, plan)
        assert plan.num_rows > 0 or not self.scheduler.has_unfinished()
        if plan.preempted:
            oldest = min(self.alive, key=lambda r: r.arrival)
            assert oldest not in plan.preempted
        for request in pretend_to_run(self.scheduler, plan, accept):
            self.alive.remove(request)

    def abort(self, which: int) -> None:
        if self.alive:
            self.scheduler.finish(self.alive.pop(which % len(self.alive)))


events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 38), st.integers(1, 20)),
        st.tuples(st.just("step"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("step"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 9), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(events, st.integers(0, 3), st.integers(1, 24), st.integers(0, 20), st.integers(1, 4))
def test_never_over_budget_nobody_starves_all_pages_return(
    script: list[tuple[str, int, int]], drafts: int, budget: int, pages: int, max_running: int
) -> None:
    world = World(drafts, budget, pages, max_running)
    for kind, first, second in script:
        if kind == "add":
            world.add(first, second)
        elif kind == "step":
            world.step(first)
        else:
            world.abort(first)
    for _ in range(4000):
        if not world.scheduler.has_unfinished():
            break
        oldest = min(world.alive, key=lambda r: r.arrival)
        before = (oldest.num_computed, oldest.num_tokens)
        world.step(0)
        assert oldest.finished or (oldest.num_computed, oldest.num_tokens) > before or oldest.num_tokens > before[1]
    assert not world.alive
    assert world.scheduler.allocator.free_pages == world.scheduler.allocator.num_usable_pages


@pytest.mark.parametrize("drafts", [0, 3, 7])
def test_pages_reach_as_far_as_the_drafts_after_the_step_write(drafts: int) -> None:
    scheduler = make_scheduler(drafts=drafts, page_tokens=4)
    request = make_request("r", 0, 15, max_tokens=40, max_model_len=96)
    scheduler.add(request)
    for _ in range(5):
        plan = scheduler.schedule()
        pretend_to_run(scheduler, plan, accept=drafts)
        # Draft iteration j writes position num_tokens - 2 + j - 1; the last one is j = drafts.
        last_written = request.num_tokens - 3 + drafts
        assert len(scheduler.allocator.pages(request.owner)) * 4 > last_written

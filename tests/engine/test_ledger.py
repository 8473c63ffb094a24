"""Late results go to requests, not to rows or slots (case B34)."""

from __future__ import annotations

import pytest

from page4.cache.pages import PageAllocator
from page4.engine.ledger import StepLedger


def enter(ledger: StepLedger, allocator: PageAllocator, owner: str) -> None:
    slot = allocator.allocate_state(owner)
    assert slot is not None
    ledger.enter(owner, slot)


def leave(ledger: StepLedger, allocator: PageAllocator, owner: str) -> None:
    ledger.leave(owner)
    allocator.free(owner)


def test_counts_survive_finish_move_and_arrival() -> None:
    ledger, allocator = StepLedger(), PageAllocator(16, 2)
    for owner in ("r1", "r2", "r3"):
        enter(ledger, allocator, owner)
    flight = ledger.launch(["r1", "r2", "r3"])
    leave(ledger, allocator, "r1")
    enter(ledger, allocator, "r4")
    second = ledger.launch(["r3", "r2", "r4"])  # r3 moved to row 0, r4 entered row 2 and took the slot of r1
    landed = ledger.land(flight, [0, 3, 1])
    assert landed.values == {"r2": 3, "r3": 1} and landed.stale == ("r1",)
    assert "r4" not in landed.values
    assert ledger.land(second, [5, 6, 7]).values == {"r3": 5, "r2": 6, "r4": 7}


def test_a_commit_that_comes_after_an_abort_does_not_touch_the_new_owner_of_the_slot() -> None:
    ledger, allocator = StepLedger(), PageAllocator(4, 2)  # one slot only
    states = {1: 0.0}
    enter(ledger, allocator, "r2")
    flight = ledger.launch(["r2"])
    leave(ledger, allocator, "r2")
    enter(ledger, allocator, "r5")
    states[1] = 42.0
    for owner, value in ledger.land(flight, [7.0]).values.items():
        states[allocator.state(owner).slot] = value  # type: ignore[union-attr] # None would fail the test
    assert states == {1: 42.0}


def test_a_request_that_was_preempted_and_resumed_gets_nothing_from_before() -> None:
    ledger, allocator = StepLedger(), PageAllocator(4, 2)
    enter(ledger, allocator, "r1")
    flight = ledger.launch(["r1"])
    leave(ledger, allocator, "r1")
    enter(ledger, allocator, "r1")  # same request, same slot, another incarnation
    assert ledger.land(flight, [3]).stale == ("r1",)
    assert ledger.land(ledger.launch(["r1"]), [3]).values == {"r1": 3}


def test_rows_and_values_must_agree() -> None:
    ledger, allocator = StepLedger(), PageAllocator(16, 2)
    enter(ledger, allocator, "r1")
    with pytest.raises(ValueError, match=r"shorter|longer"):
        ledger.land(ledger.launch(["r1"]), [1, 2])
    with pytest.raises(KeyError):
        ledger.launch(["gone"])

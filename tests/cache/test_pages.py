"""The laws of ownership, against a model that keeps sets (B34: a handle of a past owner is refused)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from page4.cache.pages import PageAllocator, StateSlot
from page4.errors import CacheError

OWNERS = st.sampled_from(["a", "b", "c", "d"])


class Ownership(RuleBasedStateMachine):
    """Random requests; after each, the allocator must agree with plain sets of pages."""

    @initialize(num_pages=st.integers(2, 40), per_state=st.integers(1, 9))
    def start(self, num_pages: int, per_state: int) -> None:
        self.told: list[int] = []
        self.twin_told: list[int] = []
        self.num_pages, self.per_state = num_pages, per_state
        self.allocator = PageAllocator(num_pages, per_state, self.told.extend)
        self.twin = PageAllocator(num_pages, per_state, self.twin_told.extend)
        self.pages: dict[str, list[int]] = {}
        self.slots: dict[str, StateSlot] = {}
        self.past: list[StateSlot] = []

    def taken(self) -> list[int]:
        tokens = [page for pages in self.pages.values() for page in pages]
        return tokens + [page for slot in self.slots.values() for page in self.run(slot.slot)]

    def run(self, slot: int) -> range:
        return range(slot * self.per_state, (slot + 1) * self.per_state)

    @rule(owner=OWNERS, count=st.integers(0, 12))
    def allocate_pages(self, owner: str, count: int) -> None:
        before, free = len(self.told), self.num_pages - 1 - len(self.taken())
        got = self.allocator.allocate_pages(owner, count)
        assert got == self.twin.allocate_pages(owner, count), "not deterministic"
        if count > free:
            assert got is None and len(self.told) == before, "all or nothing"
            return
        assert got is not None and len(got) == count
        assert self.told[before:] == got
        if got:
            self.pages.setdefault(owner, []).extend(got)

    @rule(owner=OWNERS)
    def allocate_state(self, owner: str) -> None:
        if owner in self.slots:
            with pytest.raises(CacheError, match="state of"):
                self.allocator.allocate_state(owner)
            return
        before, taken = len(self.told), set(self.taken())
        whole = [s for s in range(1, self.num_pages // self.per_state) if taken.isdisjoint(self.run(s))]
        slot = self.allocator.allocate_state(owner)
        assert slot == self.twin.allocate_state(owner), "not deterministic"
        if not whole:
            assert slot is None and len(self.told) == before
            return
        assert slot is not None and slot.slot == whole[0], "lowest id first"
        assert all(slot != old for old in self.past), "a generation came back"
        assert self.told[before:] == list(self.run(slot.slot))
        self.slots[owner] = slot

    @rule(owner=OWNERS)
    def free(self, owner: str) -> None:
        self.allocator.free(owner)
        self.twin.free(owner)
        self.pages.pop(owner, None)
        if owner in self.slots:
            self.past.append(self.slots.pop(owner))

    @rule(owner=OWNERS, keep=st.integers(-1, 13))
    def shrink(self, owner: str, keep: int) -> None:
        held = self.pages.get(owner, [])
        if not 0 <= keep <= len(held):
            with pytest.raises(CacheError, match=f"pages to keep of {owner}"):
                self.allocator.shrink(owner, keep)
            return
        self.allocator.shrink(owner, keep)
        self.twin.shrink(owner, keep)
        self.pages[owner] = held[:keep]
        if not keep:
            self.pages.pop(owner, None)

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def a_past_handle_is_refused(self, data: st.DataObject) -> None:
        with pytest.raises(CacheError, match=r"generation|holder"):
            self.allocator.check_slot(data.draw(st.sampled_from(self.past)))

    @invariant()
    def agrees_with_the_sets(self) -> None:
        taken = self.taken()
        assert 0 not in taken, "page 0 has an owner"
        assert len(set(taken)) == len(taken), "two owners of a page"
        assert all(0 < page < self.num_pages for page in taken)
        assert self.allocator.num_usable_pages == self.num_pages - 1
        assert self.allocator.free_pages == self.num_pages - 1 - len(taken)
        assert set(self.allocator.owners) == {*self.pages, *self.slots}
        for owner in ("a", "b", "c", "d"):
            assert self.allocator.pages(owner) == tuple(self.pages.get(owner, ()))
            assert self.allocator.state(owner) == self.slots.get(owner)
        for slot in self.slots.values():
            self.allocator.check_slot(slot)
        whole = [s for s in range(1, self.num_pages // self.per_state) if set(taken).isdisjoint(self.run(s))]
        assert self.allocator.free_state_slots == len(whole)

    def teardown(self) -> None:
        if not hasattr(self, "allocator"):
            return
        for owner in ("a", "b", "c", "d"):
            self.allocator.free(owner)
        assert self.allocator.free_pages == self.num_pages - 1, "a page was lost"
        assert self.allocator.owners == ()
        everything = self.allocator.allocate_pages("all", self.num_pages - 1)
        assert everything is not None and sorted(everything) == list(range(1, self.num_pages))


TestOwnership = Ownership.TestCase
TestOwnership.settings = settings(max_examples=120, stateful_step_count=40)


def test_pages_for_tokens_prefer_broken_runs() -> None:
    allocator = PageAllocator(17, 4)
    # Run 0 lost the null page and the last run has one page only: both can hold no state, so they go first.
    assert allocator.allocate_pages("a", 4) == [1, 2, 3, 16]
    assert allocator.free_state_slots == 3
    # A run that must be broken is the highest one, and states take the lowest, so they lie side by side.
    assert allocator.allocate_pages("b", 1) == [12]
    assert allocator.allocate_state("s") == StateSlot(1, 1)
    assert allocator.allocate_pages("b", 3) == [13, 14, 15]
    assert allocator.allocate_state("t") == StateSlot(2, 1)
    assert allocator.allocate_state("u") is None and allocator.free_pages == 0


def test_freed_pages_go_to_either_use() -> None:
    allocator = PageAllocator(8, 4)
    assert allocator.allocate_state("s") == StateSlot(1, 1)
    assert allocator.allocate_pages("a", 4) is None and allocator.pages("a") == ()
    allocator.free("s")
    assert allocator.allocate_pages("a", 7) == [1, 2, 3, 4, 5, 6, 7]
    assert allocator.allocate_state("s") is None
    allocator.shrink("a", 3)
    assert allocator.allocate_state("s") == StateSlot(1, 3)


def test_a_late_write_to_a_slot_that_changed_hands_is_refused() -> None:
    allocator = PageAllocator(8, 4)
    first = allocator.allocate_state("r2")
    assert first is not None
    allocator.check_slot(first)
    allocator.free("r2")
    with pytest.raises(CacheError, match="state slot 1: expected no holder now, got 1"):
        allocator.check_slot(first)
    second = allocator.allocate_state("r5")
    assert second is not None and second.slot == first.slot
    with pytest.raises(CacheError, match=f"expected generation {second.generation}, got 1"):
        allocator.check_slot(first)
    allocator.check_slot(second)


@pytest.mark.parametrize("generation", [0, 1, 2])
def test_a_handle_that_was_never_given_out_is_refused(generation: int) -> None:
    with pytest.raises(CacheError, match="no holder now"):
        PageAllocator(8, 4).check_slot(StateSlot(1, generation))


def test_freeing_twice_is_fine_and_frees_once() -> None:
    allocator = PageAllocator(12, 4)
    allocator.allocate_pages("a", 3)
    allocator.allocate_state("a")
    for _ in range(3):
        allocator.free("a")
    assert allocator.free_pages == 11
    allocator.free("nobody")


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(CacheError, match="num_pages: expected 2 or more, got 1"):
        PageAllocator(1, 1)
    with pytest.raises(CacheError, match="pages_per_state: expected 1 or more, got 0"):
        PageAllocator(8, 0)
    with pytest.raises(CacheError, match="pages to allocate: expected 0 or more, got -1"):
        PageAllocator(8, 2).allocate_pages("a", -1)


def test_new_owners_are_announced_before_the_pages_are_used() -> None:
    told: list[Sequence[int]] = []
    allocator = PageAllocator(12, 4, told.append)
    allocator.allocate_pages("a", 2)
    allocator.allocate_state("a")
    allocator.free("a")
    allocator.allocate_pages("b", 1)
    assert [list(pages) for pages in told] == [[1, 2], [4, 5, 6, 7], [1]]

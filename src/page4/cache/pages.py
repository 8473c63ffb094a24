"""Ownership of pages: who holds which page of the arena. No torch here.

Pages 1..P-1 belong to nobody, to one owner's tokens, or to one owner's state; page 0 (the null page) belongs to nobody
for ever. A state takes an aligned run of `pages_per_state` pages: slot s is pages s*n .. s*n+n-1, so that states can be
read as one strided view of the same bytes. Slot 0 would hold page 0 and is never given out. Pages for tokens come from
runs that are already broken, lowest id first, so that whole runs stay free for states as long as possible. When a run
must be broken it is the highest, while states take the lowest: states lie side by side, and a batch of them is a view.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from page4.errors import CacheError, message


@dataclass(frozen=True)
class StateSlot:
    """One owner's state: its slot, and how often the slot has been given out (a stale handle does not match)."""

    slot: int
    generation: int


class _Heap:
    """Distinct numbers, smallest first."""

    def __init__(self) -> None:
        self._heap: list[int] = []
        self._members: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._heap)

    def push(self, run: int) -> None:
        if run not in self._members:
            self._members.add(run)
            heapq.heappush(self._heap, run)

    def pop(self) -> int:
        run = heapq.heappop(self._heap)
        self._members.remove(run)
        return run


class PageAllocator:
    """Gives pages and state slots to owners; all or nothing, deterministic."""

    def __init__(
        self,
        num_pages: int,
        pages_per_state: int,
        on_new_owner: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """`on_new_owner` is called with the page ids each time that pages get an owner (poison mode fills them)."""
        if num_pages < 2:
            raise CacheError(message("num_pages", allowed="2 or more", got=num_pages, do="give the arena more memory"))
        if pages_per_state < 1:
            raise CacheError(message("pages_per_state", allowed="1 or more", got=pages_per_state, do="fix the layout"))
        self.num_pages = num_pages
        self.pages_per_state = pages_per_state
        self._on_new_owner = on_new_owner
        self._pages: dict[str, list[int]] = {}
        self._slots: dict[str, StateSlot] = {}
        self._generations: dict[int, int] = {}
        self._run_free: list[set[int]] = [set() for _ in range(-(-num_pages // pages_per_state))]
        for page in range(1, num_pages):
            self._run_free[page // pages_per_state].add(page)
        self._free = num_pages - 1
        # Entries may be stale: one counts only when it still tells the truth at the time it is popped.
        self._broken = _Heap()
        self._whole = _Heap()
        self._whole_from_above = _Heap()  # the same runs, negated
        for run in range(len(self._run_free)):
            self._offer(run)

    @property
    def num_usable_pages(self) -> int:
        """Pages that can have an owner at all."""
        return self.num_pages - 1

    @property
    def free_pages(self) -> int:
        """Pages without an owner, the null page not counted."""
        return self._free

    @property
    def free_state_slots(self) -> int:
        """States that could be given out now if no page for tokens were."""
        return sum(self._is_whole(run) for run in range(len(self._run_free)))

    @property
    def owners(self) -> tuple[str, ...]:
        """Owners that hold a page or a state."""
        return tuple(dict.fromkeys((*self._pages, *self._slots)))

    def allocate_pages(self, owner: str, count: int) -> list[int] | None:
        """`count` more pages for the owner's tokens in ascending runs, or None (and nothing taken) when short."""
        if count < 0:
            raise CacheError(message("pages to allocate", allowed="0 or more", got=count, do="use shrink to give back"))
        if count > self._free:
            return None
        taken: list[int] = []
        while len(taken) < count:
            run = self._pop_run()
            free = self._run_free[run]
            chosen = sorted(free)[: count - len(taken)]
            free.difference_update(chosen)
            taken.extend(chosen)
            self._offer(run)
        self._free -= count
        if taken:
            self._pages.setdefault(owner, []).extend(taken)
            self._tell(taken)
        return taken

    def allocate_state(self, owner: str) -> StateSlot | None:
        """The owner's state slot, or None when no aligned run is free. An owner has at most one."""
        if owner in self._slots:
            raise CacheError(
                message(f"state of {owner}", allowed="none yet", got=self._slots[owner], do="free it first")
            )
        run = self._pop_whole()
        if run is None:
            return None
        self._run_free[run].clear()
        self._free -= self.pages_per_state
        generation = self._generations.get(run, 0) + 1
        self._generations[run] = generation
        slot = StateSlot(run, generation)
        self._slots[owner] = slot
        self._tell(self._run_pages(run))
        return slot

    def free(self, owner: str) -> None:
        """Take back everything that the owner holds; an owner that holds nothing is fine (abort after finish)."""
        self._give_back(self._pages.pop(owner, []))
        slot = self._slots.pop(owner, None)
        if slot is not None:
            self._generations[slot.slot] = slot.generation + 1
            self._give_back(self._run_pages(slot.slot))

    def shrink(self, owner: str, keep_pages: int) -> None:
        """Keep the owner's first `keep_pages` pages of tokens and take back the rest."""
        held = self._pages.get(owner, [])
        if not 0 <= keep_pages <= len(held):
            allowed = f"0..{len(held)}"
            raise CacheError(message(f"pages to keep of {owner}", allowed=allowed, got=keep_pages, do="ask pages()"))
        self._give_back(held[keep_pages:])
        del held[keep_pages:]
        if not held:
            self._pages.pop(owner, None)

    def pages(self, owner: str) -> tuple[int, ...]:
        """The owner's pages of tokens in logical order."""
        return tuple(self._pages.get(owner, ()))

    def state(self, owner: str) -> StateSlot | None:
        """The owner's state slot, if it has one."""
        return self._slots.get(owner)

    def check_slot(self, slot: StateSlot) -> None:
        """Raise CacheError when the slot has been freed or given to another owner since the handle was made."""
        current = self._generations.get(slot.slot, 0)
        # Odd while it is held, even while it is free: each hand-over counts, and a free slot matches no handle.
        if current != slot.generation or current % 2 == 0:
            allowed = f"generation {current}" if current % 2 else "no holder now"
            do = "drop the late write: the request that made it is gone"
            raise CacheError(message(f"state slot {slot.slot}", allowed=allowed, got=slot.generation, do=do))

    def _run_pages(self, run: int) -> list[int]:
        return list(range(run * self.pages_per_state, (run + 1) * self.pages_per_state))

    def _is_whole(self, run: int) -> bool:
        return run > 0 and len(self._run_free[run]) == self.pages_per_state

    def _offer(self, run: int) -> None:
        if self._is_whole(run):
            self._whole.push(run)
            self._whole_from_above.push(-run)
        elif self._run_free[run]:
            self._broken.push(run)

    def _pop_whole(self) -> int | None:
        while self._whole:
            run = self._whole.pop()
            if self._is_whole(run):
                return run
        return None

    def _pop_run(self) -> int:
        while self._broken:
            run = self._broken.pop()
            if self._run_free[run] and not self._is_whole(run):
                return run
        while self._whole_from_above:
            run = -self._whole_from_above.pop()
            if self._is_whole(run):
                return run
        raise AssertionError("free pages are in no run")

    def _give_back(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._run_free[page // self.pages_per_state].add(page)
        self._free += len(pages)
        for run in sorted({page // self.pages_per_state for page in pages}):
            self._offer(run)

    def _tell(self, pages: Sequence[int]) -> None:
        if self._on_new_owner is not None:
            self._on_new_owner(pages)

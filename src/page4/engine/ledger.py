"""Who a row belongs to when its result comes late.

A step is launched for rows; its counts are read when the device has them. Until then requests finish, are aborted or
preempted, rows move, and slots get new owners. So a flight remembers request and slot generation of each row, and what
lands is handed out by request, and only to requests that still live in the same slot (case B34).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from page4.cache.pages import StateSlot

T = TypeVar("T")


@dataclass(frozen=True)
class Flight:
    """The rows of one launched step, in row order."""

    rows: tuple[tuple[str, StateSlot], ...]


@dataclass(frozen=True)
class Landed(Generic[T]):
    """Results by request, and the requests whose results came too late."""

    values: dict[str, T]
    stale: tuple[str, ...]


class StepLedger:
    """Which requests live, and in which incarnation of which slot."""

    def __init__(self) -> None:
        self._live: dict[str, StateSlot] = {}

    def enter(self, owner: str, slot: StateSlot) -> None:
        """The request lives in this slot from now on."""
        self._live[owner] = slot

    def leave(self, owner: str) -> None:
        """The request is finished, aborted or preempted; leaving twice is fine."""
        self._live.pop(owner, None)

    def __contains__(self, owner: object) -> bool:
        return owner in self._live

    def __len__(self) -> int:
        return len(self._live)

    def launch(self, owners: Sequence[str]) -> Flight:
        """Remember who sits on which row of a step."""
        return Flight(tuple((owner, self._live[owner]) for owner in owners))

    def is_current(self, owner: str, slot: StateSlot) -> bool:
        """Whether the request still lives in this incarnation of the slot."""
        return self._live.get(owner) == slot

    def land(self, flight: Flight, values: Sequence[T]) -> Landed[T]:
        """Hand out one value a row by request; a request that left or came back in a new slot gets none."""
        pairs = list(zip(flight.rows, values, strict=True))
        current = {owner: value for (owner, slot), value in pairs if self.is_current(owner, slot)}
        return Landed(current, tuple(owner for owner, slot in flight.rows if owner not in current))

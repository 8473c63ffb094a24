"""Random numbers that depend on the request's seed, the token position and the purpose, and on nothing else.

A request's numbers are therefore the same whatever runs beside it, however its prompt was cut into chunks and whether
it was preempted. Mixing function: splitmix64 (Steele, Lea and Flood, 2014).
"""

from __future__ import annotations

from enum import IntEnum

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Purpose(IntEnum):
    """What a number at a position is for; two purposes never share one."""

    TOKEN = 1
    DRAFT = 2
    ACCEPT = 3


def splitmix64(state: int) -> int:
    """One output of splitmix64 for a 64-bit state."""
    z = (state + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """A number in [0, 1) with 53 random bits."""
    mixed = splitmix64(splitmix64(splitmix64(seed & _MASK) ^ position) ^ purpose)
    return float(mixed >> 11) * 2.0**-53


class SeedSource:
    """Seeds for requests that bring none, drawn in the order in which they arrive."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._drawn = 0

    def draw(self) -> int:
        """The next seed, 64 bits."""
        self._drawn += 1
        return splitmix64(splitmix64(self._seed & _MASK) ^ self._drawn)


def child_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of a request: the request's own for the first."""
    return seed if index == 0 else splitmix64(splitmix64(seed & _MASK) ^ (index << 32))

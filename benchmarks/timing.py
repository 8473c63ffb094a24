"""Timing of two sides in turn, so that a slow minute of the machine hits both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def seconds_of(action: Callable[[], Any]) -> tuple[float, Any]:
    """Wall-clock seconds of one call, and what it returned."""
    start = time.perf_counter()
    value = action()
    return time.perf_counter() - start, value


def in_turn(actions: Mapping[str, Callable[[], Any]], *, repeats: int) -> dict[str, tuple[list[float], Any]]:
    """Run each action once to warm up and then `repeats` times, one after another in each round.

    Returns the seconds of every timed call and the last value, by name.
    """
    values = {name: action() for name, action in actions.items()}
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats):
        for name, action in actions.items():
            spent, values[name] = seconds_of(action)
            times[name].append(spent)
    return {name: (times[name], values[name]) for name in actions}


def summary(times: list[float]) -> dict[str, float]:
    """Median, best and worst of some seconds."""
    return {
        "median_s": round(statistics.median(times), 4),
        "min_s": round(min(times), 4),
        "max_s": round(max(times), 4),
    }

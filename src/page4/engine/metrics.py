"""What an engine has counted since it was made."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from page4.cache.storage import Arena
from page4.engine.watchdog import WatchdogEvent


@dataclass(frozen=True)
class KVCounts:
    """One side ("k" or "v") of one E4M3 layer: its scale, values that the writer clipped, inputs that were no number.

    The draft layer counts a position again whenever it is drafted again.
    """

    layer: int
    side: str
    scale: float
    clipped: int
    nonfinite: int

    @classmethod
    def of(cls, arena: Arena) -> tuple[KVCounts, ...]:
        """All sides of an arena, by layer, K first."""
        found = []
        for layer in sorted(arena.layout.kv):
            layer_kv = arena.layer_kv(layer)
            if layer_kv.counters is None or layer_kv.k_scale is None or layer_kv.v_scale is None:
                continue
            counts = layer_kv.counters.tolist()
            for side, scale, (clipped, nonfinite) in zip(
                "kv", (layer_kv.k_scale, layer_kv.v_scale), counts, strict=True
            ):
                found.append(cls(layer, side, scale.value, clipped, nonfinite))
        return tuple(found)


@dataclass
class EngineMetrics:
    """Counters that only grow.

    prefill_tokens: rows of prompts computed, again after a preemption; decode_tokens: tokens emitted by windows, so
    without the first one of each request; a step with both kinds of rows gives each its share of the seconds by rows.
    drafted counts drafts that a window verified, accepted those that the target took; accepted_per_position and
    drafted_per_position have an entry a draft position. routes: attention calls by route. kv: see `KVCounts`.
    watchdog_events: requests that went on without drafts, see `watchdog`.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    target_steps: int = 0
    windows: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)
    preemptions: int = 0
    failed_steps: int = 0
    routes: Counter[str] = field(default_factory=Counter)
    kv: tuple[KVCounts, ...] = ()
    watchdog_events: list[WatchdogEvent] = field(default_factory=list)

    def count_window(self, drafted: int, accepted: int) -> None:
        """One verified window; a window without drafts says nothing about acceptance."""
        self.windows += 1
        self.drafted += drafted
        self.accepted += accepted
        for position in range(drafted):
            self.drafted_per_position[position] += 1
            self.accepted_per_position[position] += position < accepted

    def count_seconds(self, seconds: float, *, prefill_rows: int, decode_rows: int) -> None:
        """Share a step's seconds by rows."""
        rows = max(1, prefill_rows + decode_rows)
        self.prefill_seconds += seconds * prefill_rows / rows
        self.decode_seconds += seconds * decode_rows / rows

"""Results and figures of a run, as JSON objects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from page4.cli.memory import peak_memory_bytes

if TYPE_CHECKING:
    from page4.engine import LLM, RequestOutput
    from page4.engine.metrics import KVCounts


@dataclass(frozen=True)
class Counts:
    """Counters of an engine at one moment; the difference of two describes what ran between them."""

    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float
    target_steps: int
    windows: int
    drafted: int
    accepted: int
    drafted_per_position: tuple[int, ...]
    accepted_per_position: tuple[int, ...]

    @classmethod
    def of(cls, llm: LLM) -> Counts:
        """The counters of `llm` now."""
        metrics = llm.metrics
        return cls(
            metrics.prefill_tokens,
            metrics.prefill_seconds,
            metrics.decode_tokens,
            metrics.decode_seconds,
            metrics.target_steps,
            metrics.windows,
            metrics.drafted,
            metrics.accepted,
            tuple(metrics.drafted_per_position),
            tuple(metrics.accepted_per_position),
        )

    def __sub__(self, earlier: Counts) -> Counts:
        return Counts(
            self.prefill_tokens - earlier.prefill_tokens,
            self.prefill_seconds - earlier.prefill_seconds,
            self.decode_tokens - earlier.decode_tokens,
            self.decode_seconds - earlier.decode_seconds,
            self.target_steps - earlier.target_steps,
            self.windows - earlier.windows,
            self.drafted - earlier.drafted,
            self.accepted - earlier.accepted,
            differences(self.drafted_per_position, earlier.drafted_per_position),
            differences(self.accepted_per_position, earlier.accepted_per_position),
        )

    @property
    def decode_tokens_per_s(self) -> float:
        """New tokens a second, prefill apart."""
        return rate(self.decode_tokens, self.decode_seconds)

    @property
    def tokens_per_step(self) -> float:
        """New tokens of one request in one step of the target (a window), its first token apart."""
        return round(self.decode_tokens / self.windows, 3) if self.windows > 0 else 0.0

    @property
    def acceptance(self) -> list[float]:
        """Share of the drafts at each position that the target accepted, the first position first."""
        pairs = zip(self.accepted_per_position, self.drafted_per_position, strict=True)
        return [round(accepted / drafted, 3) if drafted else 0.0 for accepted, drafted in pairs]


def differences(now: tuple[int, ...], then: tuple[int, ...]) -> tuple[int, ...]:
    """Entry by entry."""
    return tuple(a - b for a, b in zip(now, then, strict=True))


def outputs_object(results: Iterable[RequestOutput]) -> list[dict[str, Any]]:
    """One entry for each completion, in the order of the prompts; `logprobs` only where they were asked for."""
    entries = []
    for result in results:
        for completion in result.outputs:
            entry: dict[str, Any] = {
                "prompt_token_ids": list(result.prompt_token_ids),
                "token_ids": list(completion.token_ids),
                "text": completion.text,
                "finish_reason": completion.finish_reason,
            }
            if completion.logprobs is not None:
                entry["logprobs"] = [[vars(token) for token in place] for place in completion.logprobs]
            entries.append(entry)
    return entries


def metrics_object(counts: Counts) -> dict[str, Any]:
    """The `metrics` of `--json`; `accepted_per_position` holds counts, the first draft position first."""
    return {
        "prefill_tokens_per_s": rate(counts.prefill_tokens, counts.prefill_seconds),
        "decode_tokens_per_s": counts.decode_tokens_per_s,
        "target_steps": counts.target_steps,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "accepted_per_position": list(counts.accepted_per_position),
        "peak_memory_bytes": peak_memory_bytes(),
    }


def kv_object(counts: Iterable[KVCounts]) -> list[dict[str, Any]]:
    """The `kv_cache` of `--json`: scale, clips and inputs that are no numbers of each E4M3 layer and side."""
    return [vars(entry).copy() for entry in counts]


def clips_line(counts: Iterable[KVCounts]) -> str | None:
    """What an E4M3 cache clipped, for people; None for a 16-bit cache."""
    entries = list(counts)
    if not entries:
        return None
    clipped = [f"{entry.clipped} in {entry.side} of layer {entry.layer}" for entry in entries if entry.clipped]
    return f"E4M3 K/V of {len(entries) // 2} layers, clipped values: {', '.join(clipped) or 'none'}"


def summary_line(counts: Counts) -> str:
    """The figures of a run for people."""
    metrics = metrics_object(counts)
    parts = [
        f"prefill {metrics['prefill_tokens_per_s']:.0f} tokens/s",
        f"decode {metrics['decode_tokens_per_s']:.0f} tokens/s",
        f"{counts.target_steps} target steps",
    ]
    if counts.drafted:
        shares = " ".join(f"{share:.2f}" for share in counts.acceptance)
        parts.append(f"{counts.tokens_per_step:.2f} tokens a step, acceptance per position {shares}")
    parts.append(f"peak memory {metrics['peak_memory_bytes'] / 2**20:.0f} MiB")
    return ", ".join(parts)


def rate(count: float, seconds: float) -> float:
    """`count` a second; 0 when nothing was timed."""
    return round(count / seconds, 2) if seconds > 0 else 0.0

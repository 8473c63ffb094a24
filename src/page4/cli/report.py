"""Results and figures of a run, as JSON objects and as lines for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from page4.cli.memory import peak_memory_bytes

if TYPE_CHECKING:
    from page4.engine import LLM, RequestOutput


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
                entry["logprobs"] = completion.logprobs
            entries.append(entry)
    return entries


def metrics_object(llm: LLM) -> dict[str, Any]:
    """The figures of everything that `llm` has run; `accepted_per_position` counts, first draft position first."""
    metrics = llm.metrics
    return {
        "prefill_tokens_per_s": rate(metrics.prefill_tokens, metrics.prefill_seconds),
        "decode_tokens_per_s": rate(metrics.decode_tokens, metrics.decode_seconds),
        "target_steps": metrics.target_steps,
        "drafted": metrics.drafted,
        "accepted": metrics.accepted,
        "accepted_per_position": list(metrics.accepted_per_position),
        "peak_memory_bytes": peak_memory_bytes(),
    }


def rate(count: float, seconds: float) -> float:
    """`count` a second; 0 when nothing was timed."""
    return round(count / seconds, 2) if seconds > 0 else 0.0


def acceptance(accepted_per_position: Sequence[int], windows: int) -> str:
    """Share of windows in which each draft position was accepted: `0.91 0.80 0.71`."""
    if not accepted_per_position or not windows:
        return "no drafts"
    return " ".join(f"{accepted / windows:.2f}" for accepted in accepted_per_position)

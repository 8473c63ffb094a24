"""Our side: an `LLM` as a user would make it, and what one call of it returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import page4


class Lane:
    """One engine with k drafts; loading is not timed."""

    def __init__(self, folder: Path, dtype: str, k: int, **options: Any) -> None:
        speculative = {"method": "mtp", "num_speculative_tokens": k} if k else None
        self.llm = page4.LLM(folder, dtype=dtype, speculative_config=speculative, **options)

    def generate_all(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Greedy continuations of prompts that run together."""
        params = page4.SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        return [list(result.outputs[0].token_ids) for result in self.llm.generate(list(prompts), params)]

    def generate(self, ids: list[int], new_tokens: int) -> list[int]:
        """Greedy continuation of one prompt."""
        return self.generate_all([ids], new_tokens)[0]

    def counters(self) -> dict[str, Any]:
        """What the engine has counted so far."""
        metrics = self.llm.metrics
        return {
            "target_steps": metrics.target_steps,
            "drafted": metrics.drafted,
            "accepted": metrics.accepted,
            "accepted_per_position": list(metrics.accepted_per_position),
        }

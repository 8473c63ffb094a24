"""An engine with known answers in place of `page4.LLM`, for the tests of what the command line does with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from page4.engine.metrics import KVCounts


@dataclass
class Metrics:
    """Numbers that divide without a remainder."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    target_steps: int = 0
    windows: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_per_position: list[int] = field(default_factory=lambda: [0, 0, 0])
    accepted_per_position: list[int] = field(default_factory=lambda: [0, 0, 0])


@dataclass
class Completion:
    index: int
    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: Any = None
    error: str | None = "the reason"


@dataclass
class Result:
    request_id: str
    prompt_token_ids: list[int]
    outputs: list[Completion]


class Lane:
    """What the engine says about its lane."""

    def as_object(self) -> dict[str, Any]:
        return {"kv_dtype": "fp8_e4m3", "warnings": []}


class FakeLLM:
    """Writes 8 tokens for every prompt: in 4 windows of 3 drafts, of which 3, 1 and 0 are accepted at each position."""

    made: ClassVar[list[FakeLLM]] = []
    notes_to_tell: ClassVar[tuple[str, ...]] = ()
    finish_reason = "length"

    def __init__(self, model: Path, **options: Any) -> None:
        self.model, self.options = model, options
        self.metrics = Metrics()
        self.notes = self.notes_to_tell
        self.lane = Lane()
        self.calls: list[tuple[list[Any], Any]] = []
        FakeLLM.made.append(self)

    def kv_counts(self) -> tuple[KVCounts, ...]:
        """One layer, which clipped two values of V."""
        return (KVCounts(3, "k", 0.25, 0, 0), KVCounts(3, "v", 0.5, 2, 0))

    def generate(self, prompts: list[Any], params: Any, *, on_chunk: Any = None) -> list[Result]:
        self.calls.append((prompts, params))
        drafts = self.options.get("speculative_config") is not None
        results = []
        for number, prompt in enumerate(prompts):
            ids = list(prompt) if isinstance(prompt, list) else list(prompt.encode())
            tokens = [number, *range(1, 8)]
            outputs = [Completion(index, tokens, f"text {number}\n", self.finish_reason) for index in range(params.n)]
            results.append(Result(str(number), ids, outputs))
            self.metrics.prefill_tokens += 100
            self.metrics.prefill_seconds += 0.5
            self.metrics.decode_tokens += 8
            self.metrics.decode_seconds += 0.25
            self.metrics.target_steps += 5
            self.metrics.windows += 4 if drafts else 8
            if drafts:
                self.metrics.drafted += 12
                self.metrics.drafted_per_position = [count + 4 for count in self.metrics.drafted_per_position]
                self.metrics.accepted += 4
                self.metrics.accepted_per_position[0] += 3
                self.metrics.accepted_per_position[1] += 1
        return results

"""What the engine gives back."""

from __future__ import annotations

from dataclasses import dataclass, field

from page4.engine.request import FinishReason
from page4.engine.sampling import Logprobs


@dataclass(frozen=True)
class Usage:
    """Tokens in and out; the out count is that of the emitted token ids, whatever the window computed."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Both together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class StreamChunk:
    """What one step added to one completion; `finish_reason` is set on its last chunk, and only there.

    `token_ids`, `text` and `logprobs` are what is new. `error` says why when `finish_reason` is "error".
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    usage: Usage
    logprobs: tuple[Logprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass
class CompletionOutput:
    """One finished completion: every token emitted, with the text and log probabilities of exactly those tokens.

    `stop_reason` is the stop string or stop token id that ended it, None for an end-of-text token. `logprobs` has an
    entry a token: the token itself first, then the most likely ones.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[Logprobs] | None = None
    cumulative_logprob: float | None = None
    error: str | None = None

    def add(self, chunk: StreamChunk) -> None:
        """Take in the next chunk of this completion."""
        self.token_ids.extend(chunk.token_ids)
        self.text += chunk.text
        if chunk.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *chunk.logprobs]
            self.cumulative_logprob = sum(entry[0].logprob for entry in self.logprobs)
        if chunk.finish_reason is not None:
            self.finish_reason, self.stop_reason, self.error = chunk.finish_reason, chunk.stop_reason, chunk.error


@dataclass(frozen=True)
class RequestMetrics:
    """Seconds of one request, from its arrival: to the first token, to the last; and how often it was preempted."""

    first_token_s: float | None
    total_s: float
    preemptions: int


@dataclass
class RequestOutput:
    """A finished request. `prompt_logprobs` has an entry a prompt token, None for the first (nothing precedes it)."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: Usage
    metrics: RequestMetrics
    prompt_logprobs: list[Logprobs | None] | None = None

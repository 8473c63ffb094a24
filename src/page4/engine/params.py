"""Sampling parameters of one request, checked when they are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from page4.errors import UsageError, message

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """How to pick tokens and when to stop; names and meanings as in vLLM.

    temperature 0 is greedy. top_k 0 (or -1), top_p 1 and min_p 0 filter nothing. max_tokens None means up to the model
    length. logprobs: n gives the emitted token and the n most likely ones, from the target's raw logits. seed makes a
    sampled request repeatable whatever runs beside it. Raises `UsageError` for a value outside its range.
    """

    max_tokens: int | None = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] | str = field(default_factory=tuple)
    stop_token_ids: Sequence[int] = field(default_factory=tuple)
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", check_texts("stop", stop))
        object.__setattr__(self, "stop_token_ids", check_ids("stop_token_ids", self.stop_token_ids))
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, None)
        check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        check_real("temperature", self.temperature, "0 or more", lambda x: x >= 0)
        check_real("top_p", self.top_p, "above 0 and at most 1", lambda x: 0 < x <= 1)
        check_real("min_p", self.min_p, "0 to 1", lambda x: 0 <= x <= 1)
        check_int("top_k", self.top_k, -1, None)
        check_int("n", self.n, 1, None)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise bad(name, "true or false", getattr(self, name))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken instead of a sample."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether a sample comes from less than the whole vocabulary."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def bad(name: str, allowed: str, got: object) -> UsageError:
    """The refusal of one parameter."""
    return UsageError(message(name, allowed=allowed, got=repr(got), do=f"set {name} within this range"))


def check_int(name: str, value: object, least: int, most: int | None) -> None:
    """Raise UsageError unless `value` is an integer from `least` to `most`."""
    allowed = f"an integer of {least} or more" if most is None else f"an integer from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        raise bad(name, allowed, value)


def check_real(name: str, value: object, allowed: str, accept: Callable[[float], bool]) -> None:
    """Raise UsageError unless `value` is a finite number that `accept` takes."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise bad(name, f"a number, {allowed}", value)
    if not math.isfinite(value) or not accept(value):
        raise bad(name, allowed, value)


def check_texts(name: str, values: object) -> tuple[str, ...]:
    """`values` as a tuple; raise UsageError unless it is a sequence of strings that are not empty."""
    if not isinstance(values, (list, tuple)) or not all(isinstance(text, str) and text for text in values):
        raise bad(name, "a string or a list of strings, none empty", values)
    return tuple(values)


def check_ids(name: str, values: object) -> tuple[int, ...]:
    """`values` as a tuple; raise UsageError unless it is a sequence of token ids."""
    allowed = "a list of token ids (integers of 0 or more)"
    if not isinstance(values, (list, tuple)):
        raise bad(name, allowed, values)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise bad(name, allowed, value)
    return tuple(values)

"""Emitting tokens one by one: stop, length, text and log probabilities are functions of the emitted tokens only.

A window verifies several tokens at once, but each is emitted as if it had come alone; what follows the token that ends
the request is dropped and never counted (case B38).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from page4.engine.detokenize import Detokenizer
from page4.engine.request import FinishReason, Request
from page4.engine.sampling import Logprobs


@dataclass(frozen=True)
class Delta:
    """What a step emitted."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[Logprobs, ...] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class Emission:
    """The emitted side of one request: appends to `request.token_ids`, keeps the text, finds the end."""

    def __init__(self, request: Request, detokenizer: Detokenizer | None) -> None:
        self._request = request
        self._detokenizer = detokenizer
        self._stops = tuple(request.params.stop)
        self._text = ""
        self._released = 0
        self._finish: FinishReason | None = None
        self._stop_reason: int | str | None = None

    def push(self, tokens: Sequence[int], logprobs: Sequence[Logprobs] | None = None) -> Delta:
        """Emit verified tokens in order until one of them ends the request."""
        count = 0
        for token in tokens:
            if self._finish is not None:
                break
            self._request.token_ids.append(token)
            count += 1
            self._emit(token)
        kept = None if logprobs is None else tuple(logprobs[:count])
        return Delta(tuple(tokens[:count]), self._release(), kept, self._finish, self._stop_reason)

    def end(self, reason: FinishReason) -> Delta:
        """End without a token: abort, error, or no room for one. Text held back for a stop string comes out."""
        self._finish = reason
        return Delta((), self._release(), None, reason, None)

    def _emit(self, token: int) -> None:
        request, params = self._request, self._request.params
        may_stop = request.num_emitted >= params.min_tokens
        if may_stop and token in request.stop_ids:
            self._finish = "stop"
            # An end-of-text token is no reason of the caller's; it has no text either way.
            self._stop_reason = token if token in params.stop_token_ids else None
            if not params.include_stop_str_in_output:
                return
        if self._detokenizer is not None:
            piece = self._detokenizer.push(token)
            self._text += piece
            if may_stop and self._finish is None and piece and self._stops:
                self._cut_at_stop(len(piece))
        if self._finish is None and request.num_tokens >= request.length_limit:
            self._finish = "length"

    def _cut_at_stop(self, new_chars: int) -> None:
        """End at the first stop string that the newest characters complete."""
        found: tuple[int, int] | None = None
        for order, stop in enumerate(self._stops):
            at = self._text.find(stop, max(0, len(self._text) - new_chars - len(stop) + 1))
            if at >= 0 and (found is None or (at, order) < found):
                found = (at, order)
        if found is not None:
            at, order = found
            stop = self._stops[order]
            self._text = self._text[: at + len(stop) if self._request.params.include_stop_str_in_output else at]
            self._finish, self._stop_reason = "stop", stop

    def _release(self) -> str:
        """Text not yet given out, less an end that may become a stop string."""
        end = len(self._text) - (self._held_chars() if self._finish is None else 0)
        piece = self._text[self._released : end]
        self._released += len(piece)
        return piece

    def _held_chars(self) -> int:
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for count in range(min(longest, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-count:]) for stop in self._stops):
                return count
        return 0

"""What fits: the size of the arena, and whether a request can ever be served. Refusals come before memory is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from page4.cache.units import Tokens, pages_of
from page4.errors import CacheError, RequestError, UsageError, message

MAX_DRAFTS = 7
DEFAULT_ARENA_BYTES = 1 << 30
# On a CPU longer chunks prefill no faster and need several times the workspace (docs/decisions.md has the figures).
DEFAULT_BATCHED_TOKENS = 512


@dataclass(frozen=True)
class Sizes:
    """What admission has to know about a cache layout: bytes and tokens of a page, pages of a state."""

    page_bytes: int
    page_tokens: int
    pages_per_state: int

    def pages_for_tokens(self, tokens: int) -> int:
        """Pages that hold the K/V of `tokens` tokens."""
        return int(pages_of(Tokens(tokens), self.page_tokens))

    def pages_for_requests(self, requests: int, tokens: int) -> int:
        """Pages of an arena in which `requests` requests of `tokens` tokens fit at once, the null page included."""
        with_tokens = 1 + requests * (self.pages_per_state + self.pages_for_tokens(tokens))
        return max(with_tokens, (requests + 1) * self.pages_per_state)

    def tokens_that_fit(self, num_pages: int) -> int:
        """Longest request that an arena of `num_pages` pages can hold alone."""
        if num_pages < 2 * self.pages_per_state:
            return 0
        return max(0, num_pages - 1 - self.pages_per_state) * self.page_tokens


@dataclass(frozen=True)
class ArenaPlan:
    """Pages of the arena, the model length that it serves, and why it is not what was asked (or None)."""

    num_pages: int
    max_model_len: int
    note: str | None


def plan_arena(
    sizes: Sizes,
    *,
    max_positions: int,
    max_num_seqs: int,
    max_model_len: int | None,
    memory_bytes: int | None,
) -> ArenaPlan:
    """Size the arena: as told, or for `max_num_seqs` requests of full length under a cap of 1 GiB.

    Raises `CacheError` when it cannot hold one request of the model length. Only a length that nobody asked for
    (both limits left out) is lowered to what the cap holds; the note says so.
    """
    length = max_positions if max_model_len is None else max_model_len
    if not 1 <= length <= max_positions:
        do = "the config's max_position_embeddings is the limit"
        raise UsageError(message("max_model_len", allowed=f"1 to {max_positions}", got=length, do=do))
    least = sizes.pages_for_requests(1, length)
    wanted = sizes.pages_for_requests(max_num_seqs, length)
    if memory_bytes is None:
        cap = DEFAULT_ARENA_BYTES // sizes.page_bytes
        num_pages = max(min(wanted, cap), least if max_model_len is not None else 0)
    else:
        num_pages = memory_bytes // sizes.page_bytes
    if num_pages >= least:
        return ArenaPlan(num_pages, length, None)
    fits = sizes.tokens_that_fit(num_pages)
    if memory_bytes is not None or max_model_len is not None or fits < 1:
        raise CacheError(
            message(
                "kv_cache_memory_bytes",
                allowed=f"at least {least * sizes.page_bytes} bytes for one request of {length} tokens",
                got=f"{num_pages * sizes.page_bytes} bytes ({num_pages} pages of {sizes.page_bytes})",
                do=f"raise it or set max_model_len to {fits} or less" if fits else "raise it",
            )
        )
    note = f"max_model_len lowered from {length} to {fits}: the default arena of 1 GiB holds no longer request"
    return ArenaPlan(num_pages, fits, note)


def check_drafts(drafts: int, *, has_draft: bool) -> None:
    """Raise `RequestError` for more drafts than a window holds, or for any when the checkpoint has no MTP head."""
    if not 0 <= drafts <= MAX_DRAFTS:
        do = f"a window holds at most {MAX_DRAFTS} drafts"
        raise RequestError(message("num_speculative_tokens", allowed=f"0 to {MAX_DRAFTS}", got=drafts, do=do))
    if drafts and not has_draft:
        do = "leave out speculative_config or use a checkpoint with mtp.* tensors"
        raise RequestError(
            message("num_speculative_tokens", allowed="0: the checkpoint has no MTP head", got=drafts, do=do)
        )


def concurrent_windows(max_num_seqs: int, budget: int, drafts: int) -> int:
    """Requests that may run at once so that each one's whole window fits the step's token budget.

    Windows are never cut for want of budget: what a request draws must not depend on its batch mates.
    """
    window = drafts + 1
    if budget < window:
        do = f"raise it or draft at most {max(0, budget - 1)}"
        allowed = f"at least {window} (a window of {drafts} drafts and one token)"
        raise UsageError(message("max_num_batched_tokens", allowed=allowed, got=budget, do=do))
    return min(max_num_seqs, budget // window)


def check_prompt(token_ids: Sequence[int], *, vocab_size: int, max_model_len: int) -> None:
    """Raise `RequestError` for an empty or too long prompt and for an id outside the vocabulary."""
    if not token_ids:
        raise RequestError(message("prompt", allowed="at least one token", got="none", do="send a prompt"))
    if len(token_ids) > max_model_len:
        do = "shorten the prompt or raise max_model_len"
        raise RequestError(
            message("prompt", allowed=f"at most {max_model_len} tokens", got=f"{len(token_ids)} tokens", do=do)
        )
    check_token_ids("prompt token id", token_ids, vocab_size)


def check_token_ids(what: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise `RequestError` naming the first entry that is no token id of the vocabulary."""
    for place, token in enumerate(token_ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            do = "use ids of this checkpoint's vocabulary"
            raise RequestError(message(f"{what} {place}", allowed=f"0 to {vocab_size - 1}", got=repr(token), do=do))


def check_fits(sizes: Sizes, *, num_pages: int, tokens: int) -> None:
    """Raise `RequestError` when a request of `tokens` tokens could not run even alone."""
    needed = sizes.pages_for_requests(1, tokens)
    if needed > num_pages:
        do = "raise kv_cache_memory_bytes or ask for fewer tokens"
        got = f"{needed} pages for {tokens} tokens"
        raise RequestError(message("request", allowed=f"at most {num_pages} pages", got=got, do=do))

"""Units of length in the cache, and the only conversions between them.

A number of tokens, of blocks (4 tokens) and of pages (S tokens) are three types, so that a type checker refuses a block
count where a page count is meant. A conversion that would drop tokens rounds up or is refused; it never truncates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from page4.errors import CacheError, message

Tokens = NewType("Tokens", int)
Blocks = NewType("Blocks", int)
Pages = NewType("Pages", int)

BLOCK_TOKENS = 4


def check_not_negative(what: str, value: int) -> None:
    """Raise CacheError when a length or position is below zero."""
    if value < 0:
        raise CacheError(message(what, allowed="0 or more", got=value, do="pass a length, not a placeholder"))


def complete_blocks(tokens: Tokens) -> Blocks:
    """Blocks that `tokens` tokens fill completely: the rest is the tail."""
    check_not_negative("tokens", tokens)
    return Blocks(tokens // BLOCK_TOKENS)


def covering_blocks(tokens: Tokens) -> Blocks:
    """Blocks that hold `tokens` tokens, the last one perhaps not full."""
    check_not_negative("tokens", tokens)
    return Blocks(-(-tokens // BLOCK_TOKENS))


def tail_tokens(tokens: Tokens) -> Tokens:
    """Newest tokens that belong to no complete block."""
    check_not_negative("tokens", tokens)
    return Tokens(tokens % BLOCK_TOKENS)


def tokens_of_blocks(blocks: Blocks) -> Tokens:
    """Tokens that `blocks` complete blocks hold."""
    check_not_negative("blocks", blocks)
    return Tokens(blocks * BLOCK_TOKENS)


@dataclass(frozen=True)
class TokenUnit:
    """A unit of `tokens` consecutive tokens of one request: a page, a scheduler block, a state block."""

    name: str
    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            allowed = "1 or more tokens"
            raise CacheError(message(self.name, allowed=allowed, got=self.tokens, do="set a positive size"))

    def covering(self, tokens: Tokens) -> int:
        """Units that hold `tokens` tokens, the last one perhaps not full."""
        check_not_negative("tokens", tokens)
        return -(-tokens // self.tokens)

    def complete(self, tokens: Tokens) -> int:
        """Units that `tokens` tokens fill."""
        check_not_negative("tokens", tokens)
        return tokens // self.tokens

    def column(self, position: int) -> int:
        """Unit that holds the token at `position`."""
        check_not_negative("position", position)
        return position // self.tokens

    def last_column(self, tokens: Tokens) -> int:
        """Unit that holds the newest of `tokens` tokens, so not the one that the next token would open."""
        if tokens < 1:
            raise CacheError(message("tokens", allowed="1 or more", got=tokens, do="ask only after the first token"))
        return (tokens - 1) // self.tokens

    def offset(self, position: int) -> int:
        """Place of the token at `position` inside its unit."""
        check_not_negative("position", position)
        return position % self.tokens

    def ratio_to(self, finer: TokenUnit) -> UnitRatio:
        """How this unit splits into `finer` ones; refused when it does not split evenly."""
        if self.tokens % finer.tokens:
            allowed = f"a divisor of {self.tokens}"
            do = f"change the size of {self.name} or of {finer.name}"
            raise CacheError(message(f"{finer.name} in {self.name}", allowed=allowed, got=finer.tokens, do=do))
        return UnitRatio(self.tokens // finer.tokens)


@dataclass(frozen=True)
class UnitRatio:
    """A coarse unit is `fine` fine units."""

    fine: int

    def expand(self, coarse_id: int) -> range:
        """Fine ids that the coarse id covers."""
        check_not_negative("id", coarse_id)
        return range(coarse_id * self.fine, (coarse_id + 1) * self.fine)

    def coarse_of(self, fine_id: int) -> int:
        """Coarse id that covers the fine id."""
        check_not_negative("id", fine_id)
        return fine_id // self.fine


def page_unit(page_tokens: int) -> TokenUnit:
    """The page of `page_tokens` tokens; refused unless it is a whole number of blocks."""
    unit = TokenUnit("page", page_tokens)
    unit.ratio_to(TokenUnit("block", BLOCK_TOKENS))
    return unit


def pages_of(tokens: Tokens, page_tokens: int) -> Pages:
    """Pages that hold `tokens` tokens."""
    return Pages(TokenUnit("page", page_tokens).covering(tokens))


def split_by_budget(blocks: Blocks, budget: Blocks) -> list[range]:
    """Block ids 0..blocks-1 in runs of at most `budget`: every block is in exactly one run, none is skipped."""
    check_not_negative("blocks", blocks)
    if budget < 1:
        raise CacheError(message("budget in blocks", allowed="1 or more", got=budget, do="raise the budget"))
    return [range(start, min(start + budget, blocks)) for start in range(0, blocks, budget)]


def check_gather(tokens: Tokens, budget: Blocks) -> Blocks:
    """Blocks that a gather of `tokens` tokens of context needs; CacheError when `budget` blocks cannot hold them."""
    needed = complete_blocks(tokens)
    if needed > budget:
        allowed = f"at most {budget} blocks ({budget * BLOCK_TOKENS} tokens)"
        got = f"{needed} blocks ({tokens} tokens)"
        raise CacheError(message("gather", allowed=allowed, got=got, do="split it with split_by_budget"))
    return needed

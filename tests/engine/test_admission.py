"""What fits and what is refused, with the numbers in the message."""

from __future__ import annotations

import pytest

from page4.cache.pages import PageAllocator
from page4.engine import admission
from page4.engine.admission import Sizes
from page4.errors import CacheError, Page4Error, RequestError, UsageError

SIZES = Sizes(page_bytes=1024, page_tokens=16, pages_per_state=3)


@pytest.mark.parametrize("requests", [1, 2, 5])
@pytest.mark.parametrize("tokens", [1, 16, 17, 160])
def test_the_pages_computed_for_requests_suffice_and_one_less_does_not(requests: int, tokens: int) -> None:
    def fits(num_pages: int) -> bool:
        allocator = PageAllocator(num_pages, SIZES.pages_per_state)
        for i in range(requests):
            if allocator.allocate_state(str(i)) is None:
                return False
        return all(
            allocator.allocate_pages(str(i), SIZES.pages_for_tokens(tokens)) is not None for i in range(requests)
        )

    pages = SIZES.pages_for_requests(requests, tokens)
    assert fits(pages)
    assert not fits(pages - 1)


def test_tokens_that_fit_is_the_inverse() -> None:
    for pages in range(2, 40):
        tokens = SIZES.tokens_that_fit(pages)
        if tokens:
            assert SIZES.pages_for_requests(1, tokens) <= pages
        assert SIZES.pages_for_requests(1, tokens + 1) > pages


def plan(**changes: int | None) -> admission.ArenaPlan:
    wanted: dict[str, int | None] = {
        "max_model_len": None,
        "memory_bytes": None,
        "max_num_seqs": 4,
        "max_positions": 320,
    }
    wanted |= changes
    return admission.plan_arena(SIZES, **wanted)  # type: ignore[arg-type] # mypy cannot see the keys


def test_the_default_arena_holds_all_requests_at_full_length() -> None:
    assert plan() == admission.ArenaPlan(1 + 4 * (3 + 20), 320, None)
    assert plan(max_model_len=32).num_pages == 1 + 4 * (3 + 2)


def test_a_length_nobody_asked_for_is_lowered_to_the_cap_and_said() -> None:
    lowered = plan(max_positions=1 << 30)
    assert lowered.num_pages == admission.DEFAULT_ARENA_BYTES // 1024
    assert lowered.max_model_len == (lowered.num_pages - 4) * 16
    assert lowered.note is not None and str(lowered.max_model_len) in lowered.note


def test_a_length_that_was_asked_for_is_met_above_the_cap() -> None:
    tokens = 1 << 25
    met = plan(max_positions=1 << 30, max_model_len=tokens)
    assert met.max_model_len == tokens and met.num_pages == 1 + 3 + tokens // 16


def test_an_arena_too_small_for_one_request_is_refused_with_sizes() -> None:
    with pytest.raises(
        CacheError, match=r"at least 24576 bytes for one request of 320 tokens, got 10240 bytes .*96 or less"
    ):
        plan(memory_bytes=10 * 1024 + 5)
    with pytest.raises(CacheError, match="raise it"):
        plan(memory_bytes=2 * 1024)
    assert plan(memory_bytes=24 * 1024).num_pages == 24


@pytest.mark.parametrize("length", [0, -1, 321])
def test_a_model_length_outside_the_config_is_refused(length: int) -> None:
    with pytest.raises(UsageError, match="1 to 320"):
        plan(max_model_len=length)


@pytest.mark.parametrize(
    ("drafts", "has_draft", "text"), [(8, True, "0 to 7"), (-1, True, "0 to 7"), (1, False, "no MTP")]
)
def test_drafts_above_the_window_or_without_a_head_are_refused(drafts: int, has_draft: bool, text: str) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        admission.check_drafts(drafts, has_draft=has_draft)
    assert caught.value.exit_code == 2
    admission.check_drafts(0, has_draft=False)
    admission.check_drafts(7, has_draft=True)


def test_every_window_fits_the_budget() -> None:
    assert admission.concurrent_windows(8, 2048, 7) == 8
    assert admission.concurrent_windows(8, 32, 3) == 8
    assert admission.concurrent_windows(8, 31, 3) == 7
    assert admission.concurrent_windows(8, 4, 3) == 1
    with pytest.raises(UsageError, match="at least 4"):
        admission.concurrent_windows(8, 3, 3)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [([], "at least one"), ([1] * 11, "at most 10 tokens, got 11"), ([1, 100], "token id 1: .*0 to 99, got 100"),
     ([-1], "got -1"), ([True], "got True"), (["a"], "got 'a'")],
)  # fmt: skip
def test_prompts_are_checked(prompt: list[int], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        admission.check_prompt(prompt, vocab_size=100, max_model_len=10)
    admission.check_prompt([0, 99] * 5, vocab_size=100, max_model_len=10)


def test_a_request_that_cannot_run_alone_is_refused() -> None:
    admission.check_fits(SIZES, num_pages=10, tokens=96)
    with pytest.raises(Page4Error, match="11 pages for 97 tokens"):
        admission.check_fits(SIZES, num_pages=10, tokens=97)

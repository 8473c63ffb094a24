"""B36: drafts that are never accepted, or always while the text loops, raise an alarm; healthy requests do not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.engine.lanes import assert_idle, make_llm, prompt_of, tokens

from page4.engine.watchdog import FLAT_WINDOWS, ZERO_WINDOWS, Watchdog, period_of_loop


def feed(windows: list[int], text: list[int], k: int = 3) -> tuple[Watchdog, int | None]:
    """Windows of k drafts with these accepted counts over a text that ends them; and the window of the alarm."""
    dog, at, end = Watchdog(), None, 0
    for number, accepted in enumerate(windows, start=1):
        end += accepted + 1
        if dog.observe(k, accepted, [text[i % len(text)] for i in range(end)]) is not None:
            assert at is None, "an alarm is raised once"
            at = number
    return dog, at


def profile(shares: tuple[float, ...], windows: int, seed: int) -> list[int]:
    """Accepted counts in which position i is accepted with the share given, if all before it are."""
    rng, found = random.Random(seed), []
    for _ in range(windows):
        accepted = 0
        while accepted < len(shares) and rng.random() < shares[accepted] / (shares[accepted - 1] if accepted else 1.0):
            accepted += 1
        found.append(accepted)
    return found


VARIED = random.Random(3).choices(range(500), k=4000)


def test_b36_two_hundred_windows_without_an_accepted_draft() -> None:
    dog, at = feed([0] * 200, VARIED)
    assert (dog.alarm, at) == ("zero acceptance", ZERO_WINDOWS)


def test_b36_flat_acceptance_over_a_repeated_four_gram() -> None:
    windows = profile((0.99, 0.97, 0.94), 200, seed=1)
    dog, at = feed(windows, [11, 12, 13, 14])
    assert dog.alarm == "flat acceptance over a loop" and at is not None
    # Within the 200 tokens of fifty repetitions, or as soon as there are windows enough.
    assert at <= FLAT_WINDOWS + 5


def test_b36_ordinary_acceptance_and_varied_text() -> None:
    dog, at = feed(profile((0.72, 0.53, 0.40), 400, seed=2), VARIED)
    assert (dog.alarm, at) == (None, None)
    assert dog.acceptance is not None and 0.45 < dog.acceptance < 0.65


def test_b36_a_count_is_no_loop() -> None:
    """ "1, 2, 3, ..": digits, a comma and a space, nearly every draft accepted."""
    text = [token for n in range(1, 2000) for token in (*(10 + int(digit) for digit in str(n)), 1, 2)]
    dog, at = feed(profile((0.99, 0.98, 0.97), 600, seed=4), text)
    assert (dog.alarm, at) == (None, None)


def test_b36_too_few_windows_are_no_data() -> None:
    dog, at = feed([0] * (FLAT_WINDOWS - 1), VARIED)
    assert (dog.alarm, at, dog.acceptance) == (None, None, None)
    assert Watchdog().observe(0, 0, VARIED) is None and Watchdog().acceptance is None


def test_windows_without_drafts_do_not_count() -> None:
    dog = Watchdog()
    for _ in range(500):
        dog.observe(0, 0, VARIED)
    assert (dog.windows, dog.alarm) == (0, None)


def test_one_accepted_draft_begins_the_count_again() -> None:
    dog, at = feed(([0] * (ZERO_WINDOWS - 1) + [1]) * 5, VARIED)
    assert (dog.alarm, at) == (None, None)


@pytest.mark.parametrize("period", [1, 2, 3, 4, 7, 31, 32])
def test_loops_are_found_by_their_period(period: int) -> None:
    run = list(range(period))
    long = max(160, 25 * period)
    assert period_of_loop([90] * 10 + (run * long)[: long + period]) == period
    assert period_of_loop((run * long)[: long - 1]) is None
    broken = (run * long)[: long + period]
    broken[-long // 2] = 77
    assert period_of_loop(broken) is None


def test_a_period_of_33_is_none() -> None:
    assert period_of_loop(list(range(33)) * 100) is None


def test_an_alarm_ends_the_drafts_of_that_request_and_no_token_changes(
    small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Drafts that are always wrong: the token after the target's own choice."""
    prompt, count = prompt_of(20, 5), ZERO_WINDOWS + 20
    expected = tokens(make_llm(small, 0), prompt, count)
    llm = make_llm(small, 2)
    drafter = llm.core._drafter
    assert drafter is not None

    def wrong(logits: Any, entries: Any, step: int, found: dict[str, Any]) -> list[int]:
        for entry in entries:
            done = entry.request.num_tokens - len(prompt)
            found[entry.request.owner][0].append((expected[min(done + step - 1, count - 1)] + 1) % 24)
        return [found[entry.request.owner][0][-1] for entry in entries]

    monkeypatch.setattr(drafter, "_pick", wrong)
    assert tokens(llm, prompt, count) == expected
    [event] = llm.metrics.watchdog_events
    assert (event.signature, event.index) == ("zero acceptance", 0)
    assert event.num_tokens == len(prompt) + 1 + ZERO_WINDOWS
    assert llm.metrics.accepted == 0 and llm.metrics.drafted == 2 * ZERO_WINDOWS
    assert "zero acceptance; it goes on without drafts" in caplog.text
    assert_idle(llm)

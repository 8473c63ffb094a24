"""Sampling parameters: every number outside its range is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from page4.engine.params import SamplingParams
from page4.errors import UsageError


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", v) for v in (0, -1, 1.5, "8", True)]
    + [("min_tokens", v) for v in (-1, 129, 0.5)]
    + [("temperature", v) for v in (-0.1, float("nan"), float("inf"), "hot", False)]
    + [("top_p", v) for v in (0, -0.5, 1.01, float("nan"), None)]
    + [("min_p", v) for v in (-0.1, 1.5)]
    + [("top_k", v) for v in (-2, 1.0, "5")]
    + [("n", v) for v in (0, -3, 2.0)]
    + [("seed", v) for v in (1.5, "x", 2**64)]
    + [("logprobs", v) for v in (-1, 21, 1.5)]
    + [("prompt_logprobs", v) for v in (-1, 21)]
    + [("stop", v) for v in ([""], [1], 5, "", {"a"})]
    + [("stop_token_ids", v) for v in ([-1], ["1"], 5, [True])]
    + [("ignore_eos", 1), ("skip_special_tokens", None), ("include_stop_str_in_output", "no")],
)
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name}: expected .*, got .*; set {name}") as caught:
        SamplingParams(**{name: value})
    assert caught.value.exit_code == 2


def test_good_values_are_kept() -> None:
    params = SamplingParams(
        max_tokens=None, temperature=0.7, top_p=0.9, top_k=-1, stop="end", stop_token_ids=[3], seed=-5
    )
    assert params.stop == ("end",) and params.stop_token_ids == (3,)
    assert not params.greedy and params.filtered
    assert SamplingParams().greedy and not SamplingParams(temperature=1).filtered

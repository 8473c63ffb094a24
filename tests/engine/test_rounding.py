"""In 16-bit types drafts may change a greedy token only where the two best logits are within the type's rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.lanes import assert_idle, make_llm, prompt_of
from torch import Tensor

from page4 import SamplingParams
from page4.engine import core
from page4.engine.compare import first_difference
from page4.engine.verifying import verify
from page4.errors import UsageError

COUNT = 40


def _plain(folder: Path, prompts: list[list[int]], dtype: str) -> list[tuple[list[int], Tensor]]:
    """Each prompt's greedy tokens without drafts, together, and the logits [COUNT, V] that chose them."""
    rows: dict[str, list[Tensor]] = {}

    def recording(logits: Tensor, asked: Any, q: Any) -> Any:
        for entry in asked:
            rows.setdefault(entry.request.request_id, []).append(logits[entry.start].clone())
        return verify(logits, asked, q)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "verify", recording)
        results = make_llm(folder, 0, dtype=dtype).generate(prompts, SamplingParams(max_tokens=COUNT, ignore_eos=True))
    return [(result.outputs[0].token_ids, torch.stack(rows[result.request_id])) for result in results]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_drafts_change_greedy_tokens_by_rounding_only(small: Path, dtype: torch.dtype) -> None:
    """24 prompts with k = 3 against k = 0; in fp32 there is no difference at all."""
    name = str(dtype).removeprefix("torch.")
    prompts = [prompt_of(5 + 3 * i, 200 + i) for i in range(24)]
    plain = _plain(small, prompts, name)
    llm = make_llm(small, 3, dtype=name)
    results = llm.generate(prompts, SamplingParams(max_tokens=COUNT, ignore_eos=True))
    differences = []
    for (tokens, logits), result in zip(plain, results, strict=True):
        assert tokens == logits.argmax(-1).tolist()
        difference = first_difference(tokens, result.outputs[0].token_ids, logits, dtype)
        if difference is not None:
            assert difference.is_rounding, str(difference)
            differences.append(difference)
    assert len(differences) <= (0 if dtype is torch.float32 else 6), "most runs agree to the end"
    assert 0 < llm.metrics.accepted < llm.metrics.drafted
    assert_idle(llm)


def _logits(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("dtype", "gap", "explained"),
    [
        (torch.bfloat16, 0.06, True),
        (torch.bfloat16, 0.07, False),
        (torch.float16, 0.007, True),
        (torch.float16, 0.009, False),
        (torch.float32, 1e-7, False),
        (torch.bfloat16, 3.0, False),
    ],
)
def test_a_planted_difference_is_judged_by_its_gap(dtype: torch.dtype, gap: float, explained: bool) -> None:
    """The best logit is 4, so two units in the last place are 8 * eps: 0.0625 in bf16, 0.0078 in fp16."""
    logits = _logits((1.0, 2.0, 0.0), (4.0, -1.0, 4.0 - gap), (0.0, 0.0, 1.0))
    difference = first_difference([1, 0, 2], [1, 2, 1], logits, dtype)
    assert difference is not None
    assert (difference.position, difference.tokens) == (1, (0, 2))
    assert difference.top2_gap == pytest.approx(gap, abs=1e-6)
    assert difference.is_rounding is explained
    assert ("NOT explained" in str(difference)) is not explained


def test_what_rounding_never_explains() -> None:
    logits = _logits((4.0, 4.0, 3.99), (4.0, 0.0, 0.0))
    third = first_difference([0, 0], [2, 0], logits, torch.bfloat16)
    assert third is not None, "a token that is not one of the two best"
    assert not third.is_rounding
    for other in ([0], [0, 0, 1], []):
        ended = first_difference([0, 0], other, logits, torch.bfloat16)
        assert ended is not None, "a run that ended early or went on"
        assert not ended.is_rounding
        assert None in ended.tokens
    assert first_difference([0, 0], [0, 0], logits, torch.bfloat16) is None
    tie = first_difference([0, 0], [1, 0], logits, torch.bfloat16)
    assert tie is not None
    assert tie.is_rounding
    with pytest.raises(UsageError, match=r"logits: expected \[3, V\], got \[2, 3\]"):
        first_difference([0, 0, 0], [0, 0, 0], logits, torch.bfloat16)


def test_a_wrong_draft_that_slips_through_is_flagged(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Power check: an engine that accepts whatever was drafted is caught, in bf16 too."""
    prompts = [prompt_of(9, 31), prompt_of(30, 32)]
    plain = _plain(small, prompts, "bfloat16")

    def credulous(logits: Tensor, asked: Any, q: Any) -> Any:
        found = verify(logits, asked, q)
        for entry in asked:
            found[entry.request.owner].tokens[:-1] = entry.drafts
            del found[entry.request.owner].tokens[entry.num_rows :]
        return found

    monkeypatch.setattr(core, "verify", credulous)
    results = make_llm(small, 3, dtype="bfloat16").generate(prompts, SamplingParams(max_tokens=COUNT, ignore_eos=True))
    found = [
        first_difference(tokens, result.outputs[0].token_ids, logits, torch.bfloat16)
        for (tokens, logits), result in zip(plain, results, strict=True)
    ]
    assert any(difference is not None and not difference.is_rounding for difference in found)

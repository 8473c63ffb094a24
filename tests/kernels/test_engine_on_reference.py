"""PAGE4_KERNELS=reference runs the whole engine on the truth: same tokens, and the fast kernels are never entered."""

from __future__ import annotations

from typing import Any

import pytest

from page4 import LLM, SamplingParams
from page4.kernels import torch_attend, torch_planner, torch_select


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("a fast kernel ran")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_same_tokens_on_the_reference(monkeypatch: pytest.MonkeyPatch, kv_dtype: str) -> None:
    """A prompt past the embedded checkpoint's 259 tokens of pruning, drafts included."""
    prompt = [(17 * i * i + 3 * i) % 4000 + 10 for i in range(290)]
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    found = []
    for kernels in ("auto", "reference"):
        monkeypatch.setenv("PAGE4_KERNELS", kernels)
        if kernels == "reference":
            for module in (torch_attend, torch_planner, torch_select):
                for name in ("attend_rows", "attend_grouped", "plan_rows", "plan_grouped", "checked_top_blocks"):
                    if hasattr(module, name):
                        monkeypatch.setattr(module, name, refuse)
        llm = LLM(
            speculative_config={"method": "mtp", "num_speculative_tokens": 3},
            max_model_len=512,
            kv_cache_dtype=kv_dtype,
            # The embedded checkpoint has no scales; its draft never runs at 1.
            draft_kv_dtype="auto",
            allow_unit_scales=kv_dtype != "auto",
            e4m3_mtp=True,
        )
        found.append(llm.generate([prompt], params)[0].outputs[0].token_ids)
    assert len(found[0]) == 10
    assert found[0] == found[1]

"""The operations on GPU kernels: on a GPU as they run there, elsewhere Triton's in the interpreter, small."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.attention_cases import make_case
from tests.engine.lanes import make_llm, prompt_of, tokens
from tests.oracle import random_checkpoint

pytest.importorskip("triton")

from page4 import attend as attend_module
from page4.attend import attend
from page4.cache.rows import Rows
from page4.cache.storage import LayerKV
from page4.kernels import gpu
from page4.select import Selection, select

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setenv("PAGE4_KERNELS", "triton")


def test_what_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for kernels, expected in (("auto", (False, True)), ("triton", (True, True)), ("torch", (False, False))):
        monkeypatch.setenv("PAGE4_KERNELS", kernels)
        assert (gpu.wanted(cpu), gpu.wanted(cuda)) == expected
    assert gpu.append_refusal(torch.zeros(1, 1, 16), torch.zeros(2, 16, 1, 16)) is not None


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("padding", [False, True])
def test_attend_takes_the_kernel_and_agrees_with_float64(seed: int, kv_dtype: torch.dtype, padding: bool) -> None:
    case = make_case(seed, [(40, 5), (3, 2)], kv_dtype=kv_dtype, padding=padding)
    layer_kv, rows = case.layer_kv, case.rows
    moved = LayerKV(layer_kv.k.to(DEVICE), layer_kv.v.to(DEVICE), layer_kv.k_scale, layer_kv.v_scale)
    places = [x.to(DEVICE) for x in (rows.positions, rows.request_of_row, rows.block_table)]
    selection = Selection(case.selection.block_ids.to(DEVICE), case.selection.counts.to(DEVICE))
    before = attend_module.route_counts["generic"]
    out, lse = attend(case.q.to(DEVICE), moved, selection, Rows(*places), return_lse=True)
    assert attend_module.route_counts["generic"] == before + 1
    expected, expected_lse = case.expected()
    torch.testing.assert_close(out.double().cpu(), expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=2e-5, atol=2e-5)


def test_select_reports_a_nan_row_instead_of_waiting(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pooled = torch.randn(8, 4, 16, generator=generator)
    q = torch.randn(3, 2, 16, generator=generator)
    q[1, 0, 3] = torch.nan
    places = (torch.tensor([100, 101, 102]), torch.zeros(3, dtype=torch.int64), torch.arange(1, 8).int().view(1, 7))
    found = select(q.to(DEVICE), pooled.to(DEVICE), Rows(*(x.to(DEVICE) for x in places)), 5)
    assert found.bad_rows is not None and found.bad_rows.tolist() == [False, True, False]
    keys = pooled[1:8].reshape(28, 16).double()
    for row, visible in ((0, 25), (2, 25)):
        scores = (q[row].double() @ keys[:visible].T).relu().sum(0)
        assert found.block_ids[row].tolist() == sorted(scores.topk(5).indices.tolist())
    assert found.block_ids[1].tolist() == [-1] * 5 and found.bad_rows[1:2].tolist() == [True]


def test_the_engine_writes_the_tokens_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is pruned, with drafts."""
    folder = random_checkpoint(tmp_path, seed=11, vocab_size=24, indexer_budget=32, max_position_embeddings=512)
    found = []
    for kernels in ("triton" if DEVICE == "cpu" else "auto", "torch"):
        monkeypatch.setenv("PAGE4_KERNELS", kernels)
        llm = make_llm(folder, 2, dtype="float32", device=DEVICE)
        found.append(tokens(llm, prompt_of(44, 3), 6))
    assert found[0] == found[1]

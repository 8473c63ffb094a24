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
from page4 import embedded_checkpoint
from page4.attend import attend
from page4.cache.append import append_index, append_kv
from page4.cache.rows import Rows
from page4.cache.storage import LayerKV
from page4.codec import Scale
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


@pytest.mark.skipif(DEVICE == "cpu", reason="the Volta kernels run as PTX on a GPU")
@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.uint8])
def test_a_volta_gpu_takes_its_own_kernels(monkeypatch: pytest.MonkeyPatch, seed: int, kv_dtype: torch.dtype) -> None:
    from page4.kernels import nvrtc

    if nvrtc.refusal("compute_70") is not None:
        pytest.skip("no NVRTC for compute_70")
    monkeypatch.setattr(gpu, "capability", lambda device: (7, 0))
    case = make_case(seed, [(40, 5), (3, 2)], dim=256, dtype=torch.float16, kv_dtype=kv_dtype, layout="tokens")
    assert gpu.attend_refusal(case.q.to(DEVICE), case.layer_kv.k.to(DEVICE)) is None
    moved = LayerKV(
        case.layer_kv.k.to(DEVICE), case.layer_kv.v.to(DEVICE), case.layer_kv.k_scale, case.layer_kv.v_scale
    )
    places = (x.to(DEVICE) for x in (case.rows.positions, case.rows.request_of_row, case.rows.block_table))
    selection = Selection(case.selection.block_ids.to(DEVICE), case.selection.counts.to(DEVICE))
    out = attend(case.q.to(DEVICE), moved, selection, Rows(*places))
    torch.testing.assert_close(out.double().cpu(), case.expected()[0], rtol=2e-2, atol=2e-3)


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
    """A prompt that is pruned, with drafts; on a GPU the embedded checkpoint, whose text is a hundred times as much."""
    small = {"vocab_size": 24, "indexer_budget": 32, "max_position_embeddings": 512}
    on_cpu = DEVICE == "cpu"
    folder = random_checkpoint(tmp_path, seed=11, **small) if on_cpu else embedded_checkpoint()
    prompt, count = (prompt_of(44, 3), 6) if on_cpu else (prompt_of(400, 3, vocab=4000), 64)
    found = []
    for kernels in ("triton" if on_cpu else "auto", "torch"):
        monkeypatch.setenv("PAGE4_KERNELS", kernels)
        llm = make_llm(folder, 2, dtype="float32", device=DEVICE, max_model_len=512)
        found.append(tokens(llm, prompt, count))
    assert found[0] == found[1]


# ------------------------------------------------------------------------------------------------------------ captured

needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="a CUDA graph needs a GPU")


class Step:
    """The operations of one layer over a pool of its own, on tensors whose addresses do not change."""

    def __init__(self, seed: int, e4m3: bool, requests: int, rows_each: int, pages_each: int = 40) -> None:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        options = {"device": DEVICE, "generator": generator}
        pages, n = 1 + requests * pages_each, requests * rows_each
        dtype = torch.uint8 if e4m3 else torch.bfloat16
        kv = torch.full((pages * 16 * 2 * 2 * 256 * dtype.itemsize,), 0x7F, dtype=torch.uint8, device=DEVICE)
        kv = kv.view(dtype).view(pages, 2, 16, 512).permute(0, 2, 1, 3)
        scales = (Scale(0.02), Scale(0.01)) if e4m3 else (None, None)
        counters = torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)
        self.layer_kv = LayerKV(kv[..., :256], kv[..., 256:], *scales, counters)
        self.pooled = torch.zeros(pages, 4, 128, dtype=torch.bfloat16, device=DEVICE)
        self.ring = torch.zeros(requests + 1, 16, 128, dtype=torch.bfloat16, device=DEVICE)
        self.slots = torch.arange(1, requests + 1, device=DEVICE)
        self.positions = torch.zeros(n, dtype=torch.int64, device=DEVICE)
        self.requests = torch.arange(requests, device=DEVICE).repeat_interleave(rows_each)
        self.table = torch.zeros(requests, pages_each, dtype=torch.int32, device=DEVICE)
        self.k, self.v = (torch.randn(n, 2, 256, **options).bfloat16() for _ in range(2))
        self.q, self.gate = (torch.randn(n, 24, 256, **options).bfloat16() for _ in range(2))
        self.index_q = torch.randn(n, 4, 128, **options).bfloat16()
        self.raw = torch.randn(n, 128, **options).bfloat16()
        self.shape = (requests, rows_each, pages_each)
        # Earlier tokens of every request, as if they had been written before.
        real = kv[1:]
        if e4m3:
            real.copy_(torch.randint(0, 0x70, real.shape, device=DEVICE, dtype=torch.uint8))
        else:
            real.copy_(torch.randn(real.shape, **options))
        self.pooled[1:].normal_(generator=generator)

    def at(self, seed: int) -> None:
        """Other lengths, other pages, other inputs, some rows of padding."""
        generator = torch.Generator().manual_seed(seed)
        requests, rows_each, pages_each = self.shape
        last = torch.randint(rows_each, 16 * pages_each, (requests, 1), generator=generator)
        positions = last - rows_each + 1 + torch.arange(rows_each)
        positions[:, 0][torch.rand(requests, generator=generator) < 0.2] = -1
        self.positions.copy_(positions.flatten())
        pages = 1 + torch.randperm(requests * pages_each, generator=generator).view(requests, pages_each)
        self.table.copy_(pages.int())
        for tensor in (self.k, self.v, self.q, self.index_q, self.raw):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))

    def run(self) -> tuple[torch.Tensor, ...]:
        rows = Rows(self.positions, self.requests, self.table)
        flags = append_kv(self.layer_kv, self.k, self.v, rows)
        append_index(self.pooled, self.ring, self.raw, rows, self.slots, lambda mean, first: mean * 1.5)
        found = select(self.index_q, self.pooled, rows, 64)
        out, lse = attend(self.q, self.layer_kv, found, rows, gate=self.gate, return_lse=True)
        return (out, lse, found.block_ids, found.counts, *(() if flags is None else (flags,)))


@needs_gpu
@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize(("requests", "rows_each"), [(1, 1), (16, 1), (5, 4), (2, 33)])
def test_a_captured_step_replays_what_runs_eagerly(e4m3: bool, requests: int, rows_each: int) -> None:
    step = Step(1, e4m3, requests, rows_each)
    step.at(1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    null_pages = [step.layer_kv.k[0].clone(), step.pooled[0].clone()]
    for seed in range(2, 8):
        step.at(seed)
        # A step reads raw keys of the tokens before it, which a longer one of its rows then overwrites.
        ring = step.ring.clone()
        graph.replay()
        replayed = [x.clone() for x in captured]
        step.ring.copy_(ring)
        for mine, eager in zip(replayed, step.run(), strict=True):
            assert torch.equal(mine.view(torch.uint8), eager.contiguous().view(torch.uint8))
        assert replayed[0].isfinite().all()
    assert torch.equal(null_pages[0].view(torch.uint8), step.layer_kv.k[0].contiguous().view(torch.uint8))
    assert torch.equal(null_pages[1], step.pooled[0])

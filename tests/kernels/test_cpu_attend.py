"""Compiled attention against float64, and that nothing but the attended tokens can reach a bit of it."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from tests.attention_cases import E4M3_TABLE, Case, make_case, selection_of
from tests.kernels.cpu_cases import assert_close, assert_threads_agree, needs_compiler, same_bits
from torch import Tensor

from page4.attend import attend, is_compiled, route_counts
from page4.cache.rows import Rows
from page4.cache.storage import LayerKV
from page4.codec import Scale
from page4.errors import CacheError
from page4.kernels import cpu
from page4.select import Selection

pytestmark = [needs_compiler, pytest.mark.usefixtures("one_thread")]
SPANS = [(0, 3), (37, 5), (100, 1), (62, 2)]
FP32, E4M3 = torch.float32, torch.uint8


@pytest.fixture(autouse=True)
def automatic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGE4_KERNELS", "auto")


def run(case: Case, rows: list[int] | None = None, gate: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) of all rows of a case, or of some of them alone."""
    q, selection, of = case.q, case.selection.as_canonical(case.rows.positions), case.rows
    if rows is not None:
        index = torch.tensor(rows, dtype=torch.int64)
        q, selection = q[index], selection.take(index)
        of = Rows(of.positions[index], of.request_of_row[index], of.block_table)
        gate = None if gate is None else gate[index]
    assert is_compiled(q, case.layer_kv)
    before = route_counts["generic"]
    result = attend(q, case.layer_kv, selection, of, gate=gate, return_lse=True)
    assert route_counts["generic"] == before + 1
    return result


def check(case: Case, tolerance: float = 5e-6) -> None:
    out, lse = run(case)
    want_out, want_lse = case.expected()
    assert_close(out, want_out, tolerance)
    assert_close(lse, want_lse, tolerance)


@pytest.mark.parametrize("kv_dtype", [FP32, E4M3])
@pytest.mark.parametrize("dim", [16, 32, 48, 64, 80, 112, 128, 256])
@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [(24, 2), (12, 1), (6, 1), (3, 1), (7, 1), (13, 1), (1, 1), (4, 4), (8, 4), (5, 1), (10, 2), (11, 1)],
)
def test_heads_and_channels(seed: int, heads: int, kv_heads: int, dim: int, kv_dtype: torch.dtype) -> None:
    case = make_case(seed, SPANS, heads=heads, kv_heads=kv_heads, dim=dim, top_k=8, kv_dtype=kv_dtype)
    check(case, 2e-5)


@pytest.mark.parametrize("kv_dtype", [FP32, E4M3])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("layout", ["ours", "tokens", "separate", "odd"])
@pytest.mark.parametrize("page_tokens", [4, 8, 16, 64])
def test_pages_and_layouts(seed: int, page_tokens: int, layout: str, padding: bool, kv_dtype: torch.dtype) -> None:
    spans = [(0, 9), (15, 1), (16, 4), (63, 2), (130, 6)]
    case = make_case(
        seed,
        spans,
        heads=6,
        kv_heads=2,
        dim=32,
        page_tokens=page_tokens,
        top_k=5,
        kv_dtype=kv_dtype,
        layout=layout,
        padding=padding,
    )
    check(case, 2e-5)


@pytest.mark.parametrize("top_k", [1, 3, 4, 5, 63, 64])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 16, 17, 255, 257, 600])
def test_lengths_of_selections(seed: int, length: int, top_k: int) -> None:
    check(make_case(seed, [(length - 1, 1), (max(0, length - 3), min(3, length))], dim=16, top_k=top_k), 5e-6)


def test_padding_rows_and_empty_selections_are_zeros(seed: int) -> None:
    case = make_case(seed, [(3, 2), (7, 1)], heads=14, kv_heads=2, dim=32, padding=True)
    case.selection = selection_of([[] for _ in range(case.rows.num_rows)], 2)
    out, lse = run(case, gate=torch.full_like(case.q, math.nan))
    empty = [row for row in range(case.rows.num_rows) if not case.tokens(row)]
    assert len(empty) == 4, "two padding rows and two whose tail is empty"
    assert not out[empty].any()
    assert bool((lse[empty] == -math.inf).all())


@pytest.mark.parametrize("scale", [1e-30, 1.0, 30.0])
def test_softmax_of_any_steepness(seed: int, scale: float) -> None:
    case = make_case(seed, SPANS, heads=7, dim=48)
    case.q *= scale
    # A logit of size L has an error of about L * 2^-24 before the exponential.
    check(case, 2e-5 * max(1.0, scale))


def test_equal_logits_give_the_mean(seed: int) -> None:
    case = make_case(seed, SPANS, heads=4, dim=32)
    case.q.zero_()
    out, lse = run(case)
    for row in range(case.rows.num_rows):
        tokens = case.tokens(row)
        mean = case.v[int(case.rows.request_of_row[row])][tokens].mean(0)
        assert_close(out[row], mean.expand(4, -1), 2e-6)
        assert_close(lse[row], torch.full((4,), math.log(len(tokens)), dtype=torch.float64), 1e-6)


@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_every_e4m3_byte_is_read_as_its_value(scale: float) -> None:
    """A row of one token is that token: each of the 254 numbers, and NaN for the other two bytes."""
    dim, page_tokens = 16, 4
    k = torch.zeros(65, page_tokens, 1, dim, dtype=E4M3)
    v = torch.zeros_like(k)
    v[1:17].view(-1)[:256] = torch.arange(256).to(E4M3).repeat_interleave(1)
    v[1:17, 0] = torch.arange(256).to(E4M3).view(16, 1, dim)
    owned = Scale(scale)
    rows = Rows(
        torch.zeros(16, dtype=torch.int64), torch.arange(16), torch.arange(1, 17, dtype=torch.int32).view(16, 1)
    )
    selection = Selection(torch.full((16, 1), -1, dtype=torch.int32), torch.zeros(16, dtype=torch.int32), True)
    out = attend(torch.ones(16, 1, dim), LayerKV(k, v, Scale(1.0), owned), selection, rows)
    want = E4M3_TABLE.float() * torch.tensor(owned.value, dtype=FP32)
    assert torch.equal(out.flatten().nan_to_num(12345.0), want.nan_to_num(12345.0))


@pytest.mark.parametrize("magnitude", [1.0, 1e-3, 300.0])
def test_e4m3_up_to_448_times_its_scale(seed: int, magnitude: float) -> None:
    case = make_case(seed, SPANS, heads=6, dim=64, kv_dtype=E4M3, magnitude=magnitude)
    if magnitude != 1.0:
        assert max(float(v.abs().max()) for v in case.v) == pytest.approx(448 * 0.05 * magnitude)
    case.q /= 10 * magnitude
    out, lse = run(case)
    want_out, want_lse = case.expected()
    assert_close(lse, want_lse, 1e-4)
    assert_close(out / magnitude, want_out / magnitude, 1e-3)


def poison_unattended(case: Case, rows: list[int], byte: int) -> None:
    """Every byte of the storage that no token of these rows holds becomes `byte`."""
    kept = []
    for row in rows:
        request, tokens = int(case.rows.request_of_row[row]), torch.tensor(case.tokens(row), dtype=torch.int64)
        page = case.rows.block_table[request, tokens // case.layer_kv.page_tokens].long()
        kept.append((page, tokens % case.layer_kv.page_tokens))
    caches = (case.layer_kv.k, case.layer_kv.v)
    saved = [[cache[at].clone() for at in kept] for cache in caches]
    whole = caches[0].untyped_storage()
    torch.zeros(0, dtype=torch.uint8).set_(whole, 0, (whole.nbytes(),), (1,)).fill_(byte)
    for cache, values in zip(caches, saved, strict=True):
        for at, value in zip(kept, values, strict=True):
            cache[at] = value


@pytest.mark.parametrize("kv_dtype", [FP32, E4M3])
@pytest.mark.parametrize("layout", ["ours", "separate"])
@pytest.mark.parametrize("padding", [False, True])
def test_an_unattended_byte_changes_no_bit(seed: int, padding: bool, layout: str, kv_dtype: torch.dtype) -> None:
    case = make_case(
        seed, SPANS, heads=7, kv_heads=1, dim=48, top_k=4, layout=layout, kv_dtype=kv_dtype, padding=padding, shared=0.3
    )
    gate = torch.randn(case.rows.num_rows, 7, 48, generator=torch.Generator().manual_seed(seed))
    want = run(case, gate=gate)
    assert bool(want[0].isfinite().all())
    for byte in (0x00, 0x7F, 0x80, 0xFF, 0x55):
        poison_unattended(case, list(range(case.rows.num_rows)), byte)
        assert all(same_bits(*pair) for pair in zip(run(case, gate=gate), want, strict=True)), hex(byte)


@pytest.mark.parametrize("kv_dtype", [FP32, E4M3])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(seed: int, kv_dtype: torch.dtype) -> None:
    """Also when everything that this row does not attend to holds another byte."""
    spans = [(61, 4), (9, 2)]
    case = make_case(seed, spans, heads=13, dim=80, top_k=6, kv_dtype=kv_dtype, shared=0.2)
    gate = torch.randn(6, 13, 80, generator=torch.Generator().manual_seed(seed))
    want = run(case, gate=gate)
    for row in range(6):
        for byte in (0x7F, 0xFF, 0x00):
            alone = make_case(seed, spans, heads=13, dim=80, top_k=6, kv_dtype=kv_dtype, shared=0.2)
            poison_unattended(alone, [row], byte)
            got = run(alone, [row], gate)
            assert all(same_bits(a, b[row : row + 1]) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("kv_dtype", [FP32, E4M3])
def test_threads_change_no_bit(seed: int, kv_dtype: torch.dtype) -> None:
    case = make_case(seed, SPANS, heads=26, kv_heads=2, dim=64, kv_dtype=kv_dtype)
    assert_threads_agree(lambda: run(case))
    single = [case.rows.num_rows - 1]
    assert_threads_agree(lambda: run(case, single))


def test_a_gate_is_strided_or_of_another_dtype(seed: int) -> None:
    case = make_case(seed, SPANS, heads=6, kv_heads=2, dim=48)
    rows, generator = case.rows.num_rows, torch.Generator().manual_seed(seed)
    plain, _ = run(case)
    packed = torch.randn(rows, 6, 96, generator=generator) * 5
    turned = torch.randn(48, 6, rows, generator=generator).permute(2, 1, 0)
    for gate in (packed[..., 48:], packed[..., ::2], turned, packed[..., 48:].contiguous(), torch.zeros(1, 1, 1)):
        wide = gate.expand(rows, 6, 48)
        out, _ = run(case, gate=wide)
        assert_close(out, plain.double() * wide.double().sigmoid(), 2e-6)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        out, _ = run(case, gate=packed[..., 48:].to(dtype))
        assert_close(out, plain.double() * packed[..., 48:].to(dtype).double().sigmoid(), 2e-6)


@pytest.mark.parametrize("value", [-1e4, -100.0, -88.0, 88.5, 1e4])
def test_a_gate_that_saturates(seed: int, value: float) -> None:
    case = make_case(seed, [(20, 3)], heads=3, dim=32)
    out, _ = run(case, gate=torch.full_like(case.q, value))
    assert_close(out, run(case)[0].double() * torch.tensor(value, dtype=torch.float64).sigmoid(), 2e-6)


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_attended_nan_is_seen_by_its_rows_alone(seed: int, side: str, value: float) -> None:
    case = make_case(seed, [(6, 2), (9, 3)], heads=6, kv_heads=2, dim=32, top_k=16)
    clean, _ = run(case)
    cache: Tensor = getattr(case.layer_kv, side)
    page = int(case.rows.block_table[1, 0])
    cache[page, 2, 1] = value
    out, _ = run(case)
    assert bool(out[2:, 3:].isnan().any(-1).all()) if math.isnan(value) else not out[2:, 3:].isfinite().all()
    assert same_bits(out[:2], clean[:2]), "another request"
    assert same_bits(out[2:, :3], clean[2:, :3]), "another KV head"


def test_a_softmax_scale_of_the_callers(seed: int) -> None:
    case = make_case(seed, SPANS, heads=6, dim=64)
    selection = case.selection.as_canonical(case.rows.positions)
    out, lse = attend(case.q, case.layer_kv, selection, case.rows, softmax_scale=0.05, return_lse=True)
    want_out, want_lse = case.expected(0.05)
    assert_close(out, want_out, 5e-6)
    assert_close(lse, want_lse, 5e-6)


def test_a_selection_that_is_not_canonical(seed: int, rng: random.Random) -> None:
    """Ids in any order, ids that select nothing among them, through the route by name."""
    case = make_case(seed, SPANS, heads=6, dim=32, top_k=12)
    ids = [[b for b in row if b >= 0] for row in case.selection.block_ids.tolist()]
    for row, own in enumerate(ids):
        own += [-1, (int(case.rows.positions[row]) + 1) // 4, -7]
        rng.shuffle(own)
    case.selection = selection_of(ids, 15)
    out, lse = attend(case.q, case.layer_kv, case.selection, case.rows, route="generic", return_lse=True)
    want_out, want_lse = case.expected()
    assert_close(out, want_out, 5e-6)
    assert_close(lse, want_lse, 5e-6)


def test_operands_may_be_views_of_wider_ones(seed: int) -> None:
    case = make_case(seed, SPANS, heads=6, dim=32)
    want, table = run(case), case.rows.block_table
    wide = torch.full((len(table), table.shape[1] + 5), 1, dtype=torch.int32)
    wide[:, : table.shape[1]] = table
    pairs = torch.stack((case.rows.positions, case.rows.request_of_row), 1)
    for view in (wide[:, : table.shape[1]], table.T.contiguous().T):
        case.rows = Rows(pairs[:, 0], pairs[:, 1], view)
        assert all(same_bits(*pair) for pair in zip(run(case), want, strict=True))


@pytest.mark.parametrize("past", [0, 1, 100000])
def test_a_position_past_the_block_table_is_refused(seed: int, past: int) -> None:
    case = make_case(seed, [(30, 2)], heads=6, dim=32)
    at = torch.tensor([30, 4 * 16 - 1 + past])
    case.rows = Rows(at, case.rows.request_of_row, case.rows.block_table)
    case.selection = Selection(case.selection.block_ids, case.selection.counts, True)
    if not past:
        run(case)
        return
    with pytest.raises(CacheError, match=f"expected below 64, 4 pages of 16 tokens, got {63 + past}"):
        run(case)


def test_without_rows(seed: int) -> None:
    case = make_case(seed, [(5, 1)], heads=6, dim=32)
    out, lse = run(case, [])
    assert out.shape == (0, 6, 32) and lse.shape == (0, 6)


@pytest.mark.parametrize("kv_dtype", [FP32, E4M3])
def test_other_routes_agree(seed: int, monkeypatch: pytest.MonkeyPatch, kv_dtype: torch.dtype) -> None:
    case = make_case(seed, SPANS, heads=12, kv_heads=2, dim=64, kv_dtype=kv_dtype)
    out, lse = run(case)
    for kernels in ("torch", "reference"):
        monkeypatch.setenv("PAGE4_KERNELS", kernels)
        assert not is_compiled(case.q, case.layer_kv)
        other, other_lse = attend(case.q, case.layer_kv, case.selection, case.rows, return_lse=True)
        torch.testing.assert_close(out, other, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(lse, other_lse, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes_are_not_compiled(seed: int, dtype: torch.dtype) -> None:
    case = make_case(seed, [(40, 2)], dim=32, kv_dtype=dtype)
    assert not is_compiled(case.q, case.layer_kv)
    half = make_case(seed, [(40, 2)], dim=32, dtype=dtype)
    assert not is_compiled(half.q, half.layer_kv)
    odd = make_case(seed, [(40, 2)], dim=40)
    assert not is_compiled(odd.q, odd.layer_kv)
    strided = dataclasses.replace(odd, q=torch.zeros(64, 6, 2).permute(2, 1, 0))
    assert not is_compiled(strided.q, odd.layer_kv)
    assert cpu.refusal(odd.q, channels=(40,)) == "compiled for multiples of 16 channels, not for 40"

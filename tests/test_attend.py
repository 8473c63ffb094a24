"""attend: every route and kernel against float64 einsum over the selected tokens, with hostile bytes around them."""

from __future__ import annotations

import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from tests.attention_cases import E4M3, KV_DTYPES, LAYOUTS, Case, make_case, make_rows, selection_of

from page4 import attend as attend_module
from page4.attend import attend, choose_route, route_counts
from page4.cache.append import append_kv
from page4.cache.rows import Rows
from page4.cache.storage import LayerKV
from page4.codec import Scale
from page4.errors import KernelError
from page4.kernels import reference
from page4.plan import plan_grouped
from page4.select import select

pytestmark = pytest.mark.usefixtures("one_thread")

ROUTES = ("generic", "xqa", "grouped")
LANES = [(kernels, route) for kernels in ("auto", "reference") for route in ROUTES]
# Rounding of one number of the type, relative to it.
EPS = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@pytest.fixture(params=LANES, ids=lambda lane: "-".join(lane))
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each route on the fast kernels and on the reference."""
    monkeypatch.setenv("PAGE4_KERNELS", request.param[0])
    return str(request.param[1])


def check(case: Case, route: str) -> None:
    """Out and lse of a route against the truth."""
    out, lse = attend(case.q, case.layer_kv, case.selection, case.rows, route=route, return_lse=True)
    want, want_lse = case.expected()
    assert out.dtype == case.q.dtype
    largest = max([v.abs().max().item() for v in case.v if v.numel()], default=1.0)
    # Sums of a few hundred fp32 numbers; and once for the output, once for stored partial outputs, q's own rounding.
    tolerance = largest * (2e-6 + (2 * EPS[case.q.dtype] if case.q.dtype != torch.float32 else 0.0))
    assert ((out.double() - want).abs() <= tolerance).all()
    finite = want_lse > -math.inf
    assert torch.equal(lse > -math.inf, finite)
    if finite.any():
        assert (lse.double() - want_lse)[finite].abs().max() <= 2e-5 * max(1.0, want_lse[finite].abs().max().item())


SPANS = [(0, 1), (90, 9), (3, 3), (77, 2)]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_every_route_is_right_for_every_dtype(route: str, seed: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    check(make_case(seed, SPANS, dtype=dtype, kv_dtype=kv_dtype, padding=seed % 2 == 0), route)


@pytest.mark.parametrize("heads,kv_heads,dim", [(24, 2, 256), (12, 1, 128), (6, 1, 64), (3, 1, 80), (4, 4, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_geometries_and_layouts(route: str, seed: int, heads: int, kv_heads: int, dim: int, layout: str) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "layout": layout}
    check(make_case(seed, [(40, 3), (99, 9)], top_k=8, kv_dtype=torch.uint8, **shape), route)
    check(make_case(seed + 1, [(40, 3), (99, 9)], top_k=8, kv_dtype=torch.float32, host=False, **shape), route)


@pytest.mark.parametrize("page_tokens", [4, 16, 784, 804])
def test_page_sizes(route: str, seed: int, page_tokens: int) -> None:
    case = make_case(seed, [(801, 9), (3, 2)], heads=2, kv_heads=2, dim=8, page_tokens=page_tokens, top_k=24)
    check(case, route)


@pytest.mark.parametrize("spans", [[(0, 1)], [(2047, 1)], [(5, 1)] * 9, [(0, 0), (7, 2)], [(600, 40)]], ids=str)
def test_shapes_of_steps(route: str, seed: int, spans: list[tuple[int, int]]) -> None:
    check(make_case(seed, spans, heads=4, kv_heads=2, dim=16, top_k=150, kv_dtype=torch.uint8), route)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
def test_no_unattended_byte_changes_a_bit(route: str, seed: int, kv_dtype: torch.dtype) -> None:
    """Null page, foreign pages and unwritten tokens of the tail block, filled with zeros, NaN and huge numbers."""
    found = []
    for byte in (0x00, 0x7F, 0xFF, 0x7E, 0x80):
        case = make_case(seed, SPANS, kv_dtype=kv_dtype, byte=byte, padding=True)
        found.append(attend(case.q, case.layer_kv, case.selection, case.rows, route=route))
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert found[0].isfinite().all()


def test_values_at_the_end_of_the_range(route: str, seed: int) -> None:
    """448 * scale, where fp16 sums of products overflow."""
    case = make_case(seed, [(70, 9)], kv_dtype=torch.uint8, dtype=torch.bfloat16, magnitude=20.0)
    assert max(v.abs().max() for v in case.v) == 448 * case.layer_kv.v_scale.value
    check(case, route)


def test_host_fields_change_nothing(route: str, seed: int) -> None:
    with_host, without = (make_case(seed, SPANS, host=host) for host in (True, False))
    outs = [attend(c.q, c.layer_kv, c.selection, c.rows, route=route) for c in (with_host, without)]
    assert torch.equal(*outs)


def test_invalid_and_repeated_ids_change_nothing(route: str, seed: int) -> None:
    case = make_case(seed, SPANS, host=False)
    ids = case.selection.block_ids.tolist()
    complete = [(p + 1) // 4 for p in case.rows.positions.tolist()]
    dirty = [[-5, b, b + 9, 1 << 30, *row, *row[::-1], -1] for row, b in zip(ids, complete, strict=True)]
    out = attend(case.q, case.layer_kv, selection_of(dirty, max(map(len, dirty))), case.rows, route=route)
    # Not bit by bit: a wider table may be summed in another order.
    assert (out - attend(case.q, case.layer_kv, case.selection, case.rows, route=route)).abs().max() < 2e-6


def test_padding_rows_give_zeros(route: str, seed: int) -> None:
    case = make_case(seed, [(70, 9)], padding=True)
    out, lse = attend(case.q, case.layer_kv, case.selection, case.rows, route=route, return_lse=True)
    assert (case.rows.positions[0], out[0].abs().max(), lse[0].max()) == (-1, 0.0, -math.inf)
    rows = Rows(torch.full((3,), -1), torch.zeros(3, dtype=torch.int64), case.rows.block_table)
    out = attend(case.q[:3], case.layer_kv, selection_of([[]] * 3, 2), rows, route=route)
    assert not out.any()


def test_rows_that_select_nothing_and_have_no_tail(route: str, seed: int) -> None:
    """Positions 7 and 11 complete a block: without ids, position 7 attends to nothing, beside rows that do."""
    case = make_case(seed, [(4, 8)], kv_dtype=torch.uint8)
    case.selection = selection_of([[0], [], [1], [], [0, 1], [], [], []], 2)
    check(case, route)
    out = attend(case.q, case.layer_kv, case.selection, case.rows, route=route)
    assert [bool(row.any()) for row in out] == [True, True, True, False, True, True, True, False]


def test_b48_attention_in_the_last_page_of_a_pool_beyond_2_gib(route: str) -> None:
    """Only the pages that are written take memory."""
    pages = (1 << 31) // 512 + 128
    pool = torch.empty(pages * 512, dtype=torch.uint8).view(pages, 4, 1, 128)
    pool[-1], pool[0], pool[1] = 0x38, 0x7F, 0x7F  # 1.0; NaN where a 32-bit offset would land
    assert (pages - 1) * 512 > 1 << 31
    layer_kv = LayerKV(pool[..., :64], pool[..., 64:], Scale(1.0), Scale(0.25))
    rows = make_rows([(2, 2)], torch.tensor([[pages - 1]], dtype=torch.int32))
    out = attend(torch.ones(2, 6, 64), layer_kv, selection_of([[], [0]], 1), rows, route=route)
    assert (out - 0.25).abs().max() < 1e-6


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60)
def test_random_steps_in_random_caches(data: st.DataObject) -> None:
    kv_heads = data.draw(st.integers(1, 3))
    case = make_case(
        data.draw(st.integers(0, 2**32)),
        data.draw(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 18)), min_size=1, max_size=4)),
        heads=kv_heads * data.draw(st.integers(1, 7)),
        kv_heads=kv_heads,
        dim=data.draw(st.sampled_from([1, 2, 8, 24])),
        page_tokens=data.draw(st.sampled_from([4, 8, 16, 52])),
        top_k=data.draw(st.integers(1, 20)),
        kv_dtype=data.draw(st.sampled_from(KV_DTYPES)),
        layout=data.draw(st.sampled_from(LAYOUTS)),
        host=data.draw(st.booleans()),
        padding=data.draw(st.booleans()),
        shared=data.draw(st.sampled_from([0.0, 0.9])),
    )
    route = data.draw(st.sampled_from(ROUTES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGE4_KERNELS", data.draw(st.sampled_from(["auto", "reference"])))
        check(case, route)


def test_an_empty_step(route: str) -> None:
    case = make_case(1, [(5, 1)])
    none = torch.zeros(0, dtype=torch.int64)
    rows = Rows(none, none, case.rows.block_table)
    out = attend(case.q[:0], case.layer_kv, selection_of([], 4), rows, route=route)
    assert out.shape == (0, 6, 64)


def test_gate_and_softmax_scale(route: str, seed: int) -> None:
    case = make_case(seed, [(70, 9)])
    gate = torch.randn_like(case.q)
    out = attend(case.q, case.layer_kv, case.selection, case.rows, route=route, gate=gate, softmax_scale=0.5)
    want = case.expected(0.5)[0] / (1 + (-gate.double()).exp())
    assert (out.double() - want).abs().max() < 1e-5


@pytest.mark.parametrize("host", [True, False])
def test_workspace_bounds_change_nothing(monkeypatch: pytest.MonkeyPatch, seed: int, host: bool) -> None:
    """Row and group chunks of the fast kernels, down to one at a time."""
    from page4.kernels import torch_attend, torch_planner

    case = make_case(seed, SPANS, host=host, kv_dtype=torch.uint8)
    for route in ROUTES:
        whole = attend(case.q, case.layer_kv, case.selection, case.rows, route=route)
        with monkeypatch.context() as patch:
            patch.setattr(torch_attend, "WORKSPACE_BYTES", 1)
            patch.setattr(torch_planner, "WORKSPACE_BYTES", 1)
            cut = attend(case.q, case.layer_kv, case.selection, case.rows, route=route)
        assert (whole - cut).abs().max() < 1e-5


# ----------------------------------------------------------------------------------------------- null pages and padding


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("kernel_fix", [False, True])
@pytest.mark.parametrize("planner_fix", [False, True])
def test_qsa_grouped_page4_null_block_padding_no_nan(
    monkeypatch: pytest.MonkeyPatch, seed: int, planner_fix: bool, kernel_fix: bool, kernels: str
) -> None:
    """The value plane of the null page is E4M3 NaN: without both defences it reaches the output, with either not.

    Everything else is a number, so that only the padding entries of the plan can leak.
    """
    monkeypatch.setenv("PAGE4_KERNELS", kernels)
    case = make_case(seed, [(130, 8), (75, 5)], heads=12, dim=32, kv_dtype=torch.uint8, byte=0x00)
    case.layer_kv.v[0] = 0x7F
    plan = plan_grouped(case.selection, case.rows, 16, 12, repoint_padding=planner_fix)
    assert (plan.masks == 0).any(), "the case must have padding entries"
    out = attend(
        case.q,
        case.layer_kv,
        case.selection,
        case.rows,
        route="grouped",
        zero_unattended=kernel_fix,
        repoint_padding=planner_fix,
    )
    if not planner_fix and not kernel_fix:
        assert out.isnan().any()
        return
    assert out.isfinite().all()
    assert (out.double() - case.expected()[0]).abs().max() < 1e-5
    xqa = attend(case.q, case.layer_kv, case.selection, case.rows, route="xqa")
    assert (out - xqa).abs().max() < 1e-5


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_only_zeroing_covers_unwritten_tokens_of_a_tail(
    monkeypatch: pytest.MonkeyPatch, seed: int, kernels: str
) -> None:
    """Why the zeroing cannot be turned off outside of tests: no plan can repair a partial block."""
    monkeypatch.setenv("PAGE4_KERNELS", kernels)
    case = make_case(seed, [(77, 1)], kv_dtype=torch.uint8, byte=0x7F)
    for route in ("xqa", "grouped"):
        for zero in (True, False):
            out = attend(case.q, case.layer_kv, case.selection, case.rows, route=route, zero_unattended=zero)
            assert bool(out.isnan().any()) == (not zero)


def b08_cache(garbage: int) -> LayerKV:
    """Pages of 4 tokens, dim 8: page 0 garbage, page 1 ones, page 2 one token of ones and three of garbage."""
    pages = torch.full((3, 4, 1, 16), garbage, dtype=torch.uint8)
    pages[1] = 0x38
    pages[2, 0] = 0x38
    return LayerKV(pages[..., :8], pages[..., 8:], Scale(1.0), Scale(0.5))


@pytest.mark.parametrize("block_list", [[0] + [-1] * 7, list(range(8)), [0, 0, 0, 1, 2, 3, 7, -1]], ids=str)
def test_b08_null_and_unwritten_bytes_never_reach_an_output(route: str, block_list: list[int]) -> None:
    table = torch.tensor([[1, 2, 0, 0, 0, 0, 0, 0]], dtype=torch.int32)
    rows = Rows(torch.tensor([4, -1]), torch.zeros(2, dtype=torch.int64), table)
    selection = selection_of([block_list, block_list], 8)
    q = torch.ones(2, 2, 8)
    right = torch.cat((torch.full((1, 2, 8), 0.5), torch.zeros(1, 2, 8)))
    for garbage in range(256):
        out = attend(q, b08_cache(garbage), selection, rows, route=route)
        assert torch.equal(out, right), hex(garbage)


def test_b08_a_warm_up_batch_does_not_write_page_0() -> None:
    layer_kv = b08_cache(0x7F)
    for positions in (torch.full((4,), -1), torch.arange(4)):
        rows = Rows(positions, torch.zeros(4, dtype=torch.int64), torch.zeros(1, 8, dtype=torch.int32))
        append_kv(layer_kv, torch.ones(4, 1, 8), torch.ones(4, 1, 8), rows)
        assert (layer_kv.k[0] == 0x7F).all()
        assert (layer_kv.v[0] == 0x7F).all()


# --------------------------------------------------------------------------------------------------------------- scales


def b11_step(tokens: int) -> tuple[torch.Tensor, LayerKV, Rows]:
    """`tokens` tokens in pages of 4: K = 1, -1, 1, .., V = 4, 0, 4, ..; written with k_scale 0.5 and v_scale 2."""
    bytes_ = torch.zeros(4, 4, 1, 2, dtype=torch.uint8)
    layer_kv = LayerKV(bytes_[..., :1], bytes_[..., 1:], Scale(0.5), Scale(2.0))
    table = torch.tensor([[3, 1]], dtype=torch.int32)
    sign = torch.tensor([1.0, -1.0] * tokens)[:tokens].view(-1, 1, 1)
    append_kv(layer_kv, sign, 2 * sign + 2, make_rows([(0, tokens)], table))
    return torch.full((1, 1, 1), math.log(9) / 2), layer_kv, make_rows([(tokens - 1, 1)], table)


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_b11_scales_are_applied_once_on_each_side(route: str, splits: int) -> None:
    q, layer_kv, rows = b11_step(2)
    assert [E4M3[b] for b in layer_kv.k[3, :2].flatten().tolist()] == [2.0, -2.0]
    assert [E4M3[b] for b in layer_kv.v[3, :2].flatten().tolist()] == [2.0, 0.0]
    out = attend(q, layer_kv, selection_of([[]], 1), rows, route=route, softmax_scale=1.0, splits=splits).item()
    wrong = {
        "no k_scale": 4 * 81 / 82,
        "no v_scale": 1.8,
        "probabilities in fp8": 3.5,
        "swapped": 4 * 9**4 / (9**4 + 1) / 4,
    }
    assert abs(out - 3.6) < 1e-6
    assert min(abs(out - value) for value in wrong.values()) > 0.09

    # Weights of 3 and 1/3: the values of 5 tokens are 4, 0, 4, 0, 4 at 3, 1/3, 3, 1/3, 3.
    q, layer_kv, rows = b11_step(5)
    out = attend(q, layer_kv, selection_of([[0]], 1), rows, route=route, softmax_scale=1.0, splits=splits).item()
    assert abs(out - 36 / (9 + 2 / 3)) < 1e-6


@pytest.mark.parametrize("splits", [1, 2, 3, 4, 7, 100])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_splits_and_partitions_merge_to_the_same(
    monkeypatch: pytest.MonkeyPatch, seed: int, kernels: str, splits: int
) -> None:
    monkeypatch.setenv("PAGE4_KERNELS", kernels)
    case = make_case(seed, [(200, 9)], kv_dtype=torch.uint8, top_k=40)
    want = case.expected()[0]
    out = attend(case.q, case.layer_kv, case.selection, case.rows, route="generic", splits=splits)
    assert (out.double() - want).abs().max() < 1e-5
    monkeypatch.setattr(attend_module, "PARTITION_BLOCKS", splits)
    out, lse = attend(case.q, case.layer_kv, case.selection, case.rows, route="xqa", return_lse=True)
    assert (out.double() - want).abs().max() < 1e-5
    assert (lse.double() - case.expected()[1]).abs().max() < 1e-4


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_partial_outputs_are_fp32_for_e4m3_and_the_activations_dtype_otherwise(
    monkeypatch: pytest.MonkeyPatch, seed: int, kernels: str
) -> None:
    """Seen from outside: with a partition a block, 16-bit partial outputs round once more than the result does."""
    monkeypatch.setenv("PAGE4_KERNELS", kernels)
    monkeypatch.setattr(attend_module, "PARTITION_BLOCKS", 1)
    for kv_dtype, exact in ((torch.uint8, True), (torch.bfloat16, False)):
        case = make_case(seed, [(200, 9)], dtype=torch.bfloat16, kv_dtype=kv_dtype)
        out = attend(case.q, case.layer_kv, case.selection, case.rows, route="xqa")
        want = case.expected()[0].bfloat16()
        off = (out != want).float().mean().item()
        assert off < 0.02 if exact else off > 0.02


# ----------------------------------------------------------------------------------------------------- dense and routes


@pytest.mark.parametrize("length", range(63, 71))
def test_b05_dense_up_to_budget_and_tail(route: str, seed: int, length: int) -> None:
    """Budget 64 (16 blocks): nothing is pruned up to 67 tokens; 68 tokens are 17 blocks."""
    case = make_case(seed, [(0, length)], heads=2, dim=64, top_k=16)
    generator = torch.Generator().manual_seed(seed)
    index_q = torch.randn(length, 2, 16, generator=generator)
    pooled = torch.randn(case.layer_kv.k.shape[0], 4, 16, generator=generator)
    selection = select(index_q, pooled, case.rows, 16)
    last = make_rows([(length - 1, 1)], case.rows.block_table)
    out = attend(case.q[-1:], case.layer_kv, selection.take(torch.tensor([-1])), last, route=route)
    logits = torch.einsum("hd,td->ht", case.q[-1].double(), case.k[0][:, 0]) / 8
    dense = logits.softmax(-1) @ case.v[0][:, 0]
    assert ((out[0].double() - dense).abs().max() <= 1e-6) == (length < 68)


def test_routes_are_chosen_by_the_rows_of_a_step() -> None:
    def chosen(rows: tuple[int, ...] | None, grouped_allowed: bool = True, heads_per_kv: int = 6) -> str:
        route, reason = choose_route(rows, grouped_allowed=grouped_allowed, heads_per_kv=heads_per_kv)
        assert reason
        return route

    assert chosen(None) == "xqa"
    assert chosen(()) == "xqa"
    assert chosen((1,) * 16) == "xqa"
    assert chosen((4,)) == "xqa"
    assert chosen((4,) * 16) == "grouped"
    assert chosen((2048,)) == "grouped"
    assert chosen((2048,), grouped_allowed=False) == "xqa"
    assert chosen((2048,), heads_per_kv=63) == "xqa"


def test_what_runs_is_counted(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    case = make_case(seed, [(40, 16)])
    before = dict(route_counts)
    attend(case.q, case.layer_kv, case.selection, case.rows)
    attend(case.q, case.layer_kv, case.selection, case.rows, route="generic")
    monkeypatch.setenv("PAGE4_GROUPED", "0")
    attend(case.q, case.layer_kv, case.selection, case.rows)
    grown = {route: route_counts[route] - before.get(route, 0) for route in ROUTES}
    assert grown == {"grouped": 1, "generic": 1, "xqa": 1}


def test_the_reference_runs_when_asked_for(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    case = make_case(seed, [(40, 9)])
    called = []
    for name in ("attend_generic", "attend_rows", "attend_grouped"):
        real = getattr(reference, name)

        def spy(*args: object, real: object = real, name: str = name) -> object:
            called.append(name)
            return real(*args)  # type: ignore[operator]  # one of three functions

        monkeypatch.setattr(reference, name, spy)
    for kernels in ("auto", "reference"):
        monkeypatch.setenv("PAGE4_KERNELS", kernels)
        for route in ROUTES:
            attend(case.q, case.layer_kv, case.selection, case.rows, route=route)
    assert called == ["attend_generic", "attend_rows", "attend_grouped"]


def test_refuses_operands_that_do_not_fit() -> None:
    case = make_case(1, [(40, 3)])
    operands = (case.layer_kv, case.selection, case.rows)
    with pytest.raises(KernelError, match=r"q: expected \[3, a multiple of 1, 64\], got \[2, 6, 64\]"):
        attend(case.q[:2], *operands)
    with pytest.raises(KernelError, match=r"gate: expected \[3, 6, 64\], got \[3, 6, 1\]"):
        attend(case.q, *operands, gate=case.q[..., :1])
    with pytest.raises(KernelError, match=r"selection: expected \[3, K\], got \[1, 4\]"):
        attend(case.q, case.layer_kv, selection_of([[0]], 4), case.rows)
    with pytest.raises(KernelError, match="splits: expected 1 or more, got 0"):
        attend(case.q, *operands, route="generic", splits=0)
    with pytest.raises(KernelError, match=r"route: .* attend has no route fast"):
        attend(case.q, *operands, route="fast")  # type: ignore[call-overload]  # the refusal is the test
    wide = make_case(1, [(40, 3)], heads=63, dim=8)
    with pytest.raises(KernelError, match=r"route: .* grouped: 63 query heads"):
        attend(wide.q, wide.layer_kv, wide.selection, wide.rows, route="grouped")

"""Triton's attention against float64 over known K and V: routes, dtypes, geometries, layouts, poison, null pages."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.attention_cases import E4M3_TABLE, KV_DTYPES, Case, make_case

pytest.importorskip("triton")

from page4.kernels import reference, triton_attend, triton_env
from page4.kernels.triton_env import jit, tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"
ROUTES = ["generic", "grouped"]
# Of the largest output: fp32 sums, 16-bit probabilities and outputs.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def placed(x: torch.Tensor) -> torch.Tensor:
    """The same storage layout on the device under test."""
    if not ON_GPU:
        return x
    storage = torch.empty(0, dtype=x.dtype, device=DEVICE)
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    storage = whole.to(DEVICE)
    return storage.as_strided(x.shape, x.stride(), x.storage_offset())


def run(route: str, case: Case, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) on the CPU; the plan is the reference planner's."""
    rows, cache = case.rows, case.layer_kv
    group_rows = options.pop("group_rows", 8)
    repoint, splits = options.pop("repoint", True), options.pop("splits", 2)
    gate = options.pop("gate", None)
    places = (rows.positions, rows.request_of_row, rows.block_table, cache.page_tokens)
    heads = case.q.shape[1]
    if route == "generic":
        plan = reference.plan_rows(case.selection.block_ids, *places, repoint)
        operands = [plan.table.int(), plan.lengths.int()]
    else:
        joined = reference.plan_grouped(
            case.selection.block_ids, *places, heads // cache.k.shape[2], group_rows, repoint
        )
        empty = torch.tensor([0], dtype=torch.int32)
        operands = [
            torch.nn.functional.pad(joined.rows.int(), (0, 0, 0, 1), value=-1),
            torch.cat((joined.starts[:-1].int(), empty)),
            torch.cat((joined.starts[1:].int(), empty)),
            torch.nn.functional.pad(joined.blocks.int(), (0, 64), value=0),
            torch.nn.functional.pad(joined.masks, (0, 64), value=-1),
        ]
    q = placed(case.q)
    out = torch.full(q.shape, math.nan, dtype=q.dtype, device=DEVICE)
    lse = torch.full(q.shape[:2], math.nan, device=DEVICE)
    size = triton_attend.workspace_bytes(q.shape[0], heads, q.shape[2], splits)
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=DEVICE)
    scales = None
    if cache.k_scale is not None and cache.v_scale is not None:
        scales = (cache.k_scale.tensor(DEVICE), cache.v_scale.tensor(DEVICE))
    attend = triton_attend.attend_generic if route == "generic" else triton_attend.attend_grouped
    attend(
        *(q, placed(cache.k), placed(cache.v), *[x.to(DEVICE) for x in operands], q.shape[2] ** -0.5, scales, out),
        workspace,
        splits=splits,
        gate=None if gate is None else placed(gate),
        lse=lse,
        **options,
    )
    return out.cpu(), lse.cpu()


def check(route: str, case: Case, **options: Any) -> None:
    out, lse = run(route, case, **options)
    right, right_lse = case.expected()
    if options.get("gate") is not None:
        right = right * options["gate"].double().sigmoid()
    bound = TOLERANCE[case.q.dtype] * float(right.abs().max().clamp_min(1e-3))
    assert float((out.double() - right).abs().max()) <= bound
    there = right_lse > -math.inf
    assert bool((lse[~there] == -math.inf).all()) and bool((out[~there] == 0).all())
    close = {"rtol": 4 * TOLERANCE[case.q.dtype], "atol": 4 * TOLERANCE[case.q.dtype]}
    torch.testing.assert_close(lse[there].double(), right_lse[there], **close)


SPANS = [(37, 4), (3, 2), (70, 3)]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 1), (6, 2)])
def test_dtypes(route: str, kv_dtype: torch.dtype, heads: int, kv_heads: int, seed: int) -> None:
    dtype = torch.float32 if kv_dtype == torch.uint8 else kv_dtype
    options = {"heads": heads, "kv_heads": kv_heads, "dim": 64, "dtype": dtype, "kv_dtype": kv_dtype}
    check(route, make_case(seed, SPANS, padding=True, **options))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_e4m3_under_16_bit_queries(route: str, dtype: torch.dtype, seed: int) -> None:
    check(route, make_case(seed, SPANS, heads=4, kv_heads=2, dim=64, dtype=dtype, kv_dtype=torch.uint8))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("page_tokens", "layout"), [(4, "ours"), (20, "tokens"), (784, "separate"), (16, "odd")])
def test_pages_and_layouts(route: str, page_tokens: int, layout: str, seed: int) -> None:
    case = make_case(seed, SPANS, page_tokens=page_tokens, layout=layout, heads=3, kv_dtype=torch.uint8, byte=0xFF)
    check(route, case)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(24, 2, 256), (12, 1, 128), (3, 1, 96), (5, 5, 80), (32, 1, 72)]
)
def test_geometries(heads: int, kv_heads: int, dim: int, seed: int) -> None:
    case = make_case(seed, [(50, 2)], heads=heads, kv_heads=kv_heads, dim=dim)
    check("generic", case, splits=4)
    if heads // kv_heads * 8 * dim <= triton_attend.PLAIN_ELEMENTS:
        check("grouped", case)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_splits_windows_and_gates(route: str, splits: int, seed: int, generator: torch.Generator) -> None:
    case = make_case(seed, [(200, 4), (9, 1)], heads=6, dim=64, top_k=40)
    gate = torch.randn(5, 6, 128, generator=generator)[..., 64:]
    check(route, case, splits=splits, gate=gate, group_rows=4)


@pytest.mark.parametrize("route", ROUTES)
def test_invalid_ids_are_ignored(route: str, seed: int) -> None:
    case = make_case(seed, [(41, 3)], heads=2, dim=64)
    case.selection.block_ids[:, -3:] = torch.tensor([-7, 1000, 3], dtype=torch.int32)
    case.selection.block_ids[1, 0] = case.selection.block_ids[1, 1]
    check(route, case)


# ------------------------------------------------------------------------------------------------------------------ B08


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("repoint", [True, False])
def test_b08_a_byte_that_no_row_attends_to_changes_nothing(route: str, repoint: bool, seed: int) -> None:
    outs = []
    for byte in (0x00, 0x38, 0x7F, 0xFF):
        options = {"heads": 4, "dim": 64, "kv_dtype": torch.uint8, "padding": True, "byte": byte}
        outs.append(run(route, make_case(seed, [(37, 5), (2, 1)], **options), repoint=repoint))
    for out, lse in outs:
        assert not out.isnan().any()
        assert torch.equal(out, outs[0][0]) and torch.equal(lse, outs[0][1])


@pytest.mark.parametrize("route", ROUTES)
def test_b08_without_the_kernels_defence_the_null_page_leaks(route: str, seed: int) -> None:
    """What the defence is for: with zeroing off and padding on page 0, a NaN of the null page reaches every head."""
    case = make_case(seed, [(37, 5)], heads=4, dim=64, kv_dtype=torch.uint8, byte=0x7F)
    assert bool(run(route, case, repoint=False, zero=False)[0].isnan().any())


# ------------------------------------------------------------------------------------------------------------------ B11


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_b11_each_scale_is_applied_once(splits: int) -> None:
    k = torch.zeros(2, 4, 1, 16, dtype=torch.uint8)
    v = torch.zeros(2, 4, 1, 16, dtype=torch.uint8)
    k[1, :2, 0, 0] = torch.tensor([0x40, 0xC0], dtype=torch.uint8)  # 2 and -2 at scale 0.5
    v[1, :2, 0, 0] = torch.tensor([0x40, 0x00], dtype=torch.uint8)  # 2 and 0 at scale 2
    q = torch.zeros(1, 1, 16)
    q[0, 0, 0] = math.log(9) / 2
    out, size = torch.full_like(q, math.nan), triton_attend.workspace_bytes(1, 1, 16, splits)
    workspace = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    table, lengths = torch.tensor([[1, 0, 0]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    scales = (torch.tensor(0.5, device=DEVICE), torch.tensor(2.0, device=DEVICE))
    result = out.to(DEVICE)
    operands = [x.to(DEVICE) for x in (q, k, v, table, lengths)]
    triton_attend.attend_generic(*operands, 1.0, scales, result, workspace, splits=splits)
    assert abs(float(result[0, 0, 0]) - 3.6) < 1e-6
    assert not result[0, 0, 1:].any()


@jit
def _decode(byte, bits, cast, NATIVE: tl.constexpr):
    at = tl.arange(0, 256)
    code = tl.load(byte + at)
    tl.store(bits + at, triton_attend_bits(code))
    if NATIVE:
        tl.store(cast + at, code.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32))


triton_attend_bits = triton_attend.e4m3_bits


def test_all_256_bytes_are_decoded_exactly() -> None:
    byte = torch.arange(256).to(torch.uint8).to(DEVICE)
    native = ON_GPU and torch.cuda.get_device_capability() >= (8, 9)
    bits, cast = torch.empty(256, device=DEVICE), torch.empty(256, device=DEVICE)
    _decode[(1,)](byte, bits, cast, native)
    for found in [bits, cast] if native else [bits]:
        torch.testing.assert_close(found.cpu().double(), E4M3_TABLE, rtol=0, atol=0, equal_nan=True)
        assert math.copysign(1.0, float(found[0x80])) == -1.0


def test_splits_are_a_power_of_two_that_fills_the_device() -> None:
    assert [triton_attend.num_splits(n, 2052) for n in (1, 2, 100, 528, 5000)] == [16, 16, 4, 1, 1]
    assert triton_attend.num_splits(1, 64) == 1 and triton_attend.num_splits(1, 300) == 2


def test_refusals_are_pure() -> None:
    served = {"dtype": "bfloat16", "kv_dtype": "uint8", "heads_per_kv": 12, "dim": 256, "page_tokens": 16}
    assert triton_attend.refusal("cuda", (9, 0), **served) is None
    assert triton_attend.refusal("cuda", (9, 0), **served, group_rows=8) is None
    assert "7.5" in str(triton_attend.refusal("cuda", (7, 0), **served))
    assert "8.0" in str(triton_attend.refusal("cuda", (7, 5), **served))
    assert "8 to 256" in str(triton_attend.refusal("cuda", (9, 0), **{**served, "dim": 512}))
    assert "128 queries" in str(triton_attend.refusal("cuda", (9, 0), **{**served, "heads_per_kv": 20}, group_rows=8))
    assert "over float16" in str(triton_attend.refusal("cuda", (9, 0), **{**served, "kv_dtype": "float16"}))
    odd = {**served, "dtype": "float32"}
    assert "without tensor cores" in str(triton_attend.refusal("cuda", (9, 0), **odd, group_rows=8))
    assert triton_attend.refusal("cuda", (7, 5), **{**served, "dtype": "float16"}) is None
    expected = None if triton_env.interpreted() else "interpreter"
    found = triton_attend.refusal("cpu", None, **served)
    assert found is None if expected is None else expected in str(found)


@pytest.mark.skipif(not ON_GPU, reason="a CUDA graph")
@pytest.mark.parametrize("route", ROUTES)
def test_a_replay_equals_eager_bit_for_bit(route: str, seed: int) -> None:
    """Other contents, lengths and tables than the captured ones; a second replay repeats the bits."""
    options: dict[str, Any] = {"heads": 6, "dim": 128, "dtype": torch.bfloat16, "kv_dtype": torch.uint8}
    spans = [[(37, 4), (200, 4)], [(90, 4), (7, 4)]]
    cases = [make_case(seed + i, span, **options) for i, span in enumerate(spans)]
    eager = [run(route, case)[0] for case in cases]
    assert all(torch.equal(run(route, case)[0], out) for case, out in zip(cases, eager, strict=True))
    assert not torch.equal(eager[0], eager[1])
    graph, inputs, out = captured(route, cases)
    for i in (1, 0, 1):
        for static, new in inputs(i):
            static.copy_(new)
        graph.replay()
        assert torch.equal(out.cpu(), eager[i])


def captured(route: str, cases: list[Case]) -> tuple[Any, Any, torch.Tensor]:
    """A graph of `route` over static operands, what each case puts into them, and its output."""

    def operands(case: Case) -> list[torch.Tensor]:
        rows, cache = case.rows, case.layer_kv
        places = (rows.positions, rows.request_of_row, rows.block_table, cache.page_tokens)
        kv = [cache.k.contiguous(), cache.v.contiguous()]
        if route == "generic":
            plan = reference.plan_rows(case.selection.block_ids, *places, True)
            return [case.q, *kv, plan.table.int(), plan.lengths.int()]
        joined = reference.plan_grouped(case.selection.block_ids, *places, case.q.shape[1], 8, True)
        starts = joined.starts.int()
        return [case.q, *kv, joined.rows.int(), starts[:-1], starts[1:], joined.blocks.int(), joined.masks]

    each = [operands(case) for case in cases]
    statics = []
    for mine in zip(*each, strict=True):
        room = [max(x.shape[axis] for x in mine) for axis in range(mine[0].ndim)]
        statics.append(torch.zeros(room, dtype=mine[0].dtype, device=DEVICE))
    q, scales = statics[0], tuple(s.tensor(DEVICE) for s in (cases[0].layer_kv.k_scale, cases[0].layer_kv.v_scale))
    out = torch.empty_like(q)
    workspace = torch.empty(triton_attend.workspace_bytes(*q.shape, 2), dtype=torch.uint8, device=DEVICE)
    attend = triton_attend.attend_generic if route == "generic" else triton_attend.attend_grouped

    def call() -> None:
        attend(*statics, q.shape[2] ** -0.5, scales, out, workspace, splits=2)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        call()

    def inputs(i: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(static[tuple(slice(n) for n in x.shape)], x) for static, x in zip(statics, each[i], strict=True)]

    return graph, inputs, out

"""The Volta kernels: machine code without spills, and their numbers, emulated lane by lane or as PTX on a newer GPU."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tests.attention_cases import E4M3, Case, make_case, selection_of
from tests.kernels import cuda_emulator
from tests.kernels.sm70_cases import Result, check, run

from page4.cache.storage import LayerKV
from page4.codec import Scale, encode
from page4.errors import KernelError
from page4.kernels import cuda, cuda_build, nvrtc, sm70

GEOMETRIES = [(24, 2, 256), (12, 1, 256), (6, 1, 256), (3, 1, 256)]
OTHER_GEOMETRIES = [(12, 1, 128), (6, 1, 64), (3, 1, 128), (4, 4, 64), (40, 2, 64), (31, 1, 64)]
ROUTES = ("xqa", "grouped")
KV_DTYPES = (torch.float16, torch.uint8)
SPANS = [(0, 1), (37, 3), (3, 5), (30, 9)]

_no_gpu = cuda.refusal() or nvrtc.refusal("compute_70")
GPU = pytest.param("gpu", marks=pytest.mark.skipif(_no_gpu is not None, reason=str(_no_gpu)))
EMULATED = pytest.param(
    "emulated", marks=pytest.mark.skipif(cuda_emulator.COMPILER is None, reason="no g++ to emulate with")
)
needs_compiler = pytest.mark.skipif(nvrtc.refusal("sm_70") is not None, reason=str(nvrtc.refusal("sm_70")))


@pytest.fixture(params=[EMULATED, GPU])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the kernels run."""
    if request.param == "gpu":
        return torch.device("cuda", 0)
    cuda_emulator.install(monkeypatch)
    return torch.device("cpu")


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ---------------------------------------------------------------------------------------------------------- the builds


@needs_compiler
def test_every_specialisation_is_machine_code_without_spills() -> None:
    for dim, e4m3, grouped, tiles in itertools.product(sm70.HEAD_DIMS, (False, True), (False, True), (1, 2)):
        variant = sm70.Variant(dim, e4m3, grouped, tiles)
        built = cuda_build.compile(sm70.SOURCE, arch="sm_70", defines=variant.defines)
        used = built.resources["page4_sm70_attend"]
        assert built.image.startswith(b"\x7fELF")
        assert used.stack_bytes == used.spill_store_bytes == used.spill_load_bytes == 0, (variant, used)
        assert sm70.WARPS * 32 * used.registers <= 65536
        assert used.shared_bytes + sm70.WARPS * variant.warp_bytes <= 96 << 10


@needs_compiler
def test_the_other_kernels_have_no_spills() -> None:
    for dim, half in itertools.product(sm70.HEAD_DIMS, (0, 1)):
        built = cuda_build.compile(sm70.MERGE_SOURCE, arch="sm_70", defines={"HEAD_DIM": dim, "HALF_PARTS": half})
        assert built.resources["page4_sm70_merge"].stack_bytes == 0
    built = cuda_build.compile("e4m3_check.cu", arch="sm_70")
    assert all(used.stack_bytes == 0 for used in built.resources.values())


def test_the_variants_that_a_geometry_reaches() -> None:
    found = sm70.variants(256, 12, e4m3=True)
    assert {(v.grouped, v.m_tiles) for v in found} == {(False, 2), (True, 2)}
    found = sm70.variants(256, 3, e4m3=False)
    assert {(v.grouped, v.m_tiles) for v in found} == {(False, 1), (True, 1), (True, 2)}
    assert all(v.zero_unattended for v in found)


def test_splits_depend_on_nothing_beside_a_row() -> None:
    assert sm70.split_steps_of((4, 4, 1)) == sm70.split_steps_of((4,)) == sm70.WINDOW_SPLIT_STEPS
    assert sm70.split_steps_of((2048,)) is sm70.split_steps_of(None) is None


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "changed,words",
    [
        ({"capability": (6, 1)}, "compute capability 6.1 has no matrix instruction"),
        ({"dtype": "bfloat16"}, "queries of bfloat16: Volta multiplies float16 only"),
        ({"dtype": "float32"}, "queries of float32"),
        ({"kv_dtype": "bfloat16"}, "K/V of bfloat16"),
        ({"head_dim": 80}, "head dim 80 is none of 64, 128, 256"),
        ({"page_tokens": 18}, "18 tokens is not a whole number"),
        ({"heads_per_kv": 0}, "not a multiple of KV heads"),
        ({"heads_per_kv": 63}, "8 rows of 63 query heads a KV head are more than 31 tiles"),
    ],
)
def test_what_is_refused(changed: dict[str, object], words: str) -> None:
    served = {"dtype": "float16", "kv_dtype": "uint8", "head_dim": 256, "heads_per_kv": 12}
    assert sm70.refusal(**served) == nvrtc.refusal("sm_70")  # type: ignore[arg-type]  # mixed types of the table
    reason = sm70.refusal(**{**served, **changed})  # type: ignore[arg-type]
    assert reason is not None and words in reason


def test_a_machine_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_load", lambda major: None)
    reason = sm70.refusal(dtype="float16", kv_dtype="float16", head_dim=128, heads_per_kv=6)
    assert reason is not None and "nvidia-cuda-nvrtc-cu12" in reason


def test_layouts_that_16_byte_loads_cannot_read_are_refused() -> None:
    q = torch.zeros(2, 12, 64, dtype=torch.float16)
    kv = torch.zeros(4, 16, 1, 72, dtype=torch.uint8)
    assert sm70.layout_refusal(q, kv[..., :64], kv[..., :64]) == "rows of K are not aligned to 16 bytes"
    kv = torch.zeros(4, 16, 1, 128, dtype=torch.uint8)
    assert sm70.layout_refusal(q, kv[..., :64], kv[..., 64:]) is None
    assert sm70.layout_refusal(q, kv[..., :64], kv[..., 8:72]) == "rows of V are not aligned to 16 bytes"
    assert sm70.layout_refusal(q, kv[..., :64], kv[..., ::2]) == "V is not contiguous in its last axis"
    odd = torch.zeros(2, 12, 65, dtype=torch.float16)[..., 1:]
    assert sm70.layout_refusal(q, kv[..., :64], kv[..., 64:], odd) == "rows of gate are not aligned to 4 bytes"


def test_a_build_of_another_version_is_refused() -> None:
    variant = sm70.Variant(256, True, True, 2)
    sm70.check_build(list(variant.facts), variant)
    for place in range(8):
        facts = list(variant.facts)
        facts[place] += 1
        with pytest.raises(KernelError, match=r"page4_sm70_abi: expected .*empty page4's cache folder"):
            sm70.check_build(facts, variant)


def test_a_build_says_what_it_is(device: torch.device) -> None:
    arch = sm70.arch_of(cuda.capability())
    for variant in (sm70.Variant(64, True, False, 1), sm70.Variant(64, False, True, 2, zero_unattended=False)):
        assert sm70._facts_of(arch, variant) == variant.facts


# --------------------------------------------------------------------------------------------------------------- codec


def test_every_byte_is_decoded_as_everywhere(device: torch.device) -> None:
    """To fp16, where all 254 numbers are exact, and as value / 256."""
    decode = cuda.function("e4m3_check.cu", "page4_e4m3_decode", arch=sm70.arch_of(cuda.capability()))
    # Every byte in every place of a word.
    data = torch.stack([torch.arange(256).roll(shift) for shift in (0, 3, 50, 129)], 1).to(torch.uint8).to(device)
    exact, raw = (torch.zeros(256, 4, dtype=torch.float16, device=device) for _ in range(2))
    cuda.launch(decode, (2, 1, 1), (128, 1, 1), (data, exact, raw, 256))
    want = torch.tensor(E4M3, dtype=torch.float64)[data.cpu().long()]
    for found in (exact.cpu().double(), raw.cpu().double() * 256):
        assert torch.equal(found.isnan(), want.isnan())
        assert torch.equal(found.nan_to_num(), want.nan_to_num())
        assert torch.equal(found.signbit() & ~found.isnan(), want.signbit() & ~want.isnan())


def test_encoding_rounds_as_the_codec_does(device: torch.device) -> None:
    values = torch.tensor([value for value in E4M3 if math.isfinite(value)], dtype=torch.float32)
    between = (values.unsqueeze(1) + values.sort().values).flatten() / 2  # halfway values among them
    near = torch.cat((between.nextafter(torch.tensor(math.inf)), between.nextafter(torch.tensor(-math.inf))))
    special = torch.tensor([0.0, -0.0, 448.0, 449.0, 464.0, 1e30, math.inf, -math.inf, 1e-45, 2.0**-10, 2.0**-126])
    x = torch.cat((values, between, near, special, torch.randn(4096) * 30))
    encoder = cuda.function("e4m3_check.cu", "page4_e4m3_encode", arch=sm70.arch_of(cuda.capability()))
    found = torch.zeros(x.numel(), dtype=torch.uint8, device=device)
    cuda.launch(encoder, (-(-x.numel() // 128), 1, 1), (128, 1, 1), (x.to(device), found, x.numel()))
    assert torch.equal(found.cpu(), encode(x, Scale(1.0)))
    nan = torch.zeros(1, dtype=torch.uint8, device=device)
    cuda.launch(encoder, (1, 1, 1), (128, 1, 1), (torch.tensor([math.nan], device=device), nan, 1))
    assert int(nan) & 0x7F == 0x7F


# ------------------------------------------------------------------------------------------------------------- numbers


def step(seed: int, device: torch.device, heads: int, kv_heads: int, dim: int, **more: object) -> Case:
    """A small step for the emulator, a larger one for a GPU."""
    large = device.type == "cuda"
    shape = {
        "heads": heads, "kv_heads": kv_heads, "dim": dim, "dtype": torch.float16, "kv_dtype": torch.float16,
        "spans": [(0, 1), (2300, 3), (3, 5), (700, 17)] if large else SPANS,
        "top_k": 512 if large else 6, "padding": seed % 2 == 0, **more,
    }  # fmt: skip
    spans = shape.pop("spans")
    return make_case(seed, spans, **shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_production_geometries(
    device: torch.device, route: str, seed: int, geometry: tuple[int, int, int], kv_dtype: torch.dtype
) -> None:
    spans = {"spans": [(0, 1), (37, 2), (19, 9)]} if device.type == "cpu" else {}
    case = step(seed, device, *geometry, kv_dtype=kv_dtype, **spans)
    gate = torch.randn(case.q.shape).half() * 3
    check(case, run(case, route, device, gate=gate), gate)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("geometry", OTHER_GEOMETRIES, ids=str)
def test_other_geometries(
    device: torch.device, route: str, seed: int, geometry: tuple[int, int, int], kv_dtype: torch.dtype
) -> None:
    """40/2 has 20 query heads a KV head, more than a tile; 31 leaves the last one odd."""
    case = step(seed, device, *geometry, kv_dtype=kv_dtype)
    check(case, run(case, route, device))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("split_steps", [1, 2, 3])
def test_splits_of_every_size(
    device: torch.device, route: str, seed: int, split_steps: int, kv_dtype: torch.dtype
) -> None:
    """Some splits of a row are empty, some rows have nothing in any."""
    case = step(seed, device, 6, 2, 64, kv_dtype=kv_dtype, top_k=40, spans=[(200, 9), (1, 2), (150, 1)])
    gate = torch.randn(case.q.shape).half()
    check(case, run(case, route, device, split_steps=split_steps, gate=gate), gate)
    check(case, run(case, route, device, split_steps=split_steps))


def test_splits_of_more_tiles_than_a_block_has(device: torch.device, route: str, seed: int) -> None:
    """31 query heads of 8 rows: two blocks of eight warps for each split."""
    case = step(seed, device, 31, 1, 64, kv_dtype=torch.uint8, spans=[(50, 9)], top_k=12)
    check(case, run(case, route, device, split_steps=1))


def test_more_rows_than_one_launch_takes(device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = step(seed, device, 6, 1, 64, kv_dtype=torch.uint8, spans=SPANS, top_k=6)
    gate = torch.randn(case.q.shape).half()
    whole = run(case, "xqa", device, split_steps=1, gate=gate)
    monkeypatch.setattr(sm70, "XQA_ROWS", 4)
    found = run(case, "xqa", device, split_steps=1, gate=gate)
    check(case, found, gate)
    assert same(found, whole)


def test_the_log_sum_is_written_on_request_only(device: torch.device, route: str, seed: int) -> None:
    case = step(seed, device, 6, 1, 64, kv_dtype=torch.uint8, spans=SPANS, top_k=6)
    for split_steps in (None, 1):
        found = run(case, route, device, split_steps=split_steps, want_lse=False)
        assert torch.equal(found.out, run(case, route, device, split_steps=split_steps).out)


@pytest.mark.parametrize("group_rows", [1, 2, 4, 7])
def test_groups_of_fewer_rows(device: torch.device, seed: int, group_rows: int) -> None:
    for heads in (3, 12):
        case = step(seed, device, heads, 1, 64, kv_dtype=torch.uint8)
        check(case, run(case, "grouped", device, group_rows=group_rows))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["ours", "tokens", "separate"])
@pytest.mark.parametrize("page_tokens", [4, 16, 784, 804])
def test_layouts_and_page_sizes(
    device: torch.device, route: str, seed: int, layout: str, page_tokens: int, kv_dtype: torch.dtype
) -> None:
    shape = {"kv_dtype": kv_dtype, "layout": layout, "page_tokens": page_tokens, "spans": [(801, 3), (2, 2)]}
    case = step(seed, device, 6, 2, 64, **shape)
    check(case, run(case, route, device))


def test_values_at_the_end_of_the_range(device: torch.device, route: str, seed: int) -> None:
    """448 * scale: sums of products that fp16 could not hold."""
    case = step(seed, device, 12, 1, 64, kv_dtype=torch.uint8, magnitude=20.0)
    check(case, run(case, route, device))


def test_rows_that_attend_to_nothing(device: torch.device, route: str, seed: int) -> None:
    """Positions 7 and 11 complete a block: without ids they attend to nothing, beside rows that do."""
    case = step(seed, device, 6, 1, 64, kv_dtype=torch.uint8, spans=[(4, 8)], padding=True)
    case.selection = selection_of([[], [0], [], [1], [], [0, 1], [], [], []], 2)
    for split_steps in (None, 1):
        found = run(case, route, device, split_steps=split_steps)
        check(case, found)
        assert [bool(row.any()) for row in found.out] == [False, True, True, True, False, True, True, True, False]


def test_padding_rows_alone(device: torch.device, route: str, seed: int) -> None:
    case = step(seed, device, 6, 1, 64, spans=[(4, 3)], padding=False)
    case.rows = type(case.rows)(torch.full((3,), -1), torch.zeros(3, dtype=torch.int64), case.rows.block_table)
    found = run(case, route, device)
    assert not found.out.any() and (found.lse == -math.inf).all()


def test_invalid_and_repeated_ids_change_nothing(device: torch.device, route: str, seed: int) -> None:
    case = step(seed, device, 6, 1, 64, host=False, spans=SPANS, top_k=6)
    clean = run(case, route, device)
    complete = [(p + 1) // 4 for p in case.rows.positions.tolist()]
    ids = case.selection.block_ids.tolist()
    dirty = [[-5, b, b + 9, 1 << 30, *row, *row[::-1], -1] for row, b in zip(ids, complete, strict=True)]
    case.selection = selection_of(dirty, max(map(len, dirty)))
    found = run(case, route, device)
    check(case, found)
    assert torch.equal(found.out, clean.out) and torch.equal(found.lse, clean.lse)


def same(left: Result, right: Result) -> bool:
    return torch.equal(left.out, right.out) and torch.equal(left.lse, right.lse)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
def test_no_unattended_byte_changes_a_bit(device: torch.device, route: str, seed: int, kv_dtype: torch.dtype) -> None:
    """Null page, foreign pages and unwritten tokens of the tail block: zeros, NaN, huge numbers."""
    found = []
    for byte in (0x00, 0x7F, 0xFF, 0x7E, 0x80):
        case = step(seed, device, 6, 1, 64, kv_dtype=kv_dtype, byte=byte, padding=True, spans=SPANS, top_k=6)
        found.append(run(case, route, device, split_steps=2 if byte == 0xFF else None))
    assert all(same(found[0], other) for other in (found[1], found[3], found[4]))
    assert all(result.out.isfinite().all() for result in found)


def test_repeated_runs_and_other_rows_change_no_bit(device: torch.device, seed: int) -> None:
    """A row of xqa alone, and among others."""
    case = step(
        seed, device, 6, 1, 64, kv_dtype=torch.uint8, spans=[(90, 1), (77, 1), (300, 1)], top_k=80, padding=False
    )
    whole, again = run(case, "xqa", device), run(case, "xqa", device)
    assert same(whole, again)
    keep = torch.tensor([2])
    rows = type(case.rows)(case.rows.positions[keep], case.rows.request_of_row[keep], case.rows.block_table)
    alone = Case(case.q[keep], case.layer_kv, case.selection.take(keep), rows, case.k, case.v)
    assert same(run(alone, "xqa", device), Result(whole.out[keep], whole.lse[keep]))


def test_the_places_of_pages_change_no_bit(device: torch.device, route: str, seed: int) -> None:
    case = step(seed, device, 6, 1, 64, kv_dtype=torch.uint8, layout="separate", spans=SPANS, top_k=6)
    first = run(case, route, device)
    k, v, table = case.layer_kv.k, case.layer_kv.v, case.rows.block_table
    to = torch.cat((torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(k.shape[0] - 1)))
    new_k, new_v = torch.empty_like(k), torch.empty_like(v)
    new_k[to], new_v[to] = k, v
    case.layer_kv = LayerKV(new_k, new_v, case.layer_kv.k_scale, case.layer_kv.v_scale)
    rows = case.rows
    case.rows = type(rows)(rows.positions, rows.request_of_row, to[table.long()].int())
    assert same(run(case, route, device), first)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
def test_qsa_grouped_page4_null_block_padding_no_nan(device: torch.device, seed: int, kv_dtype: torch.dtype) -> None:
    """A null page of NaN bytes: either defence keeps it out, none lets it into every head.

    Positions that complete a block, so that no tail block has unwritten tokens, which only the zeroing covers.
    """
    case = step(seed, device, 12, 1, 64, kv_dtype=kv_dtype, byte=0x7F, spans=[(43, 1)], top_k=5, padding=False)
    for repoint, zero in ((True, True), (True, False), (False, True)):
        found = run(case, "grouped", device, repoint=repoint, zero=zero)
        check(case, found)
    assert run(case, "grouped", device, repoint=False, zero=False).out.isnan().all()


def test_an_attended_nan_is_not_hidden(device: torch.device, route: str, seed: int) -> None:
    """Only in its own KV head."""
    case = step(seed, device, 6, 2, 64, kv_dtype=torch.uint8, spans=[(20, 1)], padding=False, top_k=9)
    page = case.rows.block_table[0, 0].long()
    case.layer_kv.v[page, 1, 0, :] = 0x7F
    out = run(case, route, device).out
    assert out[0, :3].isnan().all() and out[0, 3:].isfinite().all()


def test_offsets_beyond_2_gib(device: torch.device, route: str, seed: int) -> None:
    """The last pages of a pool of 2^31 bytes and more; only those that are written take memory on a CPU."""
    case = step(seed, device, 3, 1, 64, kv_dtype=torch.uint8, layout="tokens", spans=[(37, 2)], padding=False)
    k, v = case.layer_kv.k, case.layer_kv.v
    page_bytes = k.stride(0)
    shift = (1 << 31) // page_bytes + 5
    pool = torch.empty((shift + k.shape[0]) * page_bytes, dtype=torch.uint8, device=device)
    pool[shift * page_bytes :].fill_(0x7F)
    views = [pool.as_strided((shift + k.shape[0], *k.shape[1:]), k.stride(), at) for at in (0, k.shape[3])]
    for view, source in zip(views, (k, v), strict=True):
        view[shift:] = source.to(device)
    rows = case.rows
    table = torch.where(rows.block_table > 0, rows.block_table + shift, 0).int()
    case.rows = type(rows)(rows.positions, rows.request_of_row, table)
    case.layer_kv = LayerKV(*views, case.layer_kv.k_scale, case.layer_kv.v_scale)
    check(case, run(case, route, device))


@needs_compiler
@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
def test_nothing_is_loaded_after_warm_up(
    device: torch.device, seed: int, kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the rows of a group and the splits."""
    asked: list[tuple[object, ...]] = []
    load = cuda.function

    def recorded(source: str, name: str, *, arch: str, defines: dict[str, str | int]) -> object:
        asked.append((source, name, arch, *sorted(defines.items())))
        return load(source, name, arch=arch, defines=defines)

    monkeypatch.setattr(cuda, "function", recorded)
    for cache in (sm70._attend_on, sm70._merge_on):
        cache.cache_clear()
    sm70.warm(64, 3, e4m3=kv_dtype == torch.uint8)
    warmed = set(asked)
    assert len(warmed) == 2 * 3 + 1, "three variants, each with its query, and the merge"
    case = step(seed, device, 6, 2, 64, kv_dtype=kv_dtype, spans=[(50, 9)], top_k=12)
    compiled = sum(cuda_build.compile_counts.values())
    for split_steps in (None, 1):
        run(case, "xqa", device, split_steps=split_steps)
        for group_rows in range(1, 9):
            run(case, "grouped", device, group_rows=group_rows, split_steps=split_steps)
    assert set(asked) == warmed and len(asked) == len(warmed)
    assert sum(cuda_build.compile_counts.values()) == compiled


@pytest.mark.parametrize("device", [GPU], indirect=True)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 256])
def test_small_shapes_for_the_sanitizer(
    device: torch.device, route: str, seed: int, dim: int, kv_dtype: torch.dtype
) -> None:
    """compute-sanitizer --tool memcheck (or racecheck) python -m pytest tests/kernels/test_sm70.py -k sanitizer."""
    for heads, split_steps in ((12, None), (3, 1)):
        case = step(seed, device, heads, 1, dim, kv_dtype=kv_dtype, spans=[(37, 3), (0, 1)], top_k=9)
        gate = torch.randn(case.q.shape).half()
        check(case, run(case, route, device, split_steps=split_steps, gate=gate), gate)


@pytest.mark.parametrize("device", [GPU], indirect=True)
def test_a_captured_step_replays_as_it_ran(device: torch.device, route: str, seed: int) -> None:
    """Also when its workspace is first needed inside the capture."""
    case = step(seed, device, 6, 1, 128, kv_dtype=torch.uint8, spans=[(900, 3), (700, 2)], padding=False)
    want = run(case, route, device, split_steps=7)
    kv, stream = case.layer_kv, torch.cuda.Stream()
    q = case.q.to(device)
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:2], device=device)
    from tests.kernels import sm70_cases as cases

    options = {
        "softmax_scale": 128**-0.5, "out": out, "lse": lse, "split_steps": 7,
        "k_scale": kv.k_scale.tensor(device), "v_scale": kv.v_scale.tensor(device),
    }  # fmt: skip
    k, v = cases.moved(kv.k, device), cases.moved(kv.v, device)
    if route == "grouped":
        plan = cases.on_device(cases.plan_grouped(case.selection, case.rows, kv.page_tokens, 6), device)
    else:
        rows = cases.plan_rows(case.selection, case.rows, kv.page_tokens)
        table, lengths = rows.table.int().to(device), rows.lengths.int().to(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        if route == "grouped":
            sm70.attend_grouped(q, k, v, plan, **options)
        else:
            sm70.attend_rows(q, k, v, table, lengths, page_tokens=kv.page_tokens, **options)
    graph.replay()
    torch.cuda.synchronize()
    assert same(Result(out.cpu(), lse.cpu()), want)
    out.fill_(5.0)
    q.copy_(case.q.flip(0))
    graph.replay()
    case.q = case.q.flip(0)
    assert same(Result(out.cpu(), lse.cpu()), run(case, route, device, split_steps=7))

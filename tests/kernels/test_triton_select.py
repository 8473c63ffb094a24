"""Selections of the GPU kernels against Python's sort and float64 scores; the same file on a GPU and interpreted."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from page4.kernels import cuda_select, triton_select

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"
TOPS: dict[str, Callable[..., None]] = {"triton": triton_select.top_blocks}
if ON_GPU and cuda_select.refusal(torch.cuda.get_device_capability()) is None:
    TOPS["cuda"] = cuda_select.top_blocks


@pytest.fixture(params=list(TOPS))
def top(request: pytest.FixtureRequest) -> Callable[..., None]:
    return TOPS[request.param]


def best(scores: list[float], visible: int, top_k: int) -> list[int]:
    """Score descending, then id ascending; Python compares -0.0 and 0.0 as equal and sorts stably."""
    return sorted(sorted(range(visible), key=lambda block: -scores[block])[:top_k])


def chosen(top: Callable[..., None], scores: torch.Tensor, visible: list[int], top_k: int) -> list[list[int] | None]:
    """The ids of each row, None for a row that was called bad."""
    positions = torch.tensor([4 * count - 1 for count in visible], device=DEVICE)
    rows, columns = scores.shape
    padded = torch.full((rows, triton_select.num_columns(columns)), math.nan, device=DEVICE)
    padded[:, :columns] = scores.to(DEVICE)
    ids = torch.full((rows, top_k), 77, dtype=torch.int32, device=DEVICE)
    counts = torch.full((rows,), 77, dtype=torch.int32, device=DEVICE)
    bad = torch.full((rows,), 77, dtype=torch.uint8, device=DEVICE)
    top(padded, positions, top_k, ids, counts, bad)
    out: list[list[int] | None] = []
    for row, (found, count, wrong) in enumerate(zip(ids.tolist(), counts.tolist(), bad.tolist(), strict=True)):
        assert wrong in (0, 1) and all(block == -1 for block in found[count:]), row
        assert count == (0 if wrong else min(visible[row], top_k))
        out.append(None if wrong else found[:count])
    return out


def alternating() -> torch.Tensor:
    scores = torch.zeros(600)
    scores[::2] = 1.0
    return scores


def test_b01_ties_at_the_cutoff_take_the_lowest_ids(top: Callable[..., None], rng: random.Random) -> None:
    rows = [torch.zeros(600), alternating(), alternating()]
    rows[2][rng.sample(range(1, 600, 2), 150)] = -0.0
    right = [list(range(512)), *[sorted([*range(0, 600, 2), *range(1, 424, 2)])] * 2]
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        found = chosen(top, torch.stack(rows)[order], [600] * 3, 512)
        assert found == [right[i] for i in order]


def test_b01_a_nan_names_its_row_and_no_other(top: Callable[..., None]) -> None:
    scores = torch.zeros(4, 600)
    scores[2, 599] = math.nan
    assert chosen(top, scores, [600, 600, 600, 600], 512) == [[*range(512)], [*range(512)], None, [*range(512)]]
    assert chosen(top, scores, [600, 600, 599, 3], 512)[2:] == [[*range(512)], [0, 1, 2]]


def distributions(count: int, rng: random.Random) -> list[list[float]]:
    """Scores of all kinds: spread, tied, extreme, close together, negative, infinite, subnormal."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    normal = torch.randn(count, generator=generator)
    close = (normal.abs().view(torch.int32) % 700 + 0x3F800000).view(torch.float32)
    return [
        normal.relu().tolist(),
        normal.tolist(),
        (normal * 4).round().tolist(),
        close.tolist(),
        [rng.choice([0.0, -0.0, 1.0, 1.0000001]) for _ in range(count)],
        [rng.choice([0.0, math.inf, 3e38, 1.0, -math.inf, -3e38]) for _ in range(count)],
        (normal * 1e-42).tolist(),
        (normal.abs() * 1e-42 + 1e-40).tolist(),
        torch.exp(normal * 20).tolist(),
        [1e30 if rng.random() < 0.001 else rng.random() for _ in range(count)],
        [float(i) for i in range(count)],
        [float(-i) for i in range(count)],
        [7.5] * count,
    ]


@pytest.mark.parametrize(("count", "top_k"), [(90, 17), (700, 512), (1500, 512)])
def test_every_distribution_gives_the_total_order(
    top: Callable[..., None], count: int, top_k: int, rng: random.Random
) -> None:
    rows = [torch.tensor(row).tolist() for row in distributions(count, rng)]
    if not ON_GPU:
        rows = rows if count < 100 else rng.sample(rows, 2)
    visible = [rng.randint(count // 2, count) for _ in rows]
    visible[0] = count
    right = [best(row, seen, top_k) for row, seen in zip(rows, visible, strict=True)]
    assert chosen(top, torch.tensor(rows), visible, top_k) == right


@pytest.mark.skipif(not ON_GPU, reason="too long for the interpreter")
@pytest.mark.parametrize("count", [4096, 8192, 16384, 32768, 40000, 70000])
def test_long_rows(top: Callable[..., None], count: int, rng: random.Random) -> None:
    rows = [torch.tensor(row).tolist() for row in distributions(count, rng)]
    visible = [count] * len(rows)
    right = [best(row, count, 512) for row in rows]
    for _ in range(3):
        assert chosen(top, torch.tensor(rows), visible, 512) == right


# -------------------------------------------------------------------------------------------------------- whole selects


def make_step(
    rng: random.Random,
    spans: list[tuple[int, int]],
    heads: int,
    dim: int,
    page_tokens: int,
    dtype: torch.dtype,
    **odd: Any,
) -> dict[str, Any]:
    """Rows of (first position, count) a request over permuted pages; what no token owns is NaN, page 0 included.

    Values are small integers, so that every score is exact and ties are common.
    """
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    per_page, lengths = page_tokens // 4, [first + count for first, count in spans]
    needed = [-(-length // page_tokens) for length in lengths]
    pages = rng.sample(range(1, sum(needed) + 3), sum(needed))
    storage = torch.full((sum(needed) + 3, per_page * dim + 16), math.nan, dtype=dtype)
    pooled = storage[:, 8 : 8 + per_page * dim].view(-1, per_page, dim)
    table = torch.zeros(len(spans), max(needed) + 1, dtype=torch.int32)
    keys = []
    for request, length in enumerate(lengths):
        own = [pages.pop() for _ in range(needed[request])]
        table[request, : len(own)] = torch.tensor(own, dtype=torch.int32)
        keys.append(torch.randint(-2, 3, (length // 4, dim), generator=generator).to(dtype))
        for block in range(length // 4):
            pooled[table[request, block // per_page], block % per_page] = keys[-1][block]
    positions = [first + i for first, count in spans for i in range(count)]
    requests = [request for request, (_, count) in enumerate(spans) for _ in range(count)]
    if odd.get("padding"):
        for place in sorted(rng.sample(range(len(positions) + 1), 2)):
            positions.insert(place, -1)
            requests.insert(place, 0)
    if odd.get("shuffled"):
        order = rng.sample(range(len(positions)), len(positions))
        positions, requests = [positions[i] for i in order], [requests[i] for i in order]
    index_q = torch.randint(-2, 3, (len(positions), heads + 1, dim), generator=generator).to(dtype)[:, :heads]
    return {
        "index_q": index_q.to(DEVICE),
        "pooled": storage.to(DEVICE)[:, 8 : 8 + per_page * dim].unflatten(1, (per_page, dim)),
        "block_table": table.to(DEVICE),
        "requests": torch.tensor(requests, device=DEVICE),
        "positions": torch.tensor(positions, device=DEVICE),
        "keys": keys,
        "bound": max(lengths) // 4,
    }


def expected(step: dict[str, Any], top_k: int) -> list[list[int]]:
    """By float64: the sums are exact, and so are their ties."""
    right = []
    queries = step["index_q"].cpu().double()
    for q, position, request in zip(queries, step["positions"].tolist(), step["requests"].tolist(), strict=True):
        visible = (position + 1) // 4
        scores = (q @ step["keys"][request][:visible].double().T).relu().sum(0) if visible else torch.zeros(0)
        right.append(best(scores.tolist(), visible, top_k))
    return right


def run_step(step: dict[str, Any], top_k: int, top: Callable[..., None], window: int, **more: Any) -> list[list[int]]:
    operands = [step[name] for name in ("index_q", "pooled", "block_table", "requests", "positions")]
    size = triton_select.workspace_bytes(len(step["positions"]), step["bound"])
    workspace = torch.full((size,), 0x7F, dtype=torch.uint8, device=DEVICE)
    found = triton_select.select_blocks(*operands, top_k, step["bound"], workspace, window=window, top=top, **more)
    assert not found[2].any()
    return [ids[:count] for ids, count in zip(found[0].tolist(), found[1].tolist(), strict=True)]


@pytest.mark.parametrize("window", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_steps_of_several_requests(
    window: int, dtype: torch.dtype, top: Callable[..., None], rng: random.Random
) -> None:
    step = make_step(rng, [(200, 4), (3, 3), (97, 5)], 4, 32, 16, dtype, padding=True)
    assert run_step(step, 16, top, window) == expected(step, 16)


@pytest.mark.parametrize(("heads", "dim", "page_tokens"), [(1, 24, 4), (3, 16, 784), (2, 128, 12), (6, 16, 16)])
@pytest.mark.parametrize("window", [1, 64])
def test_geometries_and_rows_in_any_order(
    heads: int, dim: int, page_tokens: int, window: int, top: Callable[..., None], rng: random.Random
) -> None:
    step = make_step(rng, [(80, 6), (150, 2)], heads, dim, page_tokens, torch.float32, padding=True, shuffled=True)
    assert run_step(step, 9, top, window) == expected(step, 9)


def test_chunks_of_rows_change_nothing(
    top: Callable[..., None], monkeypatch: pytest.MonkeyPatch, rng: random.Random
) -> None:
    step = make_step(rng, [(90, 70)], 2, 16, 16, torch.float16)
    right = expected(step, 12)
    assert run_step(step, 12, top, 64) == right
    monkeypatch.setattr(triton_select, "WORKSPACE_BYTES", 1)
    assert triton_select.chunk_rows(70, step["bound"]) == 64
    assert run_step(step, 12, top, 64) == right


def test_nothing_is_scored_while_everything_is_selected(top: Callable[..., None], rng: random.Random) -> None:
    step = make_step(rng, [(50, 2)], 2, 16, 16, torch.float16)
    step["index_q"].fill_(math.nan)
    assert run_step(step, 16, top, 2) == [list(range(12)), list(range(13))]


@pytest.mark.parametrize("window", [1, 64])
def test_a_nan_in_a_query_or_key_names_its_rows(window: int, top: Callable[..., None], rng: random.Random) -> None:
    step = make_step(rng, [(70, 3), (90, 2)], 2, 16, 16, torch.float16)
    step["index_q"][1, 1, 3] = math.nan
    page = step["block_table"][1, 0]
    step["pooled"][page, 2, 5] = math.nan
    operands = [step[name] for name in ("index_q", "pooled", "block_table", "requests", "positions")]
    workspace = torch.zeros(triton_select.workspace_bytes(5, step["bound"]), dtype=torch.uint8, device=DEVICE)
    _, counts, bad = triton_select.select_blocks(*operands, 4, step["bound"], workspace, window=window, top=top)
    assert bad.tolist() == [0, 1, 0, 1, 1] and counts.tolist() == [4, 0, 4, 0, 0]


def test_refusals_are_pure() -> None:
    served = {"dtype": "bfloat16", "key_dtype": "bfloat16", "heads": 4, "dim": 128, "page_tokens": 16}
    assert triton_select.refusal("cuda", (9, 0), **served) is None
    assert "compute capability 7.5" in str(triton_select.refusal("cuda", (7, 0), **served))
    assert "8.0 or newer" in str(triton_select.refusal("cuda", (7, 5), **served))
    assert "not bfloat16 and float16" in str(
        triton_select.refusal("cuda", (9, 0), **{**served, "key_dtype": "float16"})
    )
    assert "1 to 16 index heads" in str(triton_select.refusal("cuda", (9, 0), **{**served, "heads": 17}))
    assert "4-token blocks" in str(triton_select.refusal("cuda", (9, 0), **{**served, "page_tokens": 6}))


def test_the_workspace_is_bounded() -> None:
    assert triton_select.workspace_bytes(1, 8192) == 4 * 8192
    assert triton_select.workspace_bytes(8192, 32768) <= triton_select.WORKSPACE_BYTES
    assert triton_select.workspace_bytes(8192, 8192) == triton_select.workspace_bytes(100_000, 8192)


@pytest.mark.skipif(not ON_GPU, reason="a CUDA graph")
def test_a_replay_equals_eager_for_other_contents(top: Callable[..., None], rng: random.Random) -> None:
    first = make_step(rng, [(300, 4), (500, 4)], 4, 128, 16, torch.bfloat16)
    second = make_step(rng, [(410, 4), (100, 4)], 4, 128, 16, torch.bfloat16)
    for window in (4, 64):
        pages = max(first["pooled"].shape[0], second["pooled"].shape[0])
        width = max(first["block_table"].shape[1], second["block_table"].shape[1])
        static = {**first, "bound": 128}
        static["pooled"] = torch.zeros(pages, *first["pooled"].shape[1:], dtype=torch.bfloat16, device=DEVICE)
        static["block_table"] = torch.zeros(2, width, dtype=torch.int32, device=DEVICE)
        static["index_q"], static["positions"] = first["index_q"].clone(), first["positions"].clone()
        operands = [static[name] for name in ("index_q", "pooled", "block_table", "requests", "positions")]
        workspace = torch.zeros(triton_select.workspace_bytes(8, 128), dtype=torch.uint8, device=DEVICE)
        out = triton_select.empty_selection(8, 64, torch.device(DEVICE))
        triton_select.select_blocks(*operands, 64, 128, workspace, window=window, out=out, top=top)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            triton_select.select_blocks(*operands, 64, 128, workspace, window=window, out=out, top=top)
        for step in (second, first):
            static["pooled"][: step["pooled"].shape[0]] = step["pooled"]
            static["block_table"].zero_()[:, : step["block_table"].shape[1]] = step["block_table"]
            static["index_q"].copy_(step["index_q"])
            static["positions"].copy_(step["positions"])
            graph.replay()
            found = [ids[:count] for ids, count in zip(out[0].tolist(), out[1].tolist(), strict=True)]
            assert found == expected(step, 64)

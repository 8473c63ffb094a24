"""Compiled selection against a sort by the total order: score descending, then block id ascending."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.cpu_cases import assert_threads_agree, needs_compiler, same_bits
from torch import Tensor

from page4.cache.rows import Rows
from page4.errors import CacheError, KernelError
from page4.kernels import cpu
from page4.select import Selection, extend, is_compiled, select

pytestmark = [needs_compiler, pytest.mark.usefixtures("one_thread")]
# With 16 index channels the divisor sqrt(E) is 4, so a key of four times a score gives that score exactly.
E = 16


@pytest.fixture(autouse=True)
def automatic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGE4_KERNELS", "auto")


def best(scores: list[float], top_k: int) -> list[int]:
    """Ids ascending of the top_k best; -0.0 equals +0.0 for Python's comparison too."""
    return sorted(sorted(range(len(scores)), key=lambda b: (-scores[b], b))[:top_k])


def padded(ids: list[int], top_k: int) -> list[int]:
    return ids + [-1] * (top_k - len(ids))


def paged(keys: Tensor, per_page: int, rng: random.Random, byte: int = 0x7F, gap: int = 0) -> tuple[Tensor, Tensor]:
    """Keys [N, B, E] in shuffled pages [P, per_page, E], `gap` floats between two, and the block table."""
    n, blocks, dim = keys.shape
    columns = -(-blocks // per_page)
    pages, stride = n * columns + 2, per_page * dim + gap
    flat = torch.full((4 * pages * stride,), byte, dtype=torch.uint8).view(torch.float32)
    pooled = flat.as_strided((pages, per_page, dim), (stride, dim, 1))
    order = rng.sample(range(1, pages), n * columns)
    table = torch.tensor(order, dtype=torch.int32).view(n, columns)
    for b in range(blocks):
        pooled[table[:, b // per_page].long(), b % per_page] = keys[:, b]
    return pooled, table


def keys_of(scores: Tensor) -> Tensor:
    """Scores [N, B] -> keys [N, B, E] for queries of `units`."""
    keys = torch.zeros(*scores.shape, E)
    keys[..., 3] = scores * 4
    return keys


def units(rows: int, heads: int = 1) -> Tensor:
    q = torch.zeros(rows, heads, E)
    q[:, 0, 3] = 1
    return q


def ids_of(
    scores: Tensor, visible: list[int], top_k: int, rng: random.Random, *, per_page: int = 4
) -> tuple[list[list[int]], int | None]:
    """The kernel's choice for one row a request, with scores [N, B] that are exact."""
    pooled, table = paged(keys_of(scores), per_page, rng)
    n = len(scores)
    operands = (units(n), pooled, table, torch.arange(n), torch.tensor(visible), top_k)
    ids, bad = cpu.select_blocks(*operands)
    return ids.tolist(), bad


@pytest.mark.parametrize("per_page", [1, 4, 16])
@pytest.mark.parametrize("top_k", [1, 2, 7, 16, 64])
@pytest.mark.parametrize("blocks", [1, 2, 17, 64, 65, 300])
def test_any_scores(generator: torch.Generator, rng: random.Random, blocks: int, top_k: int, per_page: int) -> None:
    scores = torch.randn(5, blocks, generator=generator) * 10.0 ** torch.arange(-4, 1).view(5, 1)
    visible = [blocks, max(0, blocks - 1), blocks // 2, min(blocks, top_k), min(blocks, top_k + 1)]
    got, bad = ids_of(scores, visible, top_k, rng, per_page=per_page)
    assert bad is None
    for row, seen in enumerate(visible):
        assert got[row] == padded(best(scores[row, :seen].clamp_min(0).tolist(), top_k), top_k)


@pytest.mark.parametrize("top_k", [1, 3, 8, 31, 32])
def test_ties_at_the_cutoff_go_to_the_lower_ids(rng: random.Random, top_k: int) -> None:
    rows = [[float(rng.randint(0, 2)) for _ in range(33)] for _ in range(40)]
    rows += [[0.0] * 33, [5.0] * 33, [-1.0] * 33, [float(b % 2) for b in range(33)], [float(-b) for b in range(33)]]
    got, bad = ids_of(torch.tensor(rows), [33] * len(rows), top_k, rng)
    assert bad is None
    assert got == [best([max(0.0, x) for x in row], top_k) for row in rows]


def test_zeros_of_both_signs_are_equal(rng: random.Random) -> None:
    rows = [[-0.0, 0.0] * 10, [0.0, -0.0] * 10, [-0.0] * 20, [-3.0, 0.0, -0.0, 1.0, -1e-45] * 4]
    got, bad = ids_of(torch.tensor(rows), [20] * 4, 6, rng)
    assert bad is None
    assert got == [best([max(0.0, x) for x in row], 6) for row in rows]


def test_scores_that_differ_in_one_bit_or_are_extreme(rng: random.Random) -> None:
    # Four times a score must be a number too, so the largest is a quarter of fp32's largest.
    bits = [0x3F800000 + i for i in range(20)] + [0x00000000, 1, 2, 3, 0x7FFFFF, 0x800000, 0x800001, 0x7E7FFFFF]
    rows = []
    for _ in range(30):
        chosen = [rng.choice(bits) for _ in range(50)]
        rows.append(torch.tensor(chosen, dtype=torch.int32).view(torch.float32).tolist())
    rows[0] = [math.inf, 1.0, math.inf, 0.0, 2.0] * 10
    for top_k in (1, 5, 20, 49):
        got, bad = ids_of(torch.tensor(rows), [50] * 30, top_k, rng)
        assert bad is None
        assert got == [best(row, top_k) for row in rows]


@settings(max_examples=150)
@given(data=st.data())
def test_any_row_equals_the_sort(data: st.DataObject) -> None:
    few = st.sampled_from([0.0, -0.0, 1e-45, 2e-45, 1e-38, 0.5, 0.5000001, 1.0, 3.0, -1.0, 1e30])
    any_score = few if data.draw(st.booleans()) else st.floats(0, 2.0**100, width=32)
    scores = data.draw(st.lists(any_score, min_size=1, max_size=60))
    seen, top_k = data.draw(st.integers(0, len(scores))), data.draw(st.integers(1, 64))
    got, bad = ids_of(torch.tensor([scores]), [seen], top_k, random.Random(0))
    assert bad is None
    assert got[0] == padded(best([max(0.0, x) for x in torch.tensor(scores).tolist()][:seen], top_k), top_k)


@pytest.mark.parametrize("nan", [math.nan, -math.nan])
def test_a_nan_names_the_first_row_that_sees_it(generator: torch.Generator, rng: random.Random, nan: float) -> None:
    scores = torch.rand(6, 30, generator=generator)
    scores[2, 20], scores[4, 3], scores[5, 29] = nan, nan, nan
    assert ids_of(scores, [30] * 6, 8, rng)[1] == 2
    assert ids_of(scores, [30, 30, 20, 30, 30, 30], 8, rng)[1] == 4, "row 2 does not see it"
    assert ids_of(scores, [30, 30, 20, 30, 3, 29], 8, rng)[1] is None
    got, bad = ids_of(scores, [30, 30, 20, 30, 7, 29], 8, rng)
    assert bad is None, "where nothing is pruned nothing is scored"
    assert got[4] == [*range(7), -1]


def test_poison_that_no_row_sees_changes_nothing(generator: torch.Generator) -> None:
    keys = torch.randn(3, 41, E, generator=generator)
    q = torch.randn(3, 2, E, generator=generator)
    results = []
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        pooled, table = paged(keys, 16, random.Random(1), byte, gap=7)
        visible = torch.tensor([41, 30, 12])
        for n, seen in enumerate(visible.tolist()):
            for b in range(seen, table.shape[1] * 16):
                unseen = torch.full((4 * E,), byte, dtype=torch.uint8).view(torch.float32)
                pooled[int(table[n, b // 16]), b % 16] = unseen
        ids, bad = cpu.select_blocks(q, pooled, table, torch.arange(3), visible, 10)
        assert bad is None
        results.append(ids)
    assert all(same_bits(ids, results[0]) for ids in results)


@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (2, 48), (4, 128), (3, 80)])
def test_scores_are_those_of_float64(generator: torch.Generator, rng: random.Random, heads: int, dim: int) -> None:
    """What is chosen is at least as good as what is not, but for the rounding of fp32."""
    keys, q = torch.randn(2, 200, dim, generator=generator), torch.randn(12, heads, dim, generator=generator)
    pooled, table = paged(keys, 4, rng)
    requests = torch.tensor([0, 1] * 6)
    ids, bad = cpu.select_blocks(q, pooled, table, requests, torch.full((12,), 200), 50)
    assert bad is None
    scores = torch.einsum("rid,rbd->rib", q.double(), keys.double()[requests]).clamp_min(0).sum(1) / dim**0.5
    for row in range(12):
        chosen = ids[row].tolist()
        assert chosen == sorted(set(chosen)) and len(chosen) == 50
        others = [b for b in range(200) if b not in chosen]
        assert float(scores[row, chosen].min()) >= float(scores[row, others].max()) - 1e-5


@pytest.mark.parametrize(("heads", "dim"), [(2, 16), (4, 64), (2, 256)])
def test_integers_are_scored_exactly(generator: torch.Generator, rng: random.Random, heads: int, dim: int) -> None:
    """Small integers and sqrt(E) a power of two: every score is exact, and ties are many."""
    keys = torch.randint(-1, 2, (2, 150, dim), generator=generator).float()
    q = torch.randint(-1, 2, (8, heads, dim), generator=generator).float()
    pooled, table = paged(keys, 16, rng)
    requests = torch.tensor([1, 0] * 4)
    ids, bad = cpu.select_blocks(q, pooled, table, requests, torch.full((8,), 150), 37)
    assert bad is None
    products = torch.einsum("rid,rbd->rib", q.long(), keys.long()[requests]).clamp_min(0).sum(1)
    scores = [[Fraction(x) for x in row] for row in products.tolist()]
    assert ids.tolist() == [sorted(sorted(range(150), key=lambda b: (-row[b], b))[:37]) for row in scores]


@pytest.mark.parametrize("host", [True, False])
def test_the_op_chooses_as_torch_does(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, host: bool) -> None:
    keys = torch.randint(-1, 2, (3, 64, E), generator=generator).float()
    pooled, table = paged(keys, 4, random.Random(2))
    lengths, firsts = [4, 1, 60], [200, 250, 150]
    positions = [f + i for f, n in zip(firsts, lengths, strict=True) for i in range(n)]
    requests = [r for r, n in enumerate(lengths) for _ in range(n)]
    known = ((0, 4, 5, 65), tuple(firsts)) if host else (None, None)
    if not host:
        positions, requests = [*positions, -1], [*requests, 0]
    q = torch.randint(-1, 2, (len(positions), 2, E), generator=generator).float()
    found = []
    for kernels in ("auto", "torch", "reference"):
        monkeypatch.setenv("PAGE4_KERNELS", kernels)
        rows = Rows(torch.tensor(positions), torch.tensor(requests), table, *known)
        assert is_compiled(q, pooled) == (kernels == "auto")
        found.append(select(q, pooled, rows, 20))
    for other in found[1:]:
        assert same_bits(found[0].block_ids, other.block_ids) and same_bits(found[0].counts, other.counts)


def test_the_op_names_the_row(generator: torch.Generator) -> None:
    keys = torch.randn(1, 40, E, generator=generator)
    keys[0, 33, 2] = math.nan
    pooled, table = paged(keys, 4, random.Random(3))
    rows = Rows(torch.arange(130, 140), torch.zeros(10, dtype=torch.int64), table)
    with pytest.raises(KernelError, match="row 5"):
        select(torch.randn(10, 2, E, generator=generator), pooled, rows, 8)


def test_a_position_past_the_block_table_is_refused(generator: torch.Generator, rng: random.Random) -> None:
    pooled, table = paged(torch.randn(1, 40, E, generator=generator), 4, rng)
    for position, allowed in ((159, True), (160, False)):
        rows = Rows(torch.tensor([position]), torch.tensor([0]), table)
        q = torch.randn(1, 2, E, generator=generator)
        if allowed:
            select(q, pooled, rows, 8)
        else:
            with pytest.raises(CacheError, match="expected below 160"):
                select(q, pooled, rows, 8)


def test_operands_may_be_views_of_wider_ones(generator: torch.Generator, rng: random.Random) -> None:
    keys, q = torch.randn(3, 40, E, generator=generator), torch.randn(6, 2, E, generator=generator)
    pooled, table = paged(keys, 4, rng)
    positions, requests = torch.arange(150, 156), torch.tensor([0, 1, 2, 0, 1, 2])
    want = select(q, pooled, Rows(positions, requests, table), 9)
    pairs = torch.stack((positions, requests), 1)
    wide = torch.full((3, 25), 1, dtype=torch.int32)
    wide[:, : table.shape[1]] = table
    for view in (wide[:, : table.shape[1]], table.T.contiguous().T):
        got = select(q, pooled, Rows(pairs[:, 0], pairs[:, 1], view), 9)
        assert same_bits(got.block_ids, want.block_ids) and same_bits(got.counts, want.counts)


def test_rows_and_threads_change_no_bit(generator: torch.Generator, rng: random.Random) -> None:
    keys, q = torch.randn(3, 90, E, generator=generator), torch.randn(30, 2, E, generator=generator)
    pooled, table = paged(keys, 4, rng)
    requests, visible = torch.arange(30) % 3, torch.arange(30) * 3

    def run(rows: slice = slice(None)) -> list[Tensor]:
        return [cpu.select_blocks(q[rows].clone(), pooled, table, requests[rows], visible[rows], 24)[0]]

    assert_threads_agree(run)
    (together,) = run()
    for row in range(30):
        assert same_bits(run(slice(row, row + 1))[0], together[row : row + 1])


@pytest.mark.parametrize("top_k", [1, 5, 16])
def test_extend_adds_what_was_completed_since(rng: random.Random, monkeypatch: pytest.MonkeyPatch, top_k: int) -> None:
    ids, counts, old, new, want = [], [], [], [], []
    for _ in range(200):
        at = rng.choice([-1, 0, 1, 2, 3, 4, rng.randrange(60)])
        visible = (at + 1) // 4
        chosen = sorted(rng.sample(range(visible), min(visible, top_k)))
        later = at + rng.randint(0, 8)
        ids.append(padded(chosen, top_k))
        counts.append(len(chosen))
        old.append(at)
        new.append(later)
        want.append(padded([*chosen, *range(visible, (later + 1) // 4)], top_k + 2))
    selection = Selection(torch.tensor(ids, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32), True)
    pairs = torch.tensor([old, new]).T.contiguous()
    for kernels in ("auto", "torch"):
        monkeypatch.setenv("PAGE4_KERNELS", kernels)
        for positions in (torch.tensor([old, new]), pairs.T):
            got = extend(selection, positions[0], positions[1])
            assert got.canonical and got.block_ids.tolist() == want
            assert got.counts.tolist() == [sum(b >= 0 for b in row) for row in want]

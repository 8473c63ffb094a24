"""Plans against a planner written from the words of the design alone, which sees tokens and sets and no masks."""

from __future__ import annotations

import itertools
import random

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from tests.attention_cases import make_rows, random_blocks, selection_of

from page4.cache.rows import Rows
from page4.errors import CacheError, KernelError
from page4.kernels import reference
from page4.plan import GroupedPlan, RowPlan, plan_grouped, plan_rows
from page4.select import Selection

pytestmark = pytest.mark.usefixtures("one_thread")

KERNELS = ("auto", "reference")


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PAGE4_KERNELS", request.param)
    return str(request.param)


def attended(selection: Selection, rows: Rows, row: int) -> set[int]:
    """Tokens of a row."""
    position = int(rows.positions[row])
    chosen = {int(b) for b in selection.block_ids[row]}
    return {t for t in range(position + 1) if t // 4 in chosen or t // 4 == (position + 1) // 4}


def table_for(rng: random.Random, requests: int, width: int) -> torch.Tensor:
    pages = list(range(1, requests * width + 1))
    rng.shuffle(pages)
    return torch.tensor(pages, dtype=torch.int32).view(requests, width)


def groups_of(rows: Rows, size: int) -> list[list[int]]:
    """Real rows, cut where the request changes, then every `size`."""
    real = [(row, int(rows.request_of_row[row])) for row in range(rows.num_rows) if rows.positions[row] >= 0]
    runs: list[list[int]] = []
    last = None
    for row, request in real:
        if request != last:
            runs.append([])
        runs[-1].append(row)
        last = request
    return [run[i : i + size] for run in runs for i in range(0, len(run), size)]


def brute_force(
    selection: Selection, rows: Rows, page_tokens: int, heads_per_kv: int, size: int, repoint: bool
) -> list[list[tuple[frozenset[int], int, int, int]]]:
    """Of every group: (tiles, logical block or -1, physical block, mask) in order."""
    plan = []
    for group in groups_of(rows, size):
        tokens = [attended(selection, rows, row) for row in group]
        pages = rows.block_table[rows.request_of_row[group[0]]].tolist()
        found = []
        for block in sorted({t // 4 for each in tokens for t in each}):
            bits = [(place, t) for place in range(len(group)) for t in range(4) if 4 * block + t in tokens[place]]
            tiles = frozenset((place * heads_per_kv + head) // 16 for place, _ in bits for head in range(heads_per_kv))
            physical = (pages[4 * block // page_tokens] * page_tokens + 4 * block % page_tokens) // 4
            found.append((tiles, block, physical, sum(2 ** (4 * place + t) for place, t in bits)))
        found.sort(key=lambda entry: (sum(2**tile for tile in entry[0]), entry[1]))
        entries: list[tuple[frozenset[int], int, int, int]] = []
        for index, entry in enumerate(found):
            entries.append(entry)
            if index + 1 == len(found) or found[index + 1][0] != entry[0]:
                while len(entries) % 8:
                    entries.append((entry[0], -1, found[0][2] if repoint else 0, 0))
        plan.append(entries)
    return plan


def listed(plan: GroupedPlan) -> list[list[tuple[frozenset[int], int, int, int]]]:
    tile_sets = plan.tile_sets.repeat_interleave(8).tolist()
    entries = [
        (frozenset(t for t in range(31) if tiles >> t & 1), logical, physical, mask & 0xFFFFFFFF)
        for tiles, logical, physical, mask in zip(
            tile_sets, plan.logical.tolist(), plan.blocks.tolist(), plan.masks.tolist(), strict=True
        )
    ]
    starts = plan.starts.tolist()
    return [entries[a:b] for a, b in itertools.pairwise(starts)]


def random_step(
    rng: random.Random, *, page_tokens: int = 16, top_k: int = 12, bad_ids: bool = False
) -> tuple[Selection, Rows]:
    """Requests with 0 to 20 rows at positions up to 200, some rows padding when the host does not know them."""
    spans = [(rng.choice([0, 1, 2, 3, 4, 30, 63, 150]), rng.choice([0, 1, 2, 7, 8, 9, 20])) for _ in range(4)]
    host = rng.random() < 0.5
    table = table_for(rng, len(spans), -(-180 // page_tokens))
    rows = make_rows(spans, table, host=host, padding=not host)
    ids, before = [], [0]
    for position in rows.positions.tolist():
        chosen = random_blocks(rng, position, rng.randint(0, top_k))
        if rng.random() < 0.6:
            chosen = [block for block in before if block < (position + 1) // 4]
        before = chosen
        if bad_ids:
            extra = [-1, -7, (position + 1) // 4, (position + 1) // 4 + 3, 1 << 20, *chosen[:3]]
            chosen = (chosen + rng.sample(extra, rng.randint(0, len(extra))))[:top_k]
            rng.shuffle(chosen)
        ids.append(chosen)
    return selection_of(ids, top_k), rows


@pytest.mark.parametrize("heads_per_kv", [1, 2, 3, 6, 12, 24, 62])
@pytest.mark.parametrize("repoint", [True, False])
def test_grouped_plan_is_that_of_the_brute_force_planner(
    kernels: str, rng: random.Random, heads_per_kv: int, repoint: bool
) -> None:
    for _ in range(3):
        selection, rows = random_step(rng)
        plan = plan_grouped(selection, rows, 16, heads_per_kv, repoint_padding=repoint)
        assert listed(plan) == brute_force(selection, rows, 16, heads_per_kv, 8, repoint)
        groups = groups_of(rows, 8)
        assert plan.rows.tolist() == [group + [-1] * (8 - len(group)) for group in groups]


@pytest.mark.parametrize("group_rows", [1, 2, 3, 4, 5, 7])
def test_a_kernel_may_ask_for_smaller_groups(kernels: str, rng: random.Random, group_rows: int) -> None:
    selection, rows = random_step(rng)
    plan = plan_grouped(selection, rows, 16, 6, group_rows=group_rows, repoint_padding=True)
    assert listed(plan) == brute_force(selection, rows, 16, 6, group_rows, True)
    assert plan.rows.shape[1] == plan.group_rows == group_rows


@pytest.mark.parametrize("page_tokens", [4, 16, 784, 804])
def test_physical_blocks_of_any_page_size(kernels: str, rng: random.Random, page_tokens: int) -> None:
    selection, rows = random_step(rng, page_tokens=page_tokens)
    plan = plan_grouped(selection, rows, page_tokens, 12, repoint_padding=True)
    assert listed(plan) == brute_force(selection, rows, page_tokens, 12, 8, True)


@hypothesis.given(seed=st.integers(0, 2**32), heads_per_kv=st.integers(1, 30), size=st.integers(1, 8))
@hypothesis.settings(max_examples=40)
def test_invalid_and_repeated_ids_change_nothing(seed: int, heads_per_kv: int, size: int) -> None:
    selection, rows = random_step(random.Random(seed), bad_ids=True)
    plan = plan_grouped(selection, rows, 16, heads_per_kv, group_rows=size)
    assert listed(plan) == brute_force(selection, rows, 16, heads_per_kv, size, True)
    each = plan_rows(selection, rows, 16)
    assert each.lengths.tolist() == [len(attended(selection, rows, row)) for row in range(rows.num_rows)]


@hypothesis.given(seed=st.integers(0, 2**32), bad_ids=st.booleans(), repoint=st.booleans())
@hypothesis.settings(max_examples=40)
def test_planners_agree_entry_by_entry(seed: int, bad_ids: bool, repoint: bool) -> None:
    rng = random.Random(seed)
    selection, rows = random_step(rng, bad_ids=bad_ids)
    places = (rows.positions, rows.request_of_row, rows.block_table, 16)
    heads, size = rng.randint(1, 24), rng.randint(1, 8)
    same(
        plan_grouped(selection, rows, 16, heads, group_rows=size, repoint_padding=repoint),
        reference.plan_grouped(selection.block_ids, *places, heads, size, repoint),
    )
    same(
        plan_rows(selection, rows, 16, repoint_padding=repoint),
        reference.plan_rows(selection.block_ids, *places, repoint),
    )


def same(one: GroupedPlan | RowPlan, other: GroupedPlan | RowPlan) -> None:
    for name, value in vars(one).items():
        theirs = getattr(other, name)
        if isinstance(value, torch.Tensor):
            assert value.dtype == theirs.dtype, name
            assert torch.equal(value, theirs), name
        else:
            assert value == theirs, name


@pytest.mark.parametrize("repoint", [True, False])
def test_row_plan_lists_a_rows_tokens_in_order(kernels: str, rng: random.Random, repoint: bool) -> None:
    for page_tokens in (4, 16, 804):
        selection, rows = random_step(rng, page_tokens=page_tokens)
        plan = plan_rows(selection, rows, page_tokens, repoint_padding=repoint)
        for row in range(rows.num_rows):
            tokens = sorted(attended(selection, rows, row))
            pages = rows.block_table[rows.request_of_row[row]].tolist()
            slots = [pages[t // page_tokens] * page_tokens + t % page_tokens for t in tokens]
            found = [4 * int(plan.table[row, i // 4]) + i % 4 for i in range(int(plan.lengths[row]))]
            assert found == slots
            padding = set(plan.table[row, -(-len(tokens) // 4) :].tolist())
            assert padding <= {slots[0] // 4 if repoint and slots else 0}


def test_a_group_by_hand(kernels: str) -> None:
    """Two rows, 6 heads a KV head: query rows 0..5 and 6..11, so that all of them lie in tile 0."""
    rows = make_rows([(9, 2)], torch.tensor([[5, 3, 0]], dtype=torch.int32))
    plan = plan_grouped(selection_of([[1], [0]], 2), rows, 8, 6, repoint_padding=True)
    # Position 9: block 1 and tokens 8, 9. Position 10: block 0 and tokens 8, 9, 10. Page 5 holds blocks 0, 1, page 3
    # block 2: physical blocks 10, 11 and 6.
    assert plan.logical.tolist() == [0, 1, 2, -1, -1, -1, -1, -1]
    assert plan.blocks.tolist() == [10, 11, 6, 10, 10, 10, 10, 10]
    assert plan.masks.tolist() == [0b11110000, 0b1111, 0b01110011, 0, 0, 0, 0, 0]
    assert plan.tile_sets.tolist() == [1]
    assert plan.starts.tolist() == [0, 8]
    assert plan.rows.tolist() == [[0, 1, -1, -1, -1, -1, -1, -1]]


def test_eight_rows_use_the_sign_bit(kernels: str) -> None:
    rows = make_rows([(7, 8)], torch.tensor([[1]], dtype=torch.int32))
    plan = plan_grouped(selection_of([[0]] * 8, 1), rows, 16, 2)
    assert plan.masks[0] == -1  # block 0: all 32 bits
    assert plan.masks.dtype == torch.int32
    # Row i is at position 7 + i: block 1 is never selected, block 2 is the tail of positions 8..10, block 3 of 12..14.
    assert {int(b): int(m) & 0xFFFFFFFF for b, m in zip(plan.logical, plan.masks, strict=True) if m} == {
        0: 0xFFFFFFFF,
        2: 0x00007310,
        3: 0x73100000,
    }


def test_b48_physical_blocks_are_64_bit(kernels: str) -> None:
    """An int32 page times 201 blocks a page: 20,000,000 * 201 wraps around in int32."""
    rows = make_rows([(809, 2)], torch.tensor([[20_000_000, 2**31 - 1]], dtype=torch.int32))
    selection = selection_of([[0, 200, 201], [200]], 3)
    right = {0: 4_020_000_000, 200: 4_020_000_200, 201: (2**31 - 1) * 201, 202: (2**31 - 1) * 201 + 1}
    plan = plan_grouped(selection, rows, 804, 6)
    assert {int(n): int(b) for n, b in zip(plan.logical, plan.blocks, strict=True) if n >= 0} == right
    assert plan_rows(selection, rows, 804).table[0].tolist() == list(right.values())


def test_padding_never_points_at_the_null_page(kernels: str, rng: random.Random) -> None:
    for _ in range(5):
        selection, rows = random_step(rng, bad_ids=True)
        plan = plan_grouped(selection, rows, 16, 6, repoint_padding=True)
        assert (plan.blocks // 4 > 0).all()
        assert (plan.masks != 0).sum() == (plan.logical >= 0).sum()
        assert (plan_grouped(selection, rows, 16, 6, repoint_padding=False).blocks[plan.masks == 0] == 0).all()


def test_repointing_follows_the_environment(kernels: str, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    selection, rows = random_step(rng)
    for value in ("0", "1"):
        monkeypatch.setenv("PAGE4_PLAN_REPOINT", value)
        plan = plan_grouped(selection, rows, 16, 6)
        assert listed(plan) == brute_force(selection, rows, 16, 6, 8, value == "1")


def test_steps_without_a_real_row(kernels: str) -> None:
    table = torch.zeros(2, 3, dtype=torch.int32)
    for positions in ([], [-1, -1, -1]):
        requests = torch.zeros(len(positions), dtype=torch.int64)
        rows = Rows(torch.tensor(positions, dtype=torch.int64), requests, table)
        selection = selection_of([[] for _ in positions], 4)
        plan = plan_grouped(selection, rows, 16, 6)
        assert (plan.num_groups, plan.num_entries, plan.starts.tolist()) == (0, 0, [0])
        assert plan_rows(selection, rows, 16).lengths.tolist() == [0] * len(positions)


def test_plans_cannot_be_changed() -> None:
    rows = make_rows([(9, 2)], torch.tensor([[5, 3]], dtype=torch.int32))
    plan = plan_grouped(selection_of([[1], [0]], 2), rows, 16, 6)
    with pytest.raises(AttributeError):
        plan.page_tokens = 4  # type: ignore[misc]  # the assignment is the test


@pytest.mark.parametrize("group_rows", [0, 9])
def test_refuses_groups_that_a_mask_cannot_hold(group_rows: int) -> None:
    rows = make_rows([(9, 2)], torch.tensor([[5, 3]], dtype=torch.int32))
    with pytest.raises(KernelError, match=rf"group_rows: expected 1\.\.8, got {group_rows}"):
        plan_grouped(selection_of([[1], [0]], 2), rows, 16, 6, group_rows=group_rows)


def test_refuses_what_does_not_fit() -> None:
    rows = make_rows([(9, 2)], torch.tensor([[5, 3]], dtype=torch.int32))
    selection = selection_of([[1], [0]], 2)
    with pytest.raises(KernelError, match=r"heads_per_kv: expected 1 or more, in at most 31 tiles.*got 63"):
        plan_grouped(selection, rows, 16, 63)
    with pytest.raises(KernelError, match=r"selection: expected \[2, K\], got \[1, 2\]"):
        plan_rows(selection_of([[1]], 2), rows, 16)
    with pytest.raises(CacheError, match="block in page"):
        plan_rows(selection, rows, 18)

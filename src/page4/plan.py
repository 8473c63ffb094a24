"""plan: a selection -> what a kernel walks through.

`plan_rows` lays out the blocks of each row as a virtual table of four-token pages (decode); `plan_grouped` joins the
blocks of neighbouring rows (verify windows, prefill). Plans are immutable and hold physical blocks, so that a kernel
needs neither the selection nor the block table. Ids of a selection that are negative, not a complete block at the row's
position, or repeated, are ignored; the tail is added from the position.
"""

from __future__ import annotations

from torch import Tensor

from page4 import env, kernels
from page4.cache.rows import Rows
from page4.cache.units import page_unit
from page4.errors import KernelError, message
from page4.kernels import reference, torch_planner
from page4.kernels.plans import GROUP_ROWS, MAX_GROUP_ROWS, MAX_HEADS_PER_KV, MAX_TILES, GroupedPlan, RowPlan, num_tiles
from page4.select import Selection

__all__ = ["GROUP_ROWS", "MAX_HEADS_PER_KV", "GroupedPlan", "RowPlan", "plan_grouped", "plan_rows"]


def plan_rows(selection: Selection, rows: Rows, page_tokens: int, *, repoint_padding: bool | None = None) -> RowPlan:
    """Each row's blocks as a virtual table of four-token pages, ascending, the tail last.

    repoint_padding: entries behind a row's last point at its first, not at page 0 (None: PAGE4_PLAN_REPOINT).
    Raises `KernelError` when the selection is of other rows, `CacheError` for a page that is not whole blocks.
    """
    _check(selection, rows, page_tokens)
    places = (rows.positions, rows.request_of_row, rows.block_table, page_tokens, _repoint(repoint_padding))
    if kernels.reference_wanted():
        return reference.plan_rows(selection.block_ids, *places)
    canonical = selection.as_canonical(rows.positions)
    return torch_planner.plan_rows(canonical.block_ids, canonical.counts, *places)


def plan_grouped(
    selection: Selection,
    rows: Rows,
    page_tokens: int,
    heads_per_kv: int,
    *,
    group_rows: int = GROUP_ROWS,
    repoint_padding: bool | None = None,
) -> GroupedPlan:
    """Groups of up to `group_rows` neighbouring rows of one request, and the union of each group's blocks.

    heads_per_kv: H / J; repoint_padding: padding entries point at the group's first, not at page 0 (None:
    PAGE4_PLAN_REPOINT; off, the null page leaks into kernels that do not zero it). Raises as `plan_rows`.
    """
    _check(selection, rows, page_tokens)
    if not 1 <= group_rows <= MAX_GROUP_ROWS:
        do = "a mask holds four bits a row in 32"
        raise KernelError(message("group_rows", allowed=f"1..{MAX_GROUP_ROWS}", got=group_rows, do=do))
    if heads_per_kv < 1 or num_tiles(heads_per_kv, group_rows) > MAX_TILES:
        allowed = f"1 or more, in at most {MAX_TILES} tiles of 16 query rows"
        do = "plan fewer rows a group, or use the xqa route"
        raise KernelError(message("heads_per_kv", allowed=allowed, got=heads_per_kv, do=do))
    places = (rows.positions, rows.request_of_row, rows.block_table, page_tokens, heads_per_kv, group_rows)
    repoint = _repoint(repoint_padding)
    if kernels.reference_wanted():
        return reference.plan_grouped(selection.block_ids, *places, repoint)
    groups: Tensor = rows.once(
        ("groups", group_rows),
        lambda: torch_planner.group_neighbours(rows.positions, rows.request_of_row, group_rows),
    )
    return torch_planner.plan_grouped(selection.as_canonical(rows.positions).block_ids, *places, repoint, groups)


def _repoint(asked: bool | None) -> bool:
    return env.get("PLAN_REPOINT") if asked is None else asked


def _check(selection: Selection, rows: Rows, page_tokens: int) -> None:
    page_unit(page_tokens)
    if selection.block_ids.ndim != 2 or selection.block_ids.shape[0] != rows.num_rows:
        allowed = f"[{rows.num_rows}, K]"
        got = list(selection.block_ids.shape)
        raise KernelError(message("selection", allowed=allowed, got=got, do="select for the same rows"))

"""What a planner hands to a kernel. Immutable: a plan is made once and may be read by many launches.

A physical block is `page * (S / 4) + block in the page`, so its tokens are page `id // (S / 4)`, slots
`4 * (id % (S / 4)) ..+3`, whatever the strides of the cache are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

GROUP_ROWS = 8
TILE_ROWS = 16
CATEGORY_ENTRIES = 8
# A mask has 32 bits, four for each row.
MAX_GROUP_ROWS = 8
# A category is a set of 16-row tiles kept in one non-negative int64 beside a group id, see `torch_planner`.
# Doctor reads the limit, so this module does not import torch.
MAX_TILES = 31
MAX_HEADS_PER_KV = MAX_TILES * TILE_ROWS // GROUP_ROWS


@dataclass(frozen=True)
class RowPlan:
    """Each row's blocks as a virtual table of 4-token pages: sorted by logical block, the tail last.

    table: [R, V] int64 physical blocks; lengths: [R] int64 tokens of the virtual sequence, 0 for a row that attends to
    nothing. Token i of row r is token i % 4 of block table[r, i // 4]; everything at and after lengths[r] is padding.
    Padding entries repeat the row's first block, or are block 0 of the null page when repointing is off; a row that
    attends to nothing has only the latter, and nothing may read them.
    """

    table: Tensor
    lengths: Tensor
    page_tokens: int


@dataclass(frozen=True)
class GroupedPlan:
    """Groups of neighbouring rows of one request over the union of their blocks.

    rows: [G, M] int64, row of each place (M = 8 unless the kernel asked for less), -1 for none; padding rows are in no
    group; starts: [G + 1] int64, where a group's entries begin;
    blocks: [T] int64 physical blocks; logical: [T] int64 logical blocks, -1 for padding; masks: [T] int32, bit
    4 * place + token is set when the row at that place attends to that token of the block;
    tile_sets: [T / 8] int64, of each eight entries the set (bit t) of 16-row tiles that they touch, where query row
    `place * heads_per_kv + head` belongs to tile `(place * heads_per_kv + head) // 16`: the entries' category.

    Entries of a group are ordered by tile set, then by logical block; each tile set is padded to a multiple of eight
    entries with mask 0. Padding entries repeat the group's first entry, or are block 0 of the null page when
    repointing is off.
    """

    rows: Tensor
    starts: Tensor
    blocks: Tensor
    logical: Tensor
    masks: Tensor
    tile_sets: Tensor
    page_tokens: int
    heads_per_kv: int

    @property
    def num_groups(self) -> int:
        """G."""
        return self.rows.shape[0]

    @property
    def group_rows(self) -> int:
        """M, places of a group."""
        return self.rows.shape[1]

    @property
    def num_entries(self) -> int:
        """T, padding counted."""
        return self.blocks.shape[0]

    @property
    def num_tiles(self) -> int:
        """16-row tiles that the query rows of a group take, the last one perhaps not full."""
        return num_tiles(self.heads_per_kv, self.group_rows)


def num_tiles(heads_per_kv: int, group_rows: int = GROUP_ROWS) -> int:
    """16-row tiles that the group_rows * heads_per_kv query rows of a group take."""
    return -(-group_rows * heads_per_kv // TILE_ROWS)


def tiles_of_place(place: int, heads_per_kv: int) -> range:
    """Tiles that the query rows of one place fall into."""
    first = place * heads_per_kv
    return range(first // TILE_ROWS, (first + heads_per_kv - 1) // TILE_ROWS + 1)

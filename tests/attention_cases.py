"""Paged caches with known contents in several layouts, and attention over them in float64 by einsum alone."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

from page4.cache.rows import Rows
from page4.cache.storage import LayerKV
from page4.codec import Scale
from page4.select import Selection

LAYOUTS = ("ours", "tokens", "separate", "odd")
KV_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)

# E4M3 from its definition, so that no test reads bytes with the code under test.
E4M3 = [
    (-1.0 if byte >> 7 else 1.0)
    * (
        math.nan
        if byte & 0x7F == 0x7F
        else (byte & 7) * 2.0**-9
        if byte >> 3 & 15 == 0
        else (1 + (byte & 7) / 8) * 2.0 ** ((byte >> 3 & 15) - 7)
    )
    for byte in range(256)
]
E4M3_TABLE = torch.tensor(E4M3, dtype=torch.float64)


@dataclass
class Case:
    """One step: operands of `attend`, and the true K and V [T, J, D] float64 of each request."""

    q: torch.Tensor
    layer_kv: LayerKV
    selection: Selection
    rows: Rows
    k: list[torch.Tensor]
    v: list[torch.Tensor]

    def tokens(self, row: int) -> list[int]:
        """The tokens that a row attends to."""
        position = int(self.rows.positions[row])
        complete = (position + 1) // 4
        blocks = {b for b in self.selection.block_ids[row].tolist() if 0 <= b < complete}
        return [t for t in range(position + 1) if t // 4 in blocks or t >= 4 * complete]

    def expected(self, softmax_scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [R, H, D], lse [R, H]) in float64, from the true K and V."""
        rows, heads, dim = self.q.shape
        scale = dim**-0.5 if softmax_scale is None else softmax_scale
        out = torch.zeros(rows, heads, dim, dtype=torch.float64)
        lse = torch.full((rows, heads), -math.inf, dtype=torch.float64)
        for row in range(rows):
            tokens = self.tokens(row)
            if not tokens:
                continue
            request = int(self.rows.request_of_row[row])
            k, v = self.k[request][tokens], self.v[request][tokens]
            q = self.q[row].double().view(k.shape[1], -1, dim)
            logits = torch.einsum("jgd,wjd->jgw", q, k) * scale
            out[row] = torch.einsum("jgw,wjd->jgd", logits.softmax(-1), v).reshape(heads, dim)
            lse[row] = logits.logsumexp(-1).flatten()
        return out, lse


def empty_cache(
    layout: str, pages: int, page_tokens: int, kv_heads: int, dim: int, dtype: torch.dtype, byte: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V views [P, S, J, D] of one storage whose every byte is `byte`."""
    shape = (pages, page_tokens, kv_heads, dim)
    if layout == "separate":
        both = _filled(2 * math.prod(shape), dtype, byte).view(2, *shape)
        return both[0], both[1]
    if layout == "tokens":
        both = _filled(2 * math.prod(shape), dtype, byte).view(pages, page_tokens, kv_heads, 2 * dim)
        return both[..., :dim], both[..., dim:]
    # Ours: [J, S, 2D] somewhere in a page that holds more than this layer.
    before, after = (128, 64) if layout == "ours" else (3, 5)
    page = before + 2 * page_tokens * kv_heads * dim + after
    flat = _filled(pages * page, dtype, byte)
    strides = (page, page_tokens * 2 * dim, 2 * dim, 1)
    both = flat.as_strided((pages, kv_heads, page_tokens, 2 * dim), strides, before).permute(0, 2, 1, 3)
    return both[..., :dim], both[..., dim:]


def _filled(count: int, dtype: torch.dtype, byte: int) -> torch.Tensor:
    return torch.full((count * dtype.itemsize,), byte, dtype=torch.uint8).view(dtype)


def make_rows(
    spans: list[tuple[int, int]], block_table: torch.Tensor, *, host: bool = True, padding: bool = False
) -> Rows:
    """Rows of requests that each have (first position, rows); `padding` puts rows of position -1 among them."""
    positions: list[int] = []
    requests: list[int] = []
    for request, (first, count) in enumerate(spans):
        if padding:
            positions.append(-1)
            requests.append(request)
        positions += range(first, first + count)
        requests += [request] * count
    starts = [0]
    for _, count in spans:
        starts.append(starts[-1] + count)
    known = host and not padding
    return Rows(
        torch.tensor(positions, dtype=torch.int64),
        torch.tensor(requests, dtype=torch.int64),
        block_table,
        tuple(starts) if known else None,
        tuple(first for first, _ in spans) if known else None,
    )


def random_blocks(rng: random.Random, position: int, top_k: int) -> list[int]:
    """At most top_k of the blocks that are complete at a position, ascending."""
    visible = (position + 1) // 4
    return sorted(rng.sample(range(visible), min(top_k, visible)))


def selection_of(ids: list[list[int]], width: int) -> Selection:
    """A selection that claims nothing about its ids."""
    padded = [row + [-1] * (width - len(row)) for row in ids]
    counts = torch.tensor([len(row) for row in ids], dtype=torch.int32)
    return Selection(torch.tensor(padded, dtype=torch.int32).view(len(ids), width), counts)


def make_case(
    seed: int,
    spans: list[tuple[int, int]],
    *,
    heads: int = 6,
    kv_heads: int = 1,
    dim: int = 64,
    page_tokens: int = 16,
    top_k: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype = torch.float32,
    layout: str = "ours",
    byte: int = 0x7F,
    host: bool = True,
    padding: bool = False,
    magnitude: float = 1.0,
    shared: float = 0.9,
) -> Case:
    """A random step. Pages are permuted, everything that no token owns holds `byte`, page 0 included.

    `shared`: the chance that a row keeps the selection of the row before it.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = [first + count for first, count in spans]
    needed = [-(-max(1, length) // page_tokens) for length in lengths]
    pages = list(range(1, sum(needed) + 3))
    rng.shuffle(pages)
    k, v = empty_cache(layout, len(pages) + 1, page_tokens, kv_heads, dim, kv_dtype, byte)
    scales = (Scale(0.03 * magnitude), Scale(0.05 * magnitude)) if kv_dtype == torch.uint8 else (None, None)
    table = torch.zeros(len(spans), max(needed) + 2, dtype=torch.int32)
    true: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for request, length in enumerate(lengths):
        own = [pages.pop() for _ in range(needed[request])]
        table[request, : len(own)] = torch.tensor(own, dtype=torch.int32)
        at = torch.arange(length)
        page = table[request, at // page_tokens].long()
        for cache, scale, truth in ((k, scales[0], true[0]), (v, scales[1], true[1])):
            shape = (length, kv_heads, dim)
            if scale is None:
                values = (torch.randn(shape, generator=generator) * magnitude).to(kv_dtype)
                truth.append(values.double())
            else:
                # Any byte that is a number, the largest ones included.
                values = torch.randint(0, 0x7F, shape, generator=generator, dtype=torch.uint8)
                values |= torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8) << 7
                if magnitude == 1.0:
                    values &= 0b10111111  # below 2, so that a softmax has more than one token
                truth.append(E4M3_TABLE[values.long()] * scale.value)
            cache[page, at % page_tokens] = values
    rows = make_rows(spans, table, host=host, padding=padding)
    ids: list[list[int]] = []
    for row, position in enumerate(rows.positions.tolist()):
        keep = ids and rng.random() < shared and rows.request_of_row[row] == rows.request_of_row[row - 1]
        kept = [block for block in ids[-1] if block < (position + 1) // 4] if keep else []
        ids.append(kept if keep and kept else random_blocks(rng, position, top_k))
    q = torch.randn(rows.num_rows, heads, dim, generator=generator).to(dtype)
    return Case(q, LayerKV(k, v, *scales), selection_of(ids, top_k), rows, *true)

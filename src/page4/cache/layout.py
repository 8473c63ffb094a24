"""Where everything lies inside a page and inside a state slot. No tensors here, only offsets in bytes.

page   = for every QSA layer, target and draft: K/V [J, S, 2D] (K and V of a token side by side, so that the four
         tokens of a block are one contiguous 4 x 2D for each KV head), then for every such layer its pooled index
         keys [S / 4, E]
state  = `pages_per_state` pages in a row: for every GDN layer its recurrent state [Hv, Dk, Dv] fp32 and the inputs
         of its convolution [conv_dim, kernel - 1], for every PLE layer the inputs of its convolution
         [(kernel - 1) * ngram_size, hc * hidden], for every QSA layer a ring of raw index keys [16, E]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from page4.cache.units import BLOCK_TOKENS, page_unit
from page4.errors import CacheError, message
from page4.geometry import Geometry

# The ring is addressed by position % 16. A window of at most 8 rows and the up to 3 tokens before it that its first
# block needs are 11 consecutive positions, so no row of a window overwrites a raw key that is still wanted.
RING_TOKENS = 16
PAGE_ALIGN_BYTES = 256
_FIELD_ALIGN_BYTES = 64
CACHE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)


@dataclass(frozen=True)
class Field:
    """A tensor inside a page or a state slot: byte offset, shape and dtype."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes that the field takes."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


class _Packer:
    """Puts fields one after the other, each aligned."""

    def __init__(self) -> None:
        self.end = 0

    def place(self, shape: tuple[int, ...], dtype: torch.dtype) -> Field:
        field = Field(_round_up(self.end, _FIELD_ALIGN_BYTES), shape, dtype)
        self.end = field.offset + field.num_bytes
        return field


@dataclass(frozen=True)
class CacheLayout:
    """Offsets of every field, and the sizes of a page and of a state slot in bytes.

    Layers are keyed by their runtime index; the draft layer is `geometry.draft_layer`. `kv_dtype` and `draft_kv_dtype`
    are the dtypes of the stored elements: `torch.uint8` means E4M3.
    """

    page_tokens: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    draft_kv_dtype: torch.dtype | None
    kv: dict[int, Field]
    pooled: dict[int, Field]
    recurrent: dict[int, Field]
    conv: dict[int, Field]
    ple: dict[int, Field]
    ring: dict[int, Field]
    page_bytes: int
    state_bytes: int

    @property
    def pages_per_state(self) -> int:
        """Pages that one state takes."""
        return max(1, -(-self.state_bytes // self.page_bytes))

    @property
    def slot_bytes(self) -> int:
        """Distance between two state slots."""
        return self.pages_per_state * self.page_bytes

    @property
    def token_bytes(self) -> float:
        """Bytes of arena that a token of context takes, the state not counted."""
        return self.page_bytes / self.page_tokens

    @classmethod
    def of(
        cls,
        geometry: Geometry,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        draft_kv_dtype: torch.dtype | None = None,
        page_tokens: int = 16,
        with_draft: bool,
    ) -> CacheLayout:
        """The layout of a model: `dtype` is the activations', `draft_kv_dtype` defaults to `kv_dtype`.

        Raises `CacheError` for a page that is not a whole number of blocks, or a dtype that no K/V can have.
        """
        page_unit(page_tokens)
        draft_dtype = (draft_kv_dtype or kv_dtype) if with_draft else None
        for what, found in (("kv_dtype", kv_dtype), ("draft_kv_dtype", draft_dtype)):
            if found is not None and found not in CACHE_DTYPES:
                allowed = "float32, float16, bfloat16 or uint8 (E4M3)"
                raise CacheError(message(what, allowed=allowed, got=found, do="choose another kv_dtype"))
        layers = dict.fromkeys(geometry.qsa_layers, kv_dtype)
        if draft_dtype is not None:
            layers[geometry.draft_layer] = draft_dtype

        page = _Packer()
        kv_shape = (geometry.num_kv_heads, page_tokens, 2 * geometry.head_dim)
        kv = {layer: page.place(kv_shape, layer_dtype) for layer, layer_dtype in layers.items()}
        pooled_shape = (page_tokens // BLOCK_TOKENS, geometry.index.head_dim)
        pooled = {layer: page.place(pooled_shape, dtype) for layer in layers}

        state, gdn = _Packer(), geometry.gdn
        matrix = (gdn.value_heads, gdn.key_dim, gdn.value_dim)
        recurrent = {layer: state.place(matrix, torch.float32) for layer in geometry.gdn_layers}
        conv = {layer: state.place((gdn.conv_dim, gdn.conv_kernel - 1), dtype) for layer in geometry.gdn_layers}
        ple: dict[int, Field] = {}
        if geometry.ple is not None:
            ple_shape = (geometry.ple.conv_state_tokens, geometry.streams_dim)
            ple = {layer: state.place(ple_shape, dtype) for layer in geometry.ple.layers}
        ring = {layer: state.place((RING_TOKENS, geometry.index.head_dim), dtype) for layer in layers}
        return cls(
            page_tokens=page_tokens,
            dtype=dtype,
            kv_dtype=kv_dtype,
            draft_kv_dtype=draft_dtype,
            kv=kv,
            pooled=pooled,
            recurrent=recurrent,
            conv=conv,
            ple=ple,
            ring=ring,
            page_bytes=_round_up(page.end, PAGE_ALIGN_BYTES),
            state_bytes=state.end,
        )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

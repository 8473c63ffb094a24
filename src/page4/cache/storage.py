"""One byte arena that holds everything, and the typed views of it.

K/V pages, pooled index keys and recurrent state are views of the same bytes, as in the engines where a recycled page
was found to leak NaN: a page that held a state may hold K/V next. In poison mode every page is filled with one byte at
start and again whenever it changes owner, so that a byte that nobody wrote cannot pass for a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from page4.cache.layout import CACHE_DTYPES, CacheLayout, Field
from page4.codec import Scale
from page4.errors import CacheError, message


@dataclass(frozen=True)
class LayerKV:
    """K and V of one layer, and the only owner of its two scales: the writer and the reader both take this object.

    k, v: [P, S, J, D] strided views with unit stride in D, uint8 (E4M3) exactly when the scales are set;
    counters: [2, 2] int64, rows K and V, columns clipped values and non-finite inputs, increased by the writer.
    Raises `CacheError` when the views do not agree with each other or with the scales.
    """

    k: Tensor
    v: Tensor
    k_scale: Scale | None = None
    v_scale: Scale | None = None
    counters: Tensor | None = None

    def __post_init__(self) -> None:
        for name, view in (("k", self.k), ("v", self.v)):
            if view.ndim != 4 or view.stride(-1) != 1:
                allowed = "[P, S, J, D] with unit stride in D"
                got = f"{list(view.shape)} with strides {list(view.stride())}"
                raise CacheError(message(f"{name} cache", allowed=allowed, got=got, do="pass a view of the pages"))
        if self.k.shape != self.v.shape or self.k.dtype != self.v.dtype:
            got = f"{list(self.v.shape)} {self.v.dtype}"
            allowed = f"{list(self.k.shape)} {self.k.dtype} as of the k cache"
            raise CacheError(message("v cache", allowed=allowed, got=got, do="pass two views of one cache"))
        if self.k.dtype not in CACHE_DTYPES:
            allowed, do = "float32, float16, bfloat16 or uint8 (E4M3)", "pass E4M3 pages as their bytes"
            raise CacheError(message("k cache", allowed=allowed, got=self.k.dtype, do=do))
        if self.counters is not None and (list(self.counters.shape) != [2, 2] or self.counters.dtype != torch.int64):
            got = f"{list(self.counters.shape)} {self.counters.dtype}"
            raise CacheError(message("counters", allowed="[2, 2] int64", got=got, do="one row a side, K and V"))
        scales = (self.k_scale is not None, self.v_scale is not None)
        wanted = self.k.dtype == torch.uint8
        if scales != (wanted, wanted):
            allowed = "both scales" if wanted else "no scales"
            got = f"k_scale {self.k_scale}, v_scale {self.v_scale}"
            do = "an E4M3 cache has its two scales, any other has none"
            raise CacheError(message(f"scales of a {self.k.dtype} cache", allowed=allowed, got=got, do=do))

    @property
    def page_tokens(self) -> int:
        """Tokens a page."""
        return self.k.shape[1]

    @property
    def is_e4m3(self) -> bool:
        """Whether the stored elements are E4M3 bytes."""
        return self.k_scale is not None


class Arena:
    """`num_pages` pages of one uint8 tensor; page 0 is the null page, which nothing here ever writes after start.

    Every view is made once, so its address is fixed. Offsets are Python or torch 64-bit integers throughout.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_pages: int,
        device: torch.device | str = "cpu",
        poison: int | None = None,
        scales: Mapping[int, tuple[Scale, Scale]] | None = None,
    ) -> None:
        """`scales` maps each E4M3 layer to (k_scale, v_scale); `poison` is a byte, or None for zeros at start.

        Raises `CacheError` before any memory is taken: too few pages, or scales that do not fit the layers' dtypes.
        """
        if num_pages < 2:
            raise CacheError(message("num_pages", allowed="2 or more", got=num_pages, do="give the arena more memory"))
        self.layout = layout
        self.num_pages = num_pages
        self.poison = poison
        self._check_scales(scales or {})
        self.bytes = _zeros(num_pages * layout.page_bytes, torch.device(device))
        if poison is not None:
            self.bytes.fill_(poison)
        self.num_slots = num_pages // layout.pages_per_state
        self._kv = {layer: self._layer_kv(layer, field, scales or {}) for layer, field in layout.kv.items()}
        self._pooled = {layer: self._page_view(field) for layer, field in layout.pooled.items()}
        self._recurrent = {layer: self._slot_view(field) for layer, field in layout.recurrent.items()}
        self._conv = {layer: self._slot_view(field) for layer, field in layout.conv.items()}
        self._ple = {layer: self._slot_view(field) for layer, field in layout.ple.items()}
        self._ring = {layer: self._slot_view(field) for layer, field in layout.ring.items()}

    @property
    def num_bytes(self) -> int:
        """Size of the arena."""
        return self.bytes.numel()

    def layer_kv(self, layer: int) -> LayerKV:
        """K/V of a QSA layer."""
        return self._kv[layer]

    def pooled(self, layer: int) -> Tensor:
        """Pooled index keys of a QSA layer: [P, S / 4, E]."""
        return self._pooled[layer]

    def ring(self, layer: int) -> Tensor:
        """Raw index keys of a QSA layer by position % 16: [slots, 16, E]."""
        return self._ring[layer]

    def recurrent(self, layer: int) -> Tensor:
        """Recurrent state of a GDN layer: [slots, Hv, Dk, Dv] fp32."""
        return self._recurrent[layer]

    def conv(self, layer: int) -> Tensor:
        """Inputs of a GDN layer's convolution before the next row: [slots, conv_dim, kernel - 1]."""
        return self._conv[layer]

    def ple(self, layer: int) -> Tensor:
        """Inputs of a PLE layer's convolution before the next row: [slots, (kernel - 1) * ngram_size, hc * hidden]."""
        return self._ple[layer]

    def poison_pages(self, pages: Sequence[int]) -> None:
        """Fill pages that change owner with the poison byte; nothing when the poison mode is off."""
        if self.poison is None or not pages:
            return
        table = self.bytes.view(self.num_pages, self.layout.page_bytes)
        table[torch.tensor(pages, dtype=torch.int64, device=self.bytes.device)] = self.poison

    def zero_state(self, slot: int) -> None:
        """Set a state to that of a request without tokens: all zeros."""
        self._check_slot(slot)
        self.bytes.narrow(0, slot * self.layout.slot_bytes, self.layout.state_bytes).zero_()

    def state_bytes(self, slot: int) -> Tensor:
        """The bytes of a state slot, [state_bytes] uint8: for checksums and tests."""
        self._check_slot(slot)
        return self.bytes.narrow(0, slot * self.layout.slot_bytes, self.layout.state_bytes)

    def _check_slot(self, slot: int) -> None:
        if not 1 <= slot < self.num_slots:
            do = "slot 0 would hold the null page; ask the allocator for a slot"
            raise CacheError(message("state slot", allowed=f"1..{self.num_slots - 1}", got=slot, do=do))

    def _check_scales(self, scales: Mapping[int, tuple[Scale, Scale]]) -> None:
        e4m3 = {layer for layer, field in self.layout.kv.items() if field.dtype == torch.uint8}
        if set(scales) != e4m3:
            do = "give every E4M3 layer its two scales and no other layer any"
            got = f"layers {sorted(scales)}"
            raise CacheError(message("scales", allowed=f"layers {sorted(e4m3)}", got=got, do=do))

    def _layer_kv(self, layer: int, field: Field, scales: Mapping[int, tuple[Scale, Scale]]) -> LayerKV:
        both = self._page_view(field).permute(0, 2, 1, 3)
        head_dim = field.shape[-1] // 2
        k_scale, v_scale = scales.get(layer, (None, None))
        counters = torch.zeros(2, 2, dtype=torch.int64, device=self.bytes.device)
        return LayerKV(both[..., :head_dim], both[..., head_dim:], k_scale, v_scale, counters)

    def _page_view(self, field: Field) -> Tensor:
        return self._strided(field, self.num_pages, self.layout.page_bytes)

    def _slot_view(self, field: Field) -> Tensor:
        return self._strided(field, self.num_slots, self.layout.slot_bytes)

    def _strided(self, field: Field, count: int, stride_bytes: int) -> Tensor:
        size = field.dtype.itemsize
        typed = self.bytes.view(field.dtype)
        inner = [1]
        for length in reversed(field.shape[1:]):
            inner.append(inner[-1] * length)
        strides = (stride_bytes // size, *reversed(inner))
        return typed.as_strided((count, *field.shape), strides, field.offset // size)


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    """[num_bytes] uint8 zeros. On a CPU a page is taken when it is written: an arena costs what is used of it."""
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))

"""Without host fields a step waits for no value: no operation's shape or argument depends on a tensor's contents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cache.helpers import make_rows
from torch.utils._python_dispatch import TorchDispatchMode

from page4.cache.append import append_index, append_kv
from page4.cache.storage import LayerKV
from page4.codec import Scale

SYNCS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique", "equal", "repeat_interleave")


class NoSync(TorchDispatchMode):
    """Refuses what would have to read a device's memory; an index by a mask is a nonzero in disguise."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        masks = [
            x for x in (args[1] if name in ("index", "index_put", "index_put_") else []) if isinstance(x, torch.Tensor)
        ]
        if name in SYNCS or any(mask.dtype == torch.bool for mask in masks):
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


def test_the_guard_sees_a_sync() -> None:
    x = torch.ones(3)
    for call in (lambda: x.sum().item(), lambda: bool(x.any()), lambda: x.nonzero(), lambda: x[x > 0]):
        with pytest.raises(AssertionError, match="waits for the device"), NoSync():
            call()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_a_step_without_host_fields(dtype: torch.dtype) -> None:
    pool = torch.zeros(2, 9, 8, 1, 16, dtype=dtype)
    scales = (Scale(0.5), Scale(0.5)) if dtype == torch.uint8 else (None, None)
    kv = LayerKV(pool[0], pool[1], *scales, torch.zeros(2, 2, dtype=torch.int64))
    pooled, ring = torch.zeros(9, 2, 8), torch.zeros(4, 16, 8)
    rows = make_rows([(3, 20), (6, 3)], [[1, 2, 3], [4, 5]], host=False, padding=2)
    slots = torch.tensor([1, 2])
    x, raw = torch.ones(25, 1, 16), torch.ones(25, 8)
    if dtype == torch.uint8:
        for scale in scales:
            assert scale is not None
            scale.tensor("cpu")
    with NoSync():
        append_kv(kv, x, x, rows)
        append_index(pooled, ring, raw, rows, slots, lambda mean, first: mean + first.unsqueeze(1))
        rows.pages_of(rows.positions, rows.request_of_row, 8)
    assert pooled[1, 1].tolist() == [5.0] * 8, "it did the work: block 1 is all ones, its first token at 4"

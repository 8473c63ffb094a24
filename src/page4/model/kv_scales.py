"""K/V scales of a checkpoint: every scale tensor is given to one layer and side, or refused by name.

Spellings read, under any prefix that `checkpoint.names` knows: `self_attn.k_scale`, `self_attn.attn.k_scale`,
`self_attn.k_proj.k_scale` (and `v_proj.v_scale`), `self_attn.qkv_proj.k_scale`, and the old `self_attn.kv_scale` for
both sides. `mtp.layers.0` is the draft, layer `num_layers` at run time.
"""

from __future__ import annotations

import logging
import struct
from typing import Any, NoReturn

import torch

from page4.checkpoint import Checkpoint, TensorBytes, classify
from page4.checkpoint.scale_names import place
from page4.codec import Scale
from page4.errors import ScaleError, message
from page4.geometry import Geometry

_LOG = logging.getLogger("page4")
_FORMATS = {"F32": "<f", "F16": "<e"}

Scales = dict[int, tuple[Scale, Scale]]


def resolve_scales(
    checkpoint: Checkpoint,
    geometry: Geometry,
    kv_dtype: str | torch.dtype,
    draft_kv_dtype: str | torch.dtype | None = None,
    *,
    with_draft: bool,
    allow_unit_scales: bool = False,
) -> Scales:
    """(k_scale, v_scale) of every layer whose cache is E4M3; the draft is layer `geometry.draft_layer`.

    `draft_kv_dtype` None means that of the target. Every scale tensor in the checkpoint is checked, also those of a
    16-bit cache, which are then left unused. `allow_unit_scales` gives scale 1 to a target that has no scale at all,
    and then to its draft too; it never completes a set, and a calibrated target never gets a draft at 1.

    Raises `ScaleError` that names the tensors: unknown spelling, layer without a K/V cache, two for one side, missing,
    wrong dtype or shape, not finite and positive.
    """
    stored = _stored(checkpoint, geometry)
    wanted = list(geometry.qsa_layers) if is_e4m3(kv_dtype) else []
    found_target = any(layer != geometry.draft_layer for layer, _ in stored)
    unit = allow_unit_scales and not found_target
    scales = _complete(stored, geometry, wanted, unit=unit)
    if with_draft and is_e4m3(kv_dtype if draft_kv_dtype is None else draft_kv_dtype):
        # A calibrated target beside a draft at 1 loses acceptance without a word, so that is never a default.
        unit_draft = allow_unit_scales and not (found_target and is_e4m3(kv_dtype))
        scales |= _complete(stored, geometry, [geometry.draft_layer], unit=unit_draft)
    return scales


def is_e4m3(kv_dtype: str | torch.dtype) -> bool:
    """Whether a cache dtype, by its flag or as torch names it, is E4M3."""
    if isinstance(kv_dtype, torch.dtype):
        return kv_dtype in (torch.uint8, torch.float8_e4m3fn)
    return kv_dtype in ("fp8", "fp8_e4m3")


def _refuse(what: str, allowed: str, got: str, do: str = "use a scale pack made for this checkpoint") -> NoReturn:
    raise ScaleError(message(what, allowed=allowed, got=got, do=do))


def _stored(checkpoint: Checkpoint, geometry: Geometry) -> dict[tuple[int, str], Scale]:
    """Every scale of the checkpoint by (layer, side)."""
    data = TensorBytes(checkpoint)
    found: dict[tuple[int, str], tuple[str, Scale]] = {}
    for name in checkpoint.names():
        if classify(name).kind != "scale":
            continue
        layer, sides = place(name, geometry)
        scale = _read(checkpoint, data, name)
        for side in sides:
            if (layer, side) in found:
                _refuse(f"{side}_scale of layer {layer}", "one tensor", f"{found[layer, side][0]} and {name}")
            found[layer, side] = (name, scale)
    return {place: scale for place, (_, scale) in found.items()}


def _read(checkpoint: Checkpoint, data: TensorBytes, name: str) -> Scale:
    entry = checkpoint.entry(name)
    if entry.dtype not in (*_FORMATS, "BF16") or entry.shape not in ((), (1,)):
        _refuse(name, "one F32 number of shape []", f"{entry.dtype} {list(entry.shape)}")
    raw = bytes(data.view(name))
    value: Any = (
        struct.unpack("<f", b"\0\0" + raw) if entry.dtype == "BF16" else struct.unpack(_FORMATS[entry.dtype], raw)
    )
    try:
        return Scale(value[0])
    except ScaleError:
        _refuse(name, "a finite positive number", repr(value[0]), "calibrate the scales again")


def _complete(stored: dict[tuple[int, str], Scale], geometry: Geometry, layers: list[int], *, unit: bool) -> Scales:
    """The pairs of `layers`, all of them or a refusal."""
    absent = [
        f"{_name(geometry, layer)}.{side}_scale" for layer in layers for side in "kv" if (layer, side) not in stored
    ]
    if absent and unit and len(absent) == 2 * len(layers):
        _LOG.warning("K/V scales of layers %s are 1, as allow_unit_scales asks; nothing is calibrated", layers)
        return {layer: (Scale(1.0), Scale(1.0)) for layer in layers}
    if absent:
        draft = layers == [geometry.draft_layer]
        do = "add calibrated scales, or keep the cache in 16 bits with " + (
            "draft_kv_dtype='auto'" if draft else "kv_cache_dtype='auto'"
        )
        _refuse("K/V scales", f"two for each of the layers {layers}", f"no {', '.join(absent)}", do)
    return {layer: (stored[layer, "k"], stored[layer, "v"]) for layer in layers}


def _name(geometry: Geometry, layer: int) -> str:
    return "mtp.layers.0.self_attn" if layer == geometry.draft_layer else f"layers.{layer}.self_attn"

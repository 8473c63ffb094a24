"""K/V scales of a checkpoint: every scale tensor is given to one layer and side, or refused by name.

Spellings read, under any prefix that `checkpoint.names` knows: `self_attn.k_scale`, `self_attn.attn.k_scale`,
`self_attn.k_proj.k_scale` (and `v_proj.v_scale`), `self_attn.qkv_proj.k_scale`, and the old `self_attn.kv_scale` for
both sides. `mtp.layers.0` is the draft, layer `num_layers` at run time.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from page4.checkpoint import Checkpoint, TensorBytes, classify
from page4.checkpoint.scale_names import place
from page4.codec import Scale
from page4.errors import LaneError, ScaleError, message
from page4.geometry import Geometry

_FORMATS = {"F32": "<f", "F16": "<e"}

Scales = dict[int, tuple[Scale, Scale]]


@dataclass(frozen=True)
class FoundScales:
    """(k_scale, v_scale) of the layers whose cache is E4M3, the layers whose scales are 1, and every fault.

    `scales` is complete exactly when there are no faults.
    """

    scales: Scales
    unit_layers: tuple[int, ...]
    faults: tuple[str, ...]


def resolve_scales(
    checkpoint: Checkpoint,
    geometry: Geometry,
    kv_dtype: str | torch.dtype,
    draft_kv_dtype: str | torch.dtype | None = None,
    *,
    with_draft: bool,
    allow_unit_scales: bool = False,
) -> Scales:
    """As `find_scales`. Raises `LaneError` when there is any fault."""
    found = find_scales(
        checkpoint, geometry, kv_dtype, draft_kv_dtype, with_draft=with_draft, allow_unit_scales=allow_unit_scales
    )
    if found.faults:
        raise LaneError("K/V scales", found.faults)
    return found.scales


def find_scales(
    checkpoint: Checkpoint,
    geometry: Geometry,
    kv_dtype: str | torch.dtype,
    draft_kv_dtype: str | torch.dtype | None = None,
    *,
    with_draft: bool,
    allow_unit_scales: bool = False,
) -> FoundScales:
    """The scales of every layer whose cache is E4M3; the draft is layer `geometry.draft_layer`.

    `draft_kv_dtype` None means that of the target. Every scale tensor in the checkpoint is checked, also those of a
    16-bit cache, which are then left unused. `allow_unit_scales` gives scale 1 to a target that has no scale at all; it
    never completes a set, and never serves the draft, which would lose acceptance without a word.

    Faults name the tensors: unknown spelling, layer without a K/V cache, two for one side, missing, wrong dtype or
    shape, not finite and positive.
    """
    stored, faults = _stored(checkpoint, geometry)
    target = list(geometry.qsa_layers) if is_e4m3(kv_dtype) else []
    drafted = with_draft and is_e4m3(kv_dtype if draft_kv_dtype is None else draft_kv_dtype)
    absent = [place for place in _places(target) if place not in stored]
    unit: tuple[int, ...] = ()
    if absent and allow_unit_scales and not any(layer != geometry.draft_layer for layer, _ in stored):
        unit, absent = tuple(target), []
    faults += _missing(geometry, target, absent, "--kv-cache-dtype auto")
    if drafted:
        draft = [geometry.draft_layer]
        absent = [place for place in _places(draft) if place not in stored]
        faults += _missing(geometry, draft, absent, "--draft-kv-dtype auto")
        target += draft
    values = {place: scale for place, (_, scale) in stored.items() if scale is not None}
    values |= {place: Scale(1.0) for place in _places(unit)}
    scales = {i: (values[i, "k"], values[i, "v"]) for i in target} if not faults else {}
    return FoundScales(scales, unit, tuple(faults))


def is_e4m3(kv_dtype: str | torch.dtype) -> bool:
    """Whether a cache dtype, by its flag or as torch names it, is E4M3."""
    if isinstance(kv_dtype, torch.dtype):
        return kv_dtype in (torch.uint8, torch.float8_e4m3fn)
    return kv_dtype in ("fp8", "fp8_e4m3")


def _refuse(what: str, allowed: str, got: str, do: str = "use a scale pack made for this checkpoint") -> NoReturn:
    raise ScaleError(message(what, allowed=allowed, got=got, do=do))


def _places(layers: Sequence[int]) -> list[tuple[int, str]]:
    return [(layer, side) for layer in layers for side in "kv"]


def _stored(
    checkpoint: Checkpoint, geometry: Geometry
) -> tuple[dict[tuple[int, str], tuple[str, Scale | None]], list[str]]:
    """Every scale of the checkpoint by (layer, side), None where its value is no scale; and the faults."""
    data = TensorBytes(checkpoint)
    found: dict[tuple[int, str], tuple[str, Scale | None]] = {}
    faults = []
    for name in checkpoint.names():
        if classify(name).kind != "scale":
            continue
        scale = None
        try:
            layer, sides = place(name, geometry)
        except ScaleError as error:
            faults.append(str(error))
            continue
        try:
            scale = _read(checkpoint, data, name)
        except ScaleError as error:
            faults.append(str(error))
        for side in sides:
            if (layer, side) in found:
                got = f"{found[layer, side][0]} and {name}"
                do = "keep the one that belongs to this checkpoint"
                faults.append(message(f"{side}_scale of layer {layer}", allowed="one tensor", got=got, do=do))
            found[layer, side] = (name, scale)
    return found, faults


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


def _missing(geometry: Geometry, layers: list[int], absent: list[tuple[int, str]], instead: str) -> list[str]:
    """The fault that names what the pairs of `layers` lack, if they lack anything."""
    if not absent:
        return []
    names = ", ".join(f"{_name(geometry, layer)}.{side}_scale" for layer, side in absent)
    do = f"add calibrated scales (page4 calibrate), or keep this cache in 16 bits with {instead}"
    what = "K/V scales of the draft" if layers == [geometry.draft_layer] else "K/V scales"
    return [message(what, allowed=f"two for each of the layers {layers}", got=f"no {names}", do=do)]


def _name(geometry: Geometry, layer: int) -> str:
    return "mtp.layers.0.self_attn" if layer == geometry.draft_layer else f"layers.{layer}.self_attn"

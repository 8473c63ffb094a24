"""Names of K/V scales: the spellings in use, the layer and sides that each serves, and the names that are written."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, NoReturn

from page4.checkpoint.names import classify
from page4.errors import ScaleError, message
from page4.geometry import Geometry

Side = Literal["k", "v"]
Naming = Literal["qsa", "proj"]
DRAFT_LAYER = "mtp.layers.0"
_LAYER = re.compile(r"(mtp\.)?layers\.(0|[1-9][0-9]{0,8})\.(.+)")
_SIDES: dict[str, tuple[Side, ...]] = {
    "self_attn.k_scale": ("k",), "self_attn.v_scale": ("v",),
    "self_attn.attn.k_scale": ("k",), "self_attn.attn.v_scale": ("v",),
    "self_attn.k_proj.k_scale": ("k",), "self_attn.v_proj.v_scale": ("v",),
    "self_attn.qkv_proj.k_scale": ("k",), "self_attn.qkv_proj.v_scale": ("v",),
    "self_attn.kv_scale": ("k", "v"), "self_attn.attn.kv_scale": ("k", "v"),
}  # fmt: skip
SIDES: tuple[Side, Side] = ("k", "v")


class ScalePlace(NamedTuple):
    """The run-time layer and the sides that a scale tensor serves."""

    layer: int
    sides: tuple[Side, ...]


def place(name: str, geometry: Geometry) -> ScalePlace:
    """Where a scale tensor belongs; `mtp.layers.0` is `geometry.draft_layer`. Raises `ScaleError` that names it."""
    match = _LAYER.fullmatch(classify(name).canonical)
    if match is None or match.group(3) not in _SIDES:
        _refuse(name, f"layers.N.{{{', '.join(_SIDES)}}}", "another scale")
    layer, sides = int(match.group(2)), _SIDES[match.group(3)]
    if match.group(1):
        if layer != 0:
            _refuse(name, f"{DRAFT_LAYER}, the only draft layer", f"mtp.layers.{layer}")
        return ScalePlace(geometry.draft_layer, sides)
    if layer not in geometry.qsa_layers:
        got = f"layer {layer}" + (" without a K/V cache" if layer < geometry.num_layers else " of a deeper model")
        _refuse(name, f"one of the QSA layers {list(geometry.qsa_layers)}", got)
    return ScalePlace(layer, sides)


def report_place(name: str, geometry: Geometry) -> ScalePlace:
    """As `place`, for a calibration report, where the draft is `layers.N` with N = num_hidden_layers."""
    canonical = classify(name).canonical
    draft = f"layers.{geometry.draft_layer}."
    return place(f"{DRAFT_LAYER}.{canonical[len(draft) :]}" if canonical.startswith(draft) else name, geometry)


def written_name(layer: int, side: Side, geometry: Geometry, *, prefix: str, naming: Naming) -> str:
    """The name of one scale on disk, in a checkpoint whose names start with `prefix`."""
    where = DRAFT_LAYER if layer == geometry.draft_layer else f"{prefix}layers.{layer}"
    inner = f"{side}_proj." if naming == "proj" else ""
    return f"{where}.self_attn.{inner}{side}_scale"


def _refuse(what: str, allowed: str, got: str) -> NoReturn:
    do = "use a scale pack made for this checkpoint"
    raise ScaleError(message(what, allowed=allowed, got=got, do=do))

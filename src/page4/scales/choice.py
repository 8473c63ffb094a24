"""A scale and where it came from."""

from __future__ import annotations

from typing import NamedTuple

from page4.checkpoint.scale_names import SIDES, Side
from page4.errors import ScaleError, message
from page4.geometry import Geometry

Place = tuple[int, Side]


class Choice(NamedTuple):
    """The fp32 value of one scale, the largest magnitude behind it, and its origin."""

    value: float
    max_abs: float | None
    origin: str


Choices = dict[Place, Choice]


def target_places(geometry: Geometry) -> list[Place]:
    """Every layer and side of the target that needs a scale."""
    return [(layer, side) for layer in geometry.qsa_layers for side in SIDES]


def draft_places(geometry: Geometry) -> list[Place]:
    """The two of the draft."""
    return [(geometry.draft_layer, side) for side in SIDES]


def describe(places: list[Place], geometry: Geometry) -> str:
    """Places by the name of their tensor."""
    names = {geometry.draft_layer: f"layers.{geometry.draft_layer} (the draft)"}
    return ", ".join(f"{names.get(layer, f'layers.{layer}')}.self_attn.{side}_scale" for layer, side in places)


def check_coverage(found: list[Place], wanted: list[Place], geometry: Geometry, what: str) -> None:
    """Exactly `wanted`, each once. Raises `ScaleError` naming what is missing, too much or there twice."""
    missing = [place for place in wanted if place not in found]
    extra = [place for place in found if place not in wanted]
    twice = sorted({place for place in found if found.count(place) > 1})
    words = [("no ", missing), ("also ", extra), ("twice ", twice)]
    got = "; ".join(word + describe(places, geometry) for word, places in words if places)
    if got:
        allowed = f"a k and a v scale for each of the layers {sorted({layer for layer, _ in wanted})}"
        raise ScaleError(message(what, allowed=allowed, got=got, do="use scales made for this checkpoint"))

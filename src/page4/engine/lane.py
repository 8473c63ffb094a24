"""The lane that is asked for, and whether it is admitted: before weights are read, all reasons against it at once.

A lane is checkpoint + overlay + K/V types + drafts. It is refused when its overlay does not belong to its base, when a
scale is missing, unknown or no number, when a scale that would be used was never measured (`prototype:`), and, with
drafts over E4M3 K/V, without an explicit opt-in.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from page4 import env
from page4.checkpoint import Checkpoint
from page4.checkpoint.provenance import PROTOTYPE, Provenance, is_overlay
from page4.errors import LaneError, message
from page4.geometry import Geometry
from page4.model.kv_scales import FoundScales, Scales, find_scales, is_e4m3

_LOG = logging.getLogger("page4")
ScaleSource = Literal["none", "overlay", "checkpoint", "unit"]


@dataclass(frozen=True)
class LaneOptions:
    """What a caller may say about a lane; dtypes are those of the stored elements, uint8 for E4M3.

    `draft_kv_dtype` is None without drafts. `e4m3_mtp` None leaves the opt-in to PAGE4_E4M3_MTP.
    """

    kv_dtype: torch.dtype
    draft_kv_dtype: torch.dtype | None
    drafts: int
    allow_unit_scales: bool = False
    allow_prototype_scales: bool = False
    e4m3_mtp: bool | None = None


@dataclass(frozen=True)
class Lane:
    """An admitted lane. `warnings` are for people and repeated in reports; `scales` go to the arena."""

    kv_dtype: str
    draft_kv_dtype: str | None
    drafts: int
    scale_source: ScaleSource
    artifact_id: str | None
    unit_layers: tuple[int, ...]
    prototypes: tuple[str, ...]
    admitted_by: str
    warnings: tuple[str, ...]
    scales: Scales

    def as_object(self) -> dict[str, Any]:
        """The lane in reports."""
        names = ("kv_dtype", "draft_kv_dtype", "drafts", "scale_source", "artifact_id", "admitted_by")
        lists = ("unit_layers", "prototypes", "warnings")
        return {name: getattr(self, name) for name in names} | {name: list(getattr(self, name)) for name in lists}


def admit(folder: Path, checkpoint: Checkpoint, geometry: Geometry, options: LaneOptions) -> Lane:
    """The lane of a checkpoint folder. Raises `LaneError` with every fault; reads no weight but the scales."""
    from page4.checkpoint.binding import binding_faults  # pydantic, for overlays only

    provenance, broken = binding_faults(folder) if is_overlay(folder) else (None, [])
    found = find_scales(
        checkpoint,
        geometry,
        options.kv_dtype,
        options.draft_kv_dtype,
        with_draft=options.drafts > 0,
        allow_unit_scales=options.allow_unit_scales,
    )
    prototypes = _prototypes(provenance, geometry, options)
    opted_in, admitted_by = _opt_in(options)
    faults = [*(str(error) for error in broken), *found.faults]
    if prototypes and not options.allow_prototype_scales:
        do = "calibrate the draft and build the overlay again, or experiment with --allow-prototype-scales"
        got = ", ".join(prototypes)
        faults.append(message("scales of the lane", allowed="calibrated ones", got=got, do=do))
    if not opted_in:
        do = "opt in with --e4m3-mtp or PAGE4_E4M3_MTP=1, or keep K/V in 16 bits with --kv-cache-dtype auto"
        faults.append(message("E4M3 K/V with MTP", allowed="an explicit opt-in", got="none", do=do))
    if faults:
        raise LaneError(f"lane of {folder}", faults)
    warnings = _warnings(found, prototypes)
    for warning in warnings:
        _LOG.warning("%s", warning)
    return Lane(
        kv_dtype=_name(options.kv_dtype),
        draft_kv_dtype=None if options.draft_kv_dtype is None else _name(options.draft_kv_dtype),
        drafts=options.drafts,
        scale_source=_source(found, provenance),
        artifact_id=None if provenance is None else provenance.pack.artifact_id,
        unit_layers=found.unit_layers,
        prototypes=prototypes,
        admitted_by=admitted_by,
        warnings=warnings,
        scales=found.scales,
    )


def _opt_in(options: LaneOptions) -> tuple[bool, str]:
    """Whether the lane may run, and what admits it."""
    stored = (options.kv_dtype, options.draft_kv_dtype)
    if not options.drafts or not any(dtype is not None and is_e4m3(dtype) for dtype in stored):
        return True, "every lane without E4M3 K/V under drafts"
    if options.e4m3_mtp is not None:
        return options.e4m3_mtp, "opt-in (--e4m3-mtp)"
    return env.get("E4M3_MTP"), "opt-in (PAGE4_E4M3_MTP)"


def _prototypes(provenance: Provenance | None, geometry: Geometry, options: LaneOptions) -> tuple[str, ...]:
    """Scales that nobody measured, of the layers whose cache would use them."""
    if provenance is None:
        return ()
    used = set(geometry.qsa_layers) if is_e4m3(options.kv_dtype) else set()
    if options.drafts and options.draft_kv_dtype is not None and is_e4m3(options.draft_kv_dtype):
        used.add(geometry.draft_layer)
    marked = [s for s in provenance.scales if s.layer in used and s.origin.startswith(PROTOTYPE)]
    return tuple(f"{scale.name} ({scale.origin})" for scale in marked)


def _source(found: FoundScales, provenance: Provenance | None) -> ScaleSource:
    if not found.scales:
        return "none"
    if found.unit_layers:
        return "unit"
    return "checkpoint" if provenance is None else "overlay"


def _warnings(found: FoundScales, prototypes: tuple[str, ...]) -> tuple[str, ...]:
    said = []
    if found.unit_layers:
        said.append(f"K/V scales of layers {list(found.unit_layers)} are 1 as asked; nothing is calibrated")
    if prototypes:
        said.append(f"scales that nobody measured are in use as asked: {', '.join(prototypes)}")
    return tuple(said)


def _name(dtype: torch.dtype) -> str:
    return "fp8_e4m3" if dtype == torch.uint8 else str(dtype).removeprefix("torch.")

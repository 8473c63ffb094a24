"""Which scales an overlay gets: published or enveloped for the target, measured or prototypes for the draft."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from page4.checkpoint.provenance import PROTOTYPE
from page4.errors import ScaleError, UsageError, message
from page4.geometry import Geometry
from page4.scales.choice import Choice, Choices, draft_places, target_places
from page4.scales.packs import Pack, published
from page4.scales.reports import Report, measured, read_report

TargetSource = Literal["published", "envelope"]


@dataclass(frozen=True)
class Sources:
    """What was asked for; at most one of the draft sources."""

    target: TargetSource = "published"
    target_report: Path | None = None
    draft_report: Path | None = None
    draft_unit_scale: bool = False
    draft_from_layer: int | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """The reports that will be read."""
        return tuple(path for path in (self.target_report, self.draft_report) if path is not None)


@dataclass(frozen=True)
class Resolved:
    """The scales by layer and side, and the reports that were read."""

    target: Choices
    draft: Choices
    draft_source: str
    target_report: Report | None
    draft_report: Report | None


def check_sources(sources: Sources, *, has_draft: bool) -> None:
    """Refuse a request that contradicts itself or the base. Raises `UsageError`."""
    draft = [sources.draft_report is not None, sources.draft_unit_scale, sources.draft_from_layer is not None]
    flags = "--draft-report, --draft-unit-scale or --draft-from-layer"
    if sum(draft) > 1:
        _usage(flags, "one of them", "several", "choose one source for the draft")
    if has_draft and not any(draft):
        _usage(flags, "a source for the two scales of the draft", "none", "give --draft-report REPORT")
    if not has_draft and any(draft):
        _usage(flags, "none, as the base has no MTP head", "one", "leave it out")
    if (sources.target == "envelope") != (sources.target_report is not None):
        got = "envelope alone" if sources.target_report is None else f"{sources.target} with --target-report"
        _usage("--target-source", "envelope together with --target-report", got, "give both or neither")


def resolve_sources(sources: Sources, pack: Pack, base: Path, geometry: Geometry) -> Resolved:
    """Every scale of target and draft. Raises `ScaleError`, `CheckpointError`."""
    target = published(pack, geometry)
    target_report = None
    if sources.target_report is not None:
        target_report = read_report(sources.target_report, base, geometry)
        target = envelope(target, measured(target_report, target_places(geometry), geometry))
    draft_report = None if sources.draft_report is None else read_report(sources.draft_report, base, geometry)
    if draft_report is not None:
        draft = measured(draft_report, draft_places(geometry), geometry)
        return Resolved(target, draft, "report", target_report, draft_report)
    draft = prototype(sources, target, geometry)
    origin = next(iter(draft.values())).origin if draft else "none"
    return Resolved(target, draft, origin, target_report, None)


def envelope(first: Choices, second: Choices) -> Choices:
    """For each layer and side, the choice with the larger max_abs; the first one where they are equal."""
    return {
        place: second[place] if (second[place].max_abs or 0.0) > (choice.max_abs or 0.0) else choice
        for place, choice in first.items()
    }


def prototype(sources: Sources, target: Choices, geometry: Geometry) -> Choices:
    """Draft scales that nobody measured, marked as such; nothing when none was asked for."""
    if sources.draft_unit_scale:
        return {place: Choice(1.0, None, PROTOTYPE + "unit") for place in draft_places(geometry)}
    layer = sources.draft_from_layer
    if layer is None:
        return {}
    if layer not in geometry.qsa_layers:
        allowed = f"one of the QSA layers {list(geometry.qsa_layers)}"
        raise ScaleError(message("--draft-from-layer", allowed=allowed, got=layer, do="name a layer with a K/V cache"))
    origin = f"{PROTOTYPE}layer-{layer}"
    return {
        (draft, side): Choice(target[layer, side].value, target[layer, side].max_abs, origin)
        for draft, side in draft_places(geometry)
    }


def _usage(what: str, allowed: str, got: str, do: str) -> NoReturn:
    raise UsageError(message(what, allowed=allowed, got=got, do=do))

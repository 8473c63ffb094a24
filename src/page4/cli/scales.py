"""`page4 scales`: from a calibration report to an overlay that can be served, and the check of it."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from page4.cli import console, flags, models
from page4.cli.flags import option

if TYPE_CHECKING:
    from page4.scales.effect import Effect, ScaleResult
    from page4.scales.faults import Findings

app = typer.Typer(help="Packs, overlays and checks of calibrated K/V scales.")

SOURCES = "Sources of the scales"


class TargetSource(str, Enum):
    """Values of `--target-source`."""

    published = "published"
    envelope = "envelope"


class Naming(str, Enum):
    """Values of `--naming`."""

    qsa = "qsa"
    proj = "proj"


Out = Annotated[Path, option("--out", metavar="DIR", help="New folder to write.", panel=flags.OUTPUT)]
Force = Annotated[bool, option("--force", help="Replace a folder that is not empty.", panel=flags.OUTPUT)]


@app.command("pack")
def pack(
    report: Annotated[Path, option("--report", metavar="FILE", help="Calibration report of this base.", panel=SOURCES)],
    base: Annotated[str, option("--base", metavar="MODEL", help="Folder, org/name[@revision] or tiny.", panel=SOURCES)],
    out: Out,
    force: Force = False,
    json: flags.Json = False,
) -> None:
    """Make a scale pack of the target's scales in a calibration report."""
    from page4.scales.pack import make_pack

    summary = make_pack(report, models.resolve(base), out, force=force)
    for note in summary.notes:
        console.stderr().print(f"page4: note: {note}")
    if json:
        console.print_json({"folder": str(out), "artifact_id": summary.artifact_id, "tensors": summary.tensor_count})
    else:
        console.print_text(f"{out}: {summary.artifact_id}, {summary.tensor_count} scales\n")


@app.command("overlay")
def overlay(
    base: Annotated[str, typer.Argument(metavar="BASE", help="Folder, org/name[@revision] or tiny.")],
    pack: Annotated[Path, typer.Argument(metavar="PACK", help="Folder of a scale pack made for BASE.")],
    out: Out,
    draft_report: Annotated[
        Path | None,
        option("--draft-report", metavar="FILE", help="Calibration report with the draft's scales.", panel=SOURCES),
    ] = None,
    target_source: Annotated[
        TargetSource,
        option(
            "--target-source",
            metavar="KIND",
            help="published: as in PACK; envelope: the larger max_abs of PACK and --target-report.",
            panel=SOURCES,
        ),
    ] = TargetSource.published,
    target_report: Annotated[
        Path | None, option("--target-report", metavar="FILE", help="Calibration report for envelope.", panel=SOURCES)
    ] = None,
    draft_unit_scale: Annotated[
        bool, option("--draft-unit-scale", help="Prototype: the draft's scales are 1.", panel=SOURCES)
    ] = False,
    draft_from_layer: Annotated[
        int | None,
        option("--draft-from-layer", metavar="N", help="Prototype: the draft takes those of layer N.", panel=SOURCES),
    ] = None,
    naming: Annotated[
        Naming,
        option(
            "--naming",
            metavar="KIND",
            help="qsa: self_attn.k_scale; proj: self_attn.k_proj.k_scale, which SGLang maps.",
            panel=flags.OUTPUT,
        ),
    ] = Naming.qsa,
    copy: Annotated[
        bool, option("--copy", help="Copy the base's files instead of linking them.", panel=flags.OUTPUT)
    ] = False,
    full: Annotated[
        bool,
        option("--full", help="Record the SHA-256 of whole shards, also of a large base.", panel=flags.OUTPUT),
    ] = False,
    force: Force = False,
    json: flags.Json = False,
) -> None:
    """Make a checkpoint of BASE with scales: links to its files, a new index, the scale files, their provenance."""
    from page4.scales.overlay import build_overlay
    from page4.scales.sources import Sources

    sources = Sources(target_source.value, target_report, draft_report, draft_unit_scale, draft_from_layer)
    folder = models.resolve(base)
    with console.byte_bar(f"building {out}", weight_bytes(folder)) as on_bytes:
        summary = build_overlay(
            folder,
            pack,
            out,
            sources,
            naming=naming.value,
            copy=copy,
            force=force,
            full=full or None,
            on_bytes=on_bytes,
        )
    for name in summary.prototypes:
        console.stderr().print(f"page4: note: prototype scale, not calibrated: {name}")
    counts = {
        "target_scales": summary.target_count,
        "draft_scales": summary.draft_count,
        "carried_files": summary.carried_files,
    }
    if json:
        console.print_json({"folder": str(out), **counts, "prototypes": list(summary.prototypes)})
    else:
        words = f"{counts['target_scales']} target and {counts['draft_scales']} draft scales"
        console.print_text(f"{out}: {words}, {counts['carried_files']} files of the base\n")


@app.command("verify")
def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of an overlay.")],
    full: Annotated[bool, option("--full", help="Hash the base's shards whole.", panel=flags.OUTPUT)] = False,
    root: Annotated[
        Path | None,
        option("--root", metavar="PATH", help="Follow links as in a container with this root.", panel=flags.OUTPUT),
    ] = None,
    json: flags.Json = False,
) -> None:
    """Check everything that an overlay claims, without loading it: exit code 1 when anything is wrong."""
    from page4.scales.verify import verify_overlay

    with console.byte_bar(f"verifying {folder}", weight_bytes(folder)) as on_bytes:
        findings = verify_overlay(folder, full=full, root=root, on_bytes=on_bytes)
    report = {"folder": str(folder), "full": full, **findings.as_object()}
    if json:
        console.print_json(report)
    else:
        show(report, findings)
    if findings.faults:
        raise typer.Exit(1)


def weight_bytes(folder: Path) -> int:
    """Size of the weight files of a folder, as far as they can be seen; for a bar, so nothing is refused here."""
    try:
        return sum(path.stat().st_size for path in folder.glob("*.safetensors") if path.exists())
    except OSError:
        return 0


def show(report: dict[str, Any], findings: Findings) -> None:
    """Faults as a table, then a line."""
    from page4.cli.doctor import make_table

    out = console.stdout()
    if findings.faults:
        rows = [[fault.code, fault.where, fault.what] for fault in findings.faults]
        out.print(make_table(f"faults of {report['folder']}", ["fault", "where", "found"], rows))
    for note in findings.notes:
        out.print(f"note: {note}")
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in findings.counts.items())
    verdict = f"{len(findings.faults)} faults" if findings.faults else "pass"
    out.print(f"{report['folder']}: {verdict} ({counts})")


@app.command("effect")
def effect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of an overlay.")],
    prompts: Annotated[
        Path | None,
        option("--prompts", metavar="FILE", help="JSONL as for calibrate; the shipped samples.", panel=flags.PROMPTS),
    ] = None,
    num_samples: Annotated[
        int, option("--num-samples", help="Samples at most.", panel=flags.PROMPTS, **flags.Number)
    ] = 3,
    max_seq_length: Annotated[
        int, option("--max-seq-length", help="Longer samples are cut.", panel=flags.PROMPTS, **flags.Number)
    ] = 640,
    seed: Annotated[int, option("--seed", metavar="N", help="Which samples.", panel=flags.PROMPTS)] = 42,
    dtype: flags.Weights = flags.DType.auto,
    allow_prototype_scales: flags.PrototypeScales = False,
    json: flags.Json = False,
) -> None:
    """Prove by running that every scale takes effect on its side of its layer: exit code 1 when one does not."""
    from page4.scales.effect import EffectOptions, measure_effect

    options = EffectOptions(
        prompts=prompts,
        num_samples=num_samples,
        max_seq_length=max_seq_length,
        seed=seed,
        dtype=dtype.value,
        allow_prototype_scales=allow_prototype_scales,
    )
    with console.step_bar(f"proving the scales of {folder}", "runs") as progress:
        found = measure_effect(models.check_folder(folder), options, progress)
    if json:
        console.print_json({"folder": str(folder), "pass": not found.faults, **found.as_object()})
    else:
        show_effect(folder, found)
    if found.faults:
        raise typer.Exit(1)


def show_effect(folder: Path, found: Effect) -> None:
    """A row for each scale, then the faults and a line."""
    from page4.cli.doctor import make_table

    out = console.stdout()
    probes = [probe.probe for probe in found.scales[0].probes] if found.scales else []
    columns = ["of", "scale", "error", "served", *probes, "effect"]
    rows = [effect_row(entry) for entry in found.scales]
    title = "attention error against unquantised K/V, as it is and with one scale changed (times as large)"
    out.print(make_table(title, columns, rows))
    for fault in found.faults:
        out.print(f"fault: {fault}")
    logits = [f"{name} {x:.2%}" for name, x in (("target", found.target_logits), ("draft", found.draft_logits)) if x]
    verdict = f"{len(found.faults)} faults" if found.faults else "pass, every scale takes effect"
    sizes = f"{len(found.scales)} scales, {found.tokens} tokens, logit error {', '.join(logits)}"
    out.print(f"{folder}: {verdict} ({sizes})")


def effect_row(entry: ScaleResult) -> list[str]:
    """One scale for people."""
    cells = [f"{entry.layer} {entry.side}", f"{entry.scale:.3g}", f"{entry.error:.1%}", f"{entry.served_error:.1%}"]
    cells += [f"{probe.error:.0%} {probe.growth:.0f}x" for probe in entry.probes]
    return [*cells, "NO" if entry.faults else "yes"]

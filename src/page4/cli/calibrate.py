"""`page4 calibrate`: K/V scales from calibration samples, and the envelope of several reports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from page4.cli import console, flags, models
from page4.cli.flags import OUTPUT, PROMPTS, Number, option
from page4.errors import UsageError, message

if TYPE_CHECKING:
    from page4.scales.calibrate import Calibration

ENVELOPE = "envelope"
CALIBRATION = "Calibration"
# Flags that mean something for `page4 calibrate envelope`.
ENVELOPE_FLAGS = ("model", "reports", "out", "restart", "json")

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="As for generate; or the word envelope, for the largest max_abs of several reports.",
        show_default=False,
    ),
]
Reports = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[REPORT]...", help="After envelope: reports, or folders with one.", show_default=False),
]


def calibrate(
    context: typer.Context,
    model: Model,
    reports: Reports = None,
    prompts: Annotated[
        Path | None,
        option(
            "--prompts",
            metavar="FILE",
            help="JSONL: a text, messages (with tools) or prompt_token_ids on each line.",
            panel=PROMPTS,
        ),
    ] = None,
    max_seq_length: Annotated[
        int, option("--max-seq-length", help="Longer samples are cut.", panel=PROMPTS, **Number)
    ] = 2048,
    num_samples: Annotated[int, option("--num-samples", help="Samples at most.", panel=PROMPTS, **Number)] = 512,
    seed: Annotated[int, option("--seed", metavar="N", help="Which samples, when there are more.", panel=PROMPTS)] = 42,
    mix: Annotated[
        str | None,
        option("--mix", metavar="KIND=N,..", help="Refuse a set with fewer samples of a kind.", panel=PROMPTS),
    ] = None,
    rule: Annotated[
        str,
        option("--rule", metavar="RULE", help="absmax (clips nothing), percentile:P or mse.", panel=CALIBRATION),
    ] = "absmax",
    batch_size: Annotated[
        int, option("--batch-size", help="Samples that run together.", panel=CALIBRATION, **Number)
    ] = 1,
    shard_size: Annotated[
        int, option("--shard-size", help="Samples in a shard, the unit of resuming.", panel=CALIBRATION, **Number)
    ] = 32,
    dtype: flags.Weights = flags.DType.auto,
    revision: flags.Revision = None,
    out: Annotated[
        Path | None, option("--out", metavar="DIR", help="Folder of calibration-report.json.", panel=OUTPUT)
    ] = None,
    restart: Annotated[bool, option("--restart", help="Drop what an earlier run left in --out.", panel=OUTPUT)] = False,
    json: flags.Json = False,
) -> None:
    """Measure K/V scales of a checkpoint and its draft head; `calibrate envelope REPORT..` puts reports together."""
    if out is None:
        raise UsageError(message("--out", allowed="a folder", got="none", do="say where the report goes"))
    if model == ENVELOPE:
        check_envelope_flags(context)
        report = envelope(reports or [], out, restart=restart)
        return console.print_json(report) if json else show(report, out)
    if reports:
        do = f"use page4 calibrate {ENVELOPE} REPORT .. for that"
        raise UsageError(message("REPORT", allowed=f"none after {model}", got=str(reports[0]), do=do))
    if prompts is None:
        raise UsageError(message("--prompts", allowed="a JSONL file", got="none", do="name the samples"))
    folder = models.resolve(model, revision)

    from page4.scales.calibrate import CalibrationOptions
    from page4.scales.samples import parse_mix

    options = CalibrationOptions(
        rule=rule,
        max_seq_length=max_seq_length,
        num_samples=num_samples,
        seed=seed,
        batch_size=batch_size,
        dtype=dtype.value,
        shard_size=shard_size,
        mix={} if mix is None else parse_mix(mix),
    )
    result = run(folder, prompts, out, options, restart=restart)
    if json:
        return console.print_json(result.report)
    show(result.report, out)


def check_envelope_flags(context: typer.Context) -> None:
    """Refuse flags that an envelope would ignore."""
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name not in ENVELOPE_FLAGS and source is not None and source.name == "COMMANDLINE":
            allowed = "--out, --restart and --json"
            got, do = parameter.opts[0], "leave it out: the reports have settled it"
            raise UsageError(message(f"calibrate {ENVELOPE}", allowed=allowed, got=got, do=do))


def envelope(reports: list[Path], out: Path, *, restart: bool) -> dict[str, Any]:
    """The envelope of reports, written to `out`."""
    from page4.scales.envelope import write_envelope

    return write_envelope(reports, out, restart=restart)


def run(folder: Path, prompts: Path, out: Path, options: Any, *, restart: bool) -> Calibration:
    """Calibrate under a bar on stderr."""
    from page4.scales.calibrate import Progress
    from page4.scales.calibrate import calibrate as measure

    with console.counting_bar("calibrating") as bar:
        progress = Progress(on_start=bar.start, on_tokens=bar.advance)
        result = measure(folder, prompts, out, options, restart=restart, progress=progress)
    if result.resumed_shards:
        note = f"page4: note: {result.resumed_shards} of {result.shards} shards are those of an earlier run"
        console.stderr().print(note)
    return result


def show(report: Mapping[str, Any], out: Path) -> None:
    """One row for each layer and side, then what was counted."""
    from rich.table import Table

    columns = ("layer", "side", "max_abs", "scale", "clips", "rmse")
    table = Table(*columns, box=None)
    for tensor in sorted(report["tensors"].values(), key=lambda entry: (entry["layer"], entry["kind"])):
        clips = "-" if tensor["clipped"] is None else f"{tensor['clipped']} ({tensor['clip_rate']:.2g})"
        rmse = "-" if tensor["mse"] is None else f"{math.sqrt(tensor['mse']):.3g}"
        sides = (str(tensor["layer"]), tensor["kind"], f"{tensor['max_abs']:.6g}", f"{tensor['scale']:.6g}")
        table.add_row(*sides, clips, rmse)
    lines = console.stdout()
    lines.print(table)
    samples = report["samples"]
    lines.print(
        f"rule {report['rule']}: {samples['count']} samples, {report['tokens']} tokens, "
        f"{report['counted_forwards']} counted forwards, {samples['truncated']} samples cut"
    )
    if "envelope" in report:
        spread = max(tensor["spread"] for tensor in report["tensors"].values())
        lines.print(f"largest of {len(report['envelope']['reports'])} reports; max_abs differ by up to {spread:.2g}")
    else:
        lines.print(f"at another batch size max_abs may differ by {report['rounding']['max_abs_relative']:.0e}")
    lines.print(f"written: {out / 'calibration-report.json'}")

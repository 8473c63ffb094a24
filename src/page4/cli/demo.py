"""`page4 demo`: the main job on the embedded checkpoint, from calibration to text over E4M3 K/V with MTP."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from page4 import kernels
from page4.cli import console, flags, models, report
from page4.cli.demo_prompts import PROMPTS
from page4.cli.flags import option

if TYPE_CHECKING:
    from page4.cli.demo_steps import Built, LaneRun

MAX_PERPLEXITY_CHANGE = 0.005


def demo(
    out: Annotated[
        Path, option("--out", metavar="DIR", help="Folder of calibration, pack and overlay.", panel=flags.OUTPUT)
    ] = Path("page4-demo"),
    json: flags.Json = False,
) -> None:
    """Calibrate the embedded checkpoint, prove its scales and compare E4M3 K/V + MTP with 16-bit K/V.

    Exit code 1 when a check fails.
    """
    from page4.cli.demo_steps import DRAFTS, build, run_lane

    base = models.embedded()
    built = build(base, out)
    lanes = {}
    for name, e4m3, drafts in (
        ("16-bit", False, 0),
        ("16-bit", False, DRAFTS),
        ("E4M3", True, 0),
        ("E4M3", True, DRAFTS),
    ):
        with console.spinner(f"generating with {name} K/V, {drafts} drafts"):
            lanes[name, drafts] = run_lane(built.folder, drafts=drafts, e4m3=e4m3, score=drafts > 0)
    found = as_object(built, lanes)
    if json:
        console.print_json(found)
    else:
        show(built, lanes, found)
    if not found["pass"]:
        raise typer.Exit(1)


Lanes = dict[tuple[str, int], "LaneRun"]


def as_object(built: Built, lanes: Lanes) -> dict[str, Any]:
    """The JSON of the demo; `pass` is the verdict over all of `checks`."""
    from page4.cli.demo_steps import DRAFTS

    plain, e4m3 = lanes["16-bit", DRAFTS], lanes["E4M3", DRAFTS]
    assert plain.perplexity is not None and e4m3.perplexity is not None, "both lanes were scored"
    change = e4m3.perplexity / plain.perplexity - 1
    checks = {
        "overlay_verified": not built.findings.faults,
        "scales_take_effect": not built.effect.faults,
        "mtp_tokens_equal_16bit": lanes["16-bit", 0].token_ids == plain.token_ids,
        "mtp_tokens_equal_e4m3": lanes["E4M3", 0].token_ids == e4m3.token_ids,
        "perplexity_change_within_limit": abs(change) <= MAX_PERPLEXITY_CHANGE,
    }
    return {
        "pass": all(checks.values()),
        "checks": checks,
        "overlay": str(built.folder),
        "layers": layers_object(built, e4m3),
        "perplexity": {"16-bit": plain.perplexity, "e4m3": e4m3.perplexity, "change": change},
        "lanes": {
            f"{name}, {drafts} drafts": {
                "tokens_per_target_step": run.tokens_per_step,
                "acceptance_per_position": run.acceptance,
                "decode_tokens_per_s": run.decode_tokens_per_s,
                "kv_bytes_per_token": run.kv_bytes_per_token,
            }
            for (name, drafts), run in lanes.items()
        },
        "faults": [*(f"{f.code}: {f.where}: {f.what}" for f in built.findings.faults), *built.effect.faults],
        "outputs": report.outputs_object(e4m3.results),
    }


def layers_object(built: Built, served: LaneRun) -> list[dict[str, Any]]:
    """One entry for each scale: where it is, what it does, what it costs."""
    measured = {(t["layer"], t["kind"]): t for t in built.calibration["tensors"].values()}
    clips = {(entry.layer, entry.side): entry.clipped for entry in served.kv}
    return [
        {
            "layer": entry.layer,
            "side": entry.side,
            "max_abs": measured[entry.layer, entry.side]["max_abs"],
            "scale": entry.scale,
            "clipped": clips[entry.layer, entry.side],
            "rmse": math.sqrt(measured[entry.layer, entry.side]["mse"]),
            "attention_error": entry.error,
            "takes_effect": not entry.faults,
        }
        for entry in built.effect.scales
    ]


def show(built: Built, lanes: Lanes, found: dict[str, Any]) -> None:
    """What was built, prompts dim and new text bold, then the tables and the verdict."""
    from page4.cli.demo_steps import DRAFTS

    out = console.stdout()
    sizes = f"{built.calibration['samples']['count']} samples, {built.calibration['tokens']} tokens"
    out.print(f"calibrated: {sizes}, rule {built.calibration['rule']}", style="cyan")
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in built.findings.counts.items())
    out.print(f"overlay: {built.folder} ({counts})", style="cyan")
    best = lanes["E4M3", DRAFTS]
    for number, (prompt, result) in enumerate(zip(PROMPTS, best.results, strict=True)):
        completion = result.outputs[0]
        sizes = f"{len(result.prompt_token_ids)} tokens in, {len(completion.token_ids)} out, {completion.finish_reason}"
        out.print(f"--- prompt {number + 1} of {len(PROMPTS)}, E4M3 K/V, {DRAFTS} drafts: {sizes}", style="cyan")
        out.print(prompt, style="dim", end="")
        out.print(completion.text, style="bold")
    show_tables(lanes, found)
    for name, passed in found["checks"].items():
        out.print(f"{name.replace('_', ' ')}: {'yes' if passed else 'NO'}", style="green" if passed else "bold red")
    for fault in found["faults"]:
        out.print(f"fault: {fault}")
    out.print(f"the overlay is {built.folder}; serve it with", style="cyan")
    mtp = f'{{"method":"mtp","num_speculative_tokens":{DRAFTS}}}'
    out.print(
        f"  page4 generate {built.folder} 'import os' --kv-cache-dtype fp8 --e4m3-mtp --speculative-config '{mtp}'"
    )


def show_tables(lanes: Lanes, found: dict[str, Any]) -> None:
    """A row for each scale, and a row for each lane."""
    from page4.cli.doctor import make_table

    out = console.stdout()
    rows = [
        [
            str(entry["layer"]),
            entry["side"],
            f"{entry['max_abs']:.6g}",
            f"{entry['scale']:.6g}",
            str(entry["clipped"]),
            f"{entry['rmse']:.3g}",
            f"{entry['attention_error']:.2%}",
            "yes" if entry["takes_effect"] else "NO",
        ]
        for entry in found["layers"]
    ]
    columns = ["layer", "side", "max_abs", "scale", "clips", "rmse", "error", "effect"]
    out.print(make_table("scales (error: of attention, against unquantised K/V)", columns, rows))
    rows = [
        [
            name,
            str(drafts),
            "-" if run.perplexity is None else f"{run.perplexity:.4f}",
            f"{run.tokens_per_step:.2f}",
            " ".join(f"{share:.2f}" for share in run.acceptance) or "-",
            f"{run.decode_tokens_per_s:.0f}",
            str(run.kv_bytes_per_token),
        ]
        for (name, drafts), run in lanes.items()
    ]
    columns = ["K/V", "drafts", "ppl", "tokens/step", "acceptance", "tokens/s", "bytes"]
    out.print(make_table("lanes (bytes: of K/V for a token of context)", columns, rows))
    if not kernels.compiled_refusal():
        out.print("On a CPU 16-bit K/V have no compiled kernel: the speeds do not compare the formats.", style="dim")
    change, limit = found["perplexity"]["change"], MAX_PERPLEXITY_CHANGE
    out.print(f"perplexity with E4M3 K/V: {change:+.3%} against 16-bit K/V (at most {limit:.1%} either way)")

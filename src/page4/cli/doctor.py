"""`page4 doctor`: what this machine has, which route serves which shape, and what is off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from page4.cli import console, flags, machine

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def doctor(json: flags.Json = False) -> None:
    """Show versions, devices, which route serves which shape and why not the others, and what is off."""
    report = examine()
    if json:
        console.print_json(report)
    else:
        show(report, console.stdout())


def examine() -> dict[str, Any]:
    """Everything that doctor reports, as one JSON object."""
    from page4.cli import routes  # needs torch

    return {
        "versions": machine.versions(),
        "devices": machine.devices(),
        "environment": machine.environment(),
        "checkpoint": machine.embedded_checkpoint(),
        "routes": routes.table(),
        "off": machine.features_off(),
    }


def show(report: dict[str, Any], out: Console) -> None:
    """The report as tables."""
    show_pairs(out, "versions", {name: value or "not installed" for name, value in report["versions"].items()})
    for device in report["devices"]:
        show_pairs(out, device["name"], {key: words(value) for key, value in device.items() if key != "name"})
    show_pairs(out, "embedded checkpoint", {key: words(value) for key, value in report["checkpoint"].items()})
    rows = [[entry["name"], words(entry["value"]), entry["source"], entry["help"]] for entry in report["environment"]]
    out.print(make_table("environment", ["variable", "value", "from", "meaning"], rows))
    show_routes(out, report["routes"])
    show_pairs(out, "off", report["off"])


def show_routes(out: Console, entries: list[dict[str, Any]]) -> None:
    """Which route serves which step; shapes and types that share every answer stand above the table."""
    shapes = {(entry["device"], tuple(entry["shapes"]), tuple(entry["kv_dtypes"])) for entry in entries}
    for device, served, kv_dtypes in sorted(shapes):
        title = (
            f"routes of attend on {device}, for heads/KV heads x dim {', '.join(served)} and K/V {', '.join(kv_dtypes)}"
        )
        rows = [
            [entry["step"], entry["route"], entry["why"], "; ".join(f"{k}: {v}" for k, v in entry["others"].items())]
            for entry in entries
            if entry["device"] == device
        ]
        out.print(make_table(title, ["step", "route", "why", "why not the others"], rows))


def show_pairs(out: Console, title: str, pairs: dict[str, str]) -> None:
    """A table of two columns."""
    out.print(make_table(title, ["", ""], [[key, value] for key, value in pairs.items()], header=False))


def make_table(title: str, columns: list[str], rows: list[list[str]], *, header: bool = True) -> Table:
    """A plain table; cells are literal text."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left", title_style="bold", show_header=header, box=SIMPLE)
    for row in rows:
        table.add_row(*row)
    return table


def words(value: Any) -> str:
    """A value of the report for people."""
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)

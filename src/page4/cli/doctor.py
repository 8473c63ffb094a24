"""`page4 doctor`: what this machine has, which route serves which shape, and what is off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from page4 import kernels
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
        "kernels": kernels.table(),
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
    rows = [[entry["op"], entry["route"], entry["device"], entry["kernel"]] for entry in report["kernels"]]
    out.print(make_table("kernels", ["operation", "route", "device", "kernel"], rows))
    show_routes(out, report["routes"])
    show_pairs(out, "off", report["off"])


def show_routes(out: Console, entries: list[dict[str, Any]]) -> None:
    """Which route serves which step; entries that share device, shapes and types share a table."""
    groups: dict[str, list[list[str]]] = {}
    for entry in entries:
        where = f"{entry['device']}, heads/KV heads x dim {words(entry['shapes'])}, K/V {words(entry['kv_dtypes'])}"
        against = "\n".join(f"{name}: {reason}" for name, reason in entry["others"].items())
        served = entry["route"] is not None
        row = [entry["step"] if served else "any step", entry["route"] or "none", entry["why"], against]
        rows = groups.setdefault(where, [])
        if row not in rows:
            rows.append(row)
    for where, rows in groups.items():
        out.print(make_table(f"routes of attend on {where}", ["step", "route", "why", "why not the others"], rows))


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

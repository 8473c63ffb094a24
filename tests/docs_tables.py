"""The tables in README.md that follow the code. `python -m tests.docs_tables` rewrites them; test_docs.py compares."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from page4 import env
from page4.cli.app import build

README = Path(__file__).parent.parent / "README.md"
SECTION = re.compile(r"(<!-- begin (?P<name>[\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(columns: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (columns, ["---"] * len(columns), *rows)]
    return "".join(line + "\n" for line in lines)


def literal(text: str) -> str:
    return f"`{text}`" if text else ""


def flag_rows(verb: Any) -> list[list[str]]:
    """Flag, default and meaning of every option of a verb, from the parameters that `--help` prints."""
    rows = []
    for parameter in verb.params:
        if parameter.param_type_name == "argument" or "--help" in parameter.opts:
            continue
        value = "" if parameter.is_flag else f" {parameter.metavar}"
        default = "" if parameter.default is None or parameter.is_flag else parameter.default
        shown = str(getattr(default, "value", default))
        rows.append([literal(parameter.opts[0] + value), literal(shown), parameter.help.replace("|", "\\|")])
    return rows


def sections() -> dict[str, str]:
    """The generated text of every section, by name."""
    commands = build().commands
    found = {"verbs": table(["verb", "what it does"], [[literal(n), c.help] for n, c in commands.items()])}
    for name, command in commands.items():
        found[f"flags {name}"] = table(["flag", "default", "meaning"], flag_rows(command))
    rows = [
        [literal(v.name), literal(v.default), v.allowed, v.help, ", ".join(literal(alias) for alias in v.aliases)]
        for v in env.VARIABLES
    ]
    found["environment"] = table(["variable", "default", "values", "meaning", "also read as"], rows)
    return found


def rewrite(text: str) -> str:
    """`text` with every marked section filled in."""
    contents = sections()
    return SECTION.sub(lambda match: match.group(1) + contents[match.group("name")] + match.group(3), text)


if __name__ == "__main__":
    README.write_text(rewrite(README.read_text()))

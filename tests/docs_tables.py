"""The tables in README.md that follow the code. `python -m tests.docs_tables` rewrites them; test_docs.py compares."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from page4 import env
from page4.cli.app import build

README = Path(__file__).parent.parent / "README.md"
RESULTS = README.parent / "benchmarks" / "results"
SECTION = re.compile(r"(<!-- begin (?P<name>[\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(columns: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (columns, ["---"] * len(columns), *rows)]
    return "".join(line + "\n" for line in lines)


def literal(text: str) -> str:
    return f"`{text}`" if text else ""


def verbs(group: Any, before: str = "") -> dict[str, Any]:
    """Every command by the words that call it; a group stands for its commands."""
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        found |= {before + name: command} if inner is None else verbs(command, f"{before}{name} ")
    return found


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


def speed() -> str:
    """The saved benchmark results: what they were measured on, then a table each."""
    parts = []
    for path in sorted(RESULTS.glob("cpu-*.json")):
        result = json.loads(path.read_text())
        versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
        parts.append(
            f"{result['date'][:10]}, commit {result['commit']}: {result['cpu']}, {result['threads']} threads, "
            f"{result['dtype']}, Python {result['python']}, {versions}; `{result['command']}`:\n\n"
            + table(["measurement", "transformers", "page4, k = 0", "page4, k = 3", "tokens equal"], speed_rows(result))
        )
        if "memory" in result:
            memory = result["memory"]
            parts[-1] += (
                f"\nPeak memory of {memory['requests']} prompts of {memory['prompt_tokens']} tokens together: "
                f"{memory['peak_above_imports_bytes'] / 2**20:.0f} MiB above an interpreter with its imports, "
                f"{memory['ratio']:.2f}x weights + arena.\n"
            )
    return "\n".join(parts) or "No result has been saved yet.\n"


def speed_rows(result: dict[str, Any]) -> list[list[str]]:
    names = {
        "prefill": ("prefill of {prefill_tokens} tokens", "tokens_per_s"),
        "decode": ("greedy decode, 1 request", "tokens_per_s"),
        "together": ("{together_requests} requests, prompt to last token", "output_tokens_per_s"),
    }
    rows = []
    for section, (title, key) in names.items():
        if section in result:
            part = result[section]
            cells = [f"{part['transformers'][key]:.0f} tokens/s"]
            cells += [f"{part[f'page4_{k}'][key]:.0f} tokens/s ({part['ratio'][k]:.2f}x)" for k in ("k0", "k3")]
            rows.append([title.format(**result["sizes"]), *cells, "yes" if part["tokens_equal"] else "no"])
    return rows


def select_speed() -> str:
    """Both saved runs of the selection on a GPU, side by side."""
    paths = sorted(RESULTS.glob("select-*.json"))
    if not paths:
        return "No result has been saved yet.\n"
    runs = [json.loads(path.read_text()) for path in paths]
    first = runs[0]
    where = f"{first['device']}, driver {first['driver']}, torch {first['torch']}, Triton {first['triton']}"
    columns = ["case", "select", "its scores alone", "scores alone of vLLM 0.33.0", "bound"]
    keys = ("select us", "score only us", "vllm score only us", "floor us")
    rows = [
        [records[0]["case"], *(" / ".join(f"{record[key]:.1f}" for record in records) for key in keys)]
        for records in zip(*(run["records"] for run in runs), strict=True)
    ]
    title = f"{first['date']}: {where}; `{first['command']}`, {len(runs)} runs, one call a CUDA graph, microseconds:"
    return f"{title}\n\n" + table(columns, rows)


def sections() -> dict[str, str]:
    """The generated text of every section, by name."""
    commands = verbs(build())
    found = {"verbs": table(["verb", "what it does"], [[literal(n), c.help] for n, c in commands.items()])}
    for name, command in commands.items():
        found[f"flags {name}"] = table(["flag", "default", "meaning"], flag_rows(command))
    rows = [
        [literal(v.name), literal(v.default), v.allowed, v.help, ", ".join(literal(alias) for alias in v.aliases)]
        for v in env.VARIABLES
    ]
    found["environment"] = table(["variable", "default", "values", "meaning", "also read as"], rows)
    found["speed"] = speed()
    found["select speed"] = select_speed()
    return found


def rewrite(text: str) -> str:
    """`text` with every marked section filled in."""
    contents = sections()
    return SECTION.sub(lambda match: match.group(1) + contents[match.group("name")] + match.group(3), text)


if __name__ == "__main__":
    README.write_text(rewrite(README.read_text()))

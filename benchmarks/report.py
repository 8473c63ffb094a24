"""A result of `generate.py` as a table."""

from __future__ import annotations

from typing import Any

SPEEDS = {"prefill": "tokens_per_s", "decode": "tokens_per_s", "together": "output_tokens_per_s"}


def equalities(result: dict[str, Any]) -> list[bool]:
    """Whether the tokens agreed, for each measurement that compares them."""
    return [result[name]["tokens_equal"] for name in SPEEDS if name in result]


def table(result: dict[str, Any]) -> str:
    """Lines for people; the JSON holds more."""
    lines = [f"{result['cpu']}, {result['threads']} threads, {result['dtype']}, {result['date']}"]
    for name, key in SPEEDS.items():
        if name not in result:
            continue
        section = result[name]
        lines.append(f"{name} (tokens equal: {'yes' if section['tokens_equal'] else 'NO'})")
        for side, figures in section.items():
            if isinstance(figures, dict) and key in figures:
                ratio = section.get("ratio", {}).get(side.removeprefix("page4_"))
                times = f"{ratio:.2f}x" if ratio is not None else ""
                lines.append(f"  {side:14} {figures[key]:>9.1f} tokens/s  {times}")
    if "memory" in result:
        part = result["memory"]
        peak = part["peak_above_imports_bytes"] / 2**20
        lines.append(f"memory: {peak:.0f} MiB above imports, {part['ratio']:.2f}x weights + arena")
    return "\n".join(lines)

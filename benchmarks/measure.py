"""The four measurements of `generate.py`."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import prompts
from lane import Lane
from timing import in_turn, summary

KS = (0, 3)


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens and counts of the measurements."""

    prefill_tokens: int = 2048
    decode_prompt_tokens: int = 512
    decode_tokens: int = 128
    together_requests: int = 8
    together_prompt_tokens: int = 256
    together_tokens: int = 128
    memory_prompt_tokens: int = 2048
    repeats: int = 3

    @classmethod
    def quick(cls) -> Sizes:
        """Sizes that only show that the script runs."""
        return cls(512, 128, 16, 4, 64, 16, 256, 1)


def measure(
    folder: Path, dtype: str, sizes: Sizes, threads: int, against: str, only: list[str] | None
) -> dict[str, Any]:
    """Run the measurements named in `only` (all of them when None)."""
    wanted = only or ["prefill", "decode", "together", "memory"]
    ids = prompts.tokens(folder)
    result: dict[str, Any] = {}
    if set(wanted) - {"memory"}:
        longest = max(sizes.prefill_tokens + 8, sizes.decode_prompt_tokens + sizes.decode_tokens + 8)
        lanes = {k: Lane(folder, dtype, k, max_model_len=longest) for k in KS}
        peer = None
        if against == "transformers":
            from peer_transformers import Peer

            peer = Peer(folder, dtype)
        for name, run in (("prefill", prefill), ("decode", decode), ("together", together)):
            if name in wanted:
                result[name] = run(lanes, peer, ids, sizes)
    if "memory" in wanted:
        result["memory"] = memory(folder, dtype, sizes, threads)
    return result


def prefill(lanes: dict[int, Lane], peer: Any, ids: list[int], sizes: Sizes) -> dict[str, Any]:
    """Tokens a second of one long prompt."""
    prompt = prompts.window(ids, sizes.prefill_tokens)
    sides: dict[str, Callable[[], Any]] = {
        f"page4_k{k}": partial(lane.generate, prompt, 1) for k, lane in lanes.items()
    }
    if peer is not None:
        sides["transformers"] = partial(peer.prefill, prompt)
    timed = in_turn(sides, repeats=sizes.repeats)
    figures = {
        name: {**summary(times), "tokens_per_s": round(len(prompt) / statistics.median(times), 1)}
        for name, (times, _) in timed.items()
    }
    return {
        **figures,
        **compared({name: [value] for name, (_, value) in timed.items()}),
        **ratios(figures, "tokens_per_s"),
    }


def decode(lanes: dict[int, Lane], peer: Any, ids: list[int], sizes: Sizes) -> dict[str, Any]:
    """Tokens a second of one greedy request after its prompt."""
    prompt = prompts.window(ids, sizes.decode_prompt_tokens)
    count = sizes.decode_tokens
    sides: dict[str, Any] = {f"page4_k{k}": lane for k, lane in lanes.items()}
    if peer is not None:
        sides["transformers"] = peer
    actions: dict[str, Callable[[], Any]] = {}
    for name, side in sides.items():
        actions[f"{name} short"] = partial(side.generate, prompt, 1)
        actions[f"{name} long"] = partial(side.generate, prompt, count + 1)
    before = {k: lane.counters() for k, lane in lanes.items()}
    timed = in_turn(actions, repeats=sizes.repeats)
    figures: dict[str, Any] = {}
    for name in sides:
        short, long = (statistics.median(timed[f"{name} {kind}"][0]) for kind in ("short", "long"))
        figures[name] = {
            **summary(timed[f"{name} long"][0]),
            "prompt_and_first_token_s": round(short, 4),
            "ms_per_token": round(1000 * (long - short) / count, 3),
            "tokens_per_s": round(count / (long - short), 1),
        }
    for k, lane in lanes.items():
        if k:
            figures[f"page4_k{k}"]["drafts"] = drafts(before[k], lane.counters(), sizes.repeats + 1, count)
    texts = {name: [timed[f"{name} long"][1]] for name in sides}
    return {**figures, **compared(texts), **ratios(figures, "tokens_per_s")}


def drafts(before: dict[str, Any], after: dict[str, Any], runs: int, count: int) -> dict[str, Any]:
    """Acceptance over `runs` equal runs of `count` decoded tokens (the short runs decode nothing)."""
    accepted = after["accepted"] - before["accepted"]
    drafted = after["drafted"] - before["drafted"]
    windows = runs * count - accepted
    first = before["accepted_per_position"] or [0] * len(after["accepted_per_position"])
    positions = [now - then for now, then in zip(after["accepted_per_position"], first, strict=True)]
    return {
        "drafted": drafted // runs,
        "accepted": accepted // runs,
        "tokens_per_target_step": round(runs * count / windows, 3) if windows else None,
        "acceptance_per_position": [round(value / windows, 3) for value in positions] if windows else [],
    }


def together(lanes: dict[int, Lane], peer: Any, ids: list[int], sizes: Sizes) -> dict[str, Any]:
    """Eight requests from prompt to last token: page4 runs them together, the peer one after another."""
    batch = prompts.windows(ids, sizes.together_prompt_tokens, sizes.together_requests)
    count = sizes.together_tokens
    sides: dict[str, Callable[[], Any]] = {
        f"page4_k{k}": partial(lane.generate_all, batch, count) for k, lane in lanes.items()
    }
    if peer is not None:
        sides["transformers"] = partial(peer.generate_each, batch, count)
    # The peer takes half a minute a round: the machine's noise is small beside that.
    timed = in_turn(sides, repeats=min(sizes.repeats, 2))
    figures = {
        name: {**summary(times), "output_tokens_per_s": round(len(batch) * count / statistics.median(times), 1)}
        for name, (times, _) in timed.items()
    }
    return {
        **figures,
        **compared({name: value for name, (_, value) in timed.items()}),
        **ratios(figures, "output_tokens_per_s"),
    }


def ratios(figures: dict[str, Any], key: str) -> dict[str, Any]:
    """Ours over the peer's, for each k; empty without a peer."""
    if "transformers" not in figures:
        return {}
    base = figures["transformers"][key]
    return {"ratio": {f"k{k}": round(figures[f"page4_k{k}"][key] / base, 2) for k in KS}}


def compared(texts: dict[str, list[list[int]]]) -> dict[str, Any]:
    """Whether every side wrote the same tokens, and where the first difference is."""
    names = list(texts)
    differences = []
    for name in names[1:]:
        for number, (ours, theirs) in enumerate(zip(texts[names[0]], texts[name], strict=True)):
            if ours != theirs:
                place = next(
                    (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
                    min(len(ours), len(theirs)),
                )
                differences.append({"sides": [names[0], name], "request": number, "first_token": place})
    return {"tokens_equal": not differences, **({"differences": differences} if differences else {})}


def memory(folder: Path, dtype: str, sizes: Sizes, threads: int) -> dict[str, Any]:
    """Peak memory of page4 alone, in a process of its own."""
    script = Path(__file__).with_name("peak_memory.py")
    command = [sys.executable, str(script), str(folder), dtype, str(sizes.memory_prompt_tokens), str(threads)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        raise SystemExit(f"peak_memory.py failed:\n{child.stderr}")
    value: dict[str, Any] = json.loads(child.stdout)
    return value

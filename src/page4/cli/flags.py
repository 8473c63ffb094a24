"""The flags of a lane, spelled and meant as in `vllm serve`, and the values that they take."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from page4.errors import UsageError, message

# Lower case counts in thousands and upper case in 1024s, as vLLM reads them.
SUFFIXES = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}
NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmgtKMGT]?)")


class DType(str, Enum):
    """Values of `--dtype`."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class KVCacheDType(str, Enum):
    """Values of `--kv-cache-dtype` and `--draft-kv-dtype`."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    fp8 = "fp8"
    fp8_e4m3 = "fp8_e4m3"


def human_int(text: str | int) -> int:
    """A whole number with an optional suffix: `32k` = 32000, `32K` = 32768, `1.5k` = 1500."""
    match = NUMBER.fullmatch(str(text).strip())
    if match is None:
        raise typer.BadParameter(f"expected a number such as 4096, 32k (= 32000) or 32K (= 32768), got {text!r}")
    digits, suffix = match.groups()
    value = Decimal(digits) * SUFFIXES[suffix]
    if value != int(value):
        raise typer.BadParameter(f"expected a whole number, got {text!r} = {value}")
    return int(value)


def speculative_config(text: str | None) -> dict[str, Any] | None:
    """The object in `--speculative-config`; its keys and the limits of k belong to the engine."""
    if text is None:
        return None
    example = """use '{"method":"mtp","num_speculative_tokens":3}'"""
    flag = "--speculative-config"
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(message(flag, allowed="a JSON object", got=f"{text!r} ({error})", do=example)) from None
    if not isinstance(value, dict):
        raise UsageError(message(flag, allowed="a JSON object", got=text, do=example))
    return value


def option(*names: str, help: str, panel: str, **more: Any) -> Any:
    """A typer option in a named panel of the help page."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


PROMPTS, SAMPLING, LANE, OUTPUT = "Prompts", "Sampling", "Lane", "Output"
Number = {"parser": human_int, "metavar": "N"}

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A local folder, org/name or org/name@revision on the hub, or tiny: the checkpoint inside the package.",
        show_default=False,
    ),
]
Revision = Annotated[
    str | None, option("--revision", metavar="NAME", help="Branch, tag or commit of a hub MODEL.", panel=LANE)
]
Weights = Annotated[
    DType,
    option(
        "--dtype",
        metavar="TYPE",
        help="Weights and activations: auto (float32 on a CPU), float32, bfloat16 or float16.",
        panel=LANE,
    ),
]
KVCache = Annotated[
    KVCacheDType,
    option(
        "--kv-cache-dtype",
        metavar="TYPE",
        help="Keys and values: auto (as --dtype), bfloat16, float16, fp8 or fp8_e4m3 (both are E4M3).",
        panel=LANE,
    ),
]
DraftKV = Annotated[
    KVCacheDType | None,
    option(
        "--draft-kv-dtype",
        metavar="TYPE",
        help="Keys and values of the draft layer, when not as --kv-cache-dtype; auto keeps them as --dtype.",
        panel=LANE,
    ),
]
UnitScales = Annotated[
    bool,
    option(
        "--allow-unit-scales", help="Run E4M3 at scale 1.0 where the checkpoint has no calibrated scales.", panel=LANE
    ),
]
PrototypeScales = Annotated[
    bool,
    option(
        "--allow-prototype-scales",
        help="Run with draft scales that nobody measured (marked prototype: in the overlay).",
        panel=LANE,
    ),
]
E4M3MTP = Annotated[
    bool,
    option("--e4m3-mtp", help="Admit drafts over E4M3 K/V, a lane that holds no qualification yet.", panel=LANE),
]
Speculative = Annotated[
    str | None,
    option(
        "--speculative-config",
        metavar="JSON",
        help="""Drafts: '{"method":"mtp","num_speculative_tokens":3}'.""",
        panel=LANE,
    ),
]
MaxModelLen = Annotated[
    int | None, option("--max-model-len", help="Longest prompt plus output, in tokens.", panel=LANE, **Number)
]
MaxBatched = Annotated[
    int,
    option(
        "--max-num-batched-tokens", help="Rows in a step; longer prompts are cut into chunks.", panel=LANE, **Number
    ),
]
MaxSeqs = Annotated[int, option("--max-num-seqs", help="Requests that run together.", panel=LANE, **Number)]
KVBytes = Annotated[
    int | None,
    option("--kv-cache-memory-bytes", help="Size of the arena (keys, values, states).", panel=LANE, **Number),
]
BlockSize = Annotated[int, option("--block-size", metavar="N", help="Tokens in a page, a multiple of 4.", panel=LANE)]
Device = Annotated[
    str, option("--device", metavar="NAME", help="Where the lane runs: cpu, cuda or cuda:N.", panel=LANE)
]
Json = Annotated[bool, option("--json", help="Print one JSON object on stdout.", panel=OUTPUT)]
PromptFile = Annotated[
    list[Path] | None,
    option("--prompt-file", metavar="FILE", help="Read a prompt from a UTF-8 file; may be repeated.", panel=PROMPTS),
]

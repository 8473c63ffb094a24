"""The PAGE4_* environment variables: one table, typed reading, errors with the nearest name.

A variable is read when it is asked for, so a test or a caller may change it at run time. A bad value is an error,
never a default; so is a PAGE4_* name that is not in the table (see `check`).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, overload

from page4.errors import UsageError, message

PREFIX = "PAGE4_"


@dataclass(frozen=True)
class Variable:
    """One row of the table; `parse` returns the value or raises ValueError."""

    name: str
    default: str
    allowed: str
    parse: Callable[[str], object]
    help: str
    aliases: tuple[str, ...] = ()


def _parse_kernels(text: str) -> str:
    if text not in ("auto", "torch", "reference", "triton"):
        raise ValueError(text)
    return text


def _parse_switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def _parse_poison(text: str) -> int | None:
    if text == "off":
        return None
    byte = int(text, 0)
    if not 0 <= byte <= 0xFF:
        raise ValueError(text)
    return byte


def _parse_threads(text: str) -> int | None:
    if text == "auto":
        return None
    threads = int(text)
    if not 1 <= threads <= 1024:
        raise ValueError(text)
    return threads


VARIABLES: tuple[Variable, ...] = (
    Variable("PAGE4_KERNELS", "auto", "auto, torch, reference or triton", _parse_kernels,
             "torch leaves out compiled and GPU kernels, reference runs every operation on its readable truth, "
             "triton leaves out compiled ones and runs Triton's, on a CPU in its interpreter"),
    Variable("PAGE4_POISON", "off", "off or a byte from 0x00 to 0xFF", _parse_poison,
             "fill the arena with this byte at start and a page whenever it changes owner"),
    Variable("PAGE4_GROUPED", "1", "0 or 1", _parse_switch,
             "allow the grouped route of attend", ("VLLM_SM70_QSA_GROUPED_PAGE4",)),
    Variable("PAGE4_PLAN_REPOINT", "1", "0 or 1", _parse_switch,
             "point the padding entries of a grouped plan at the group's first real block",
             ("VLLM_SM70_QSA_GROUPED_PAD_FIX",)),
    Variable("PAGE4_E4M3_MTP", "0", "0 or 1", _parse_switch,
             "admit MTP over E4M3 K/V without a qualification", ("VLLM_QWEN4EXP_QSA_E4M3_MTP",)),
    Variable("PAGE4_THREADS", "auto", "auto or a count from 1 to 1024", _parse_threads,
             "CPU threads that torch may use"),
)  # fmt: skip

_BY_SHORT_NAME = {variable.name.removeprefix(PREFIX): variable for variable in VARIABLES}


@overload
def get(name: Literal["KERNELS"]) -> str: ...
@overload
def get(name: Literal["POISON", "THREADS"]) -> int | None: ...
@overload
def get(name: Literal["GROUPED", "PLAN_REPOINT", "E4M3_MTP"]) -> bool: ...
def get(name: str) -> object:
    """The value of PAGE4_<name>, from the process environment, an alias or the default.

    Raises `UsageError` for a bad value, and when the variable and an alias say different things.
    """
    return read(_BY_SHORT_NAME[name], os.environ)


def read(variable: Variable, environ: Mapping[str, str]) -> object:
    """The parsed value of one variable in `environ`."""
    found = [(name, environ[name]) for name in (variable.name, *variable.aliases) if name in environ]
    parsed = [(name, text, _parse(variable, name, text)) for name, text in found]
    for name, text, value in parsed[1:]:
        if value != parsed[0][2]:
            first, first_text = parsed[0][:2]
            raise UsageError(
                message(name, allowed=f"{first_text!r} as in {first}", got=repr(text), do=f"unset {name} or {first}")
            )
    return parsed[0][2] if parsed else variable.parse(variable.default)


def _parse(variable: Variable, name: str, text: str) -> object:
    try:
        return variable.parse(text)
    except ValueError:
        do = f"unset {name} (default {variable.default}) or correct it"
        raise UsageError(message(name, allowed=variable.allowed, got=repr(text), do=do)) from None


def check(environ: Mapping[str, str] | None = None) -> None:
    """Refuse a bad value of any variable and any PAGE4_* name that page4 does not know."""
    environ = os.environ if environ is None else environ
    known = [variable.name for variable in VARIABLES]
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise UsageError(
                message("environment", allowed=f"one of {', '.join(known)}", got=name, do=f"did you mean {nearest}?")
            )
    for variable in VARIABLES:
        read(variable, environ)

"""Consoles: results on stdout, progress and figures on stderr, quiet where nobody looks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def stdout() -> Console:
    """The console of results; rich honours NO_COLOR and drops colour when stdout is no terminal."""
    from rich.console import Console

    return Console(file=sys.stdout, highlight=False, soft_wrap=True, markup=False, emoji=False)


def stderr() -> Console:
    """The console of progress and figures."""
    from rich.console import Console

    return Console(file=sys.stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on stdout and nothing else."""
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")


def print_text(text: str) -> None:
    """Text as it stands on stdout; what the terminal's encoding lacks becomes an escape instead of a failure."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))


@contextmanager
def step_bar(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, on a terminal only; the block calls what it gets with (done, all)."""
    with _bar(what, unit) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def token_bar(total_tokens: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, on a terminal only; the block calls what it gets with every count of new tokens."""
    with _bar("generating") as bar:
        task = bar.add_task("", total=total_tokens)
        yield lambda count: bar.advance(task, count)


def _bar(what: str, unit: str = "tokens") -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = stderr()
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@dataclass(frozen=True)
class CountingBar:
    """`start` says how many tokens there are, `advance` how many more are done."""

    start: Callable[[int], None]
    advance: Callable[[int], None]


@contextmanager
def counting_bar(what: str) -> Iterator[CountingBar]:
    """As `token_bar`, for work whose size is known only once it has begun."""
    with _bar(what) as bar:
        task = bar.add_task("", total=None)
        yield CountingBar(lambda total: bar.update(task, total=total), lambda count: bar.advance(task, count))


@contextmanager
def byte_bar(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, on a terminal only; the block calls what it gets with every count of bytes."""
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn

    console = stderr()
    columns = (SpinnerColumn(), TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total_bytes)
        yield lambda count: bar.advance(task, count)


@contextmanager
def spinner(what: str) -> Iterator[None]:
    """Show `what` on stderr while the block runs, on a terminal only."""
    console = stderr()
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield

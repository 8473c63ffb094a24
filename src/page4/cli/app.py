"""The typer application: the list of verbs, and what runs before each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from page4 import env
from page4.cli import scales
from page4.cli.calibrate import calibrate
from page4.cli.demo import demo
from page4.cli.doctor import doctor
from page4.cli.generate import generate
from page4.errors import UsageError, message

# Some versions of typer carry a copy of click, others use the installed one: take the class from its bases.
ClickError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

VERBS: dict[str, Callable[..., None]] = {"generate": generate, "calibrate": calibrate, "doctor": doctor, "demo": demo}

app = typer.Typer(
    name="page4",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Sparse attention over a paged E4M3 cache with exact MTP, for qwen4_exp checkpoints.",
)
for name, verb in VERBS.items():
    app.command(name)(verb)
GROUPS: dict[str, typer.Typer] = {"scales": scales.app}
for name, group in GROUPS.items():
    app.add_typer(group, name=name)


def show_version(wanted: bool) -> None:
    """Print the version of page4 and stop."""
    if wanted:
        from importlib.metadata import version

        typer.echo(f"page4 {version('page4')}")
        raise typer.Exit


@app.callback()
def before_every_verb(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Refuse an unusable environment before any verb does work."""
    del version  # its callback has acted
    env.check()


def build() -> Any:
    """The click command behind `page4`."""
    return typer.main.get_command(app)


def missing_command() -> UsageError:
    """The error of `page4` alone."""
    return UsageError(
        message("page4", allowed="a verb", got="none", do=f"use one of {', '.join((*VERBS, *GROUPS))} (page4 --help)")
    )

"""The documents tell the truth: tables follow the code, examples run, names and links exist."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
from tests import docs_tables

from page4.cli.app import build

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCK.findall(README) if name == language]


def test_generated_tables_follow_the_code() -> None:
    assert docs_tables.rewrite(README) == README, "run: python -m tests.docs_tables"


def test_every_generated_section_is_shown() -> None:
    shown = {match.group("name") for match in docs_tables.SECTION.finditer(README)}
    assert shown == docs_tables.sections().keys() - {"flags demo", "flags doctor"}


@pytest.mark.parametrize("source", blocks("python"))
def test_readme_examples_run(source: str) -> None:
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        exec(compile(source, "README.md", "exec"), {})
    assert "length" in written.getvalue() or "stop" in written.getvalue()


def test_readme_commands_have_flags_that_exist() -> None:
    commands = docs_tables.verbs(build())
    lines = [line.partition("#")[0] for block in blocks("bash") for line in block.splitlines()]
    calls = [shlex.split(line) for line in lines if line.startswith("page4 ")]
    assert {call[1] for call in calls} >= {"generate", "doctor"}
    for call in calls:
        verb = call[1] if call[1] in commands else " ".join(call[1:3])
        known = {flag for parameter in commands[verb].params for flag in parameter.opts}
        assert {word for word in call if word.startswith("--")} <= known, call


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_readme_names_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z]+)", README, re.MULTILINE)) <= targets

"""docs/structure.md stays true: its list is the modules', its layers are those that lint-imports holds."""

from __future__ import annotations

import re
from pathlib import Path

from tools.structure import HEADING, PAGE, ROOT, modules

PACKAGE = ROOT / "src" / "page4"


def listed() -> dict[str, str]:
    text = PAGE.read_text(encoding="utf-8").split(HEADING)[1]
    return dict(re.findall(r"^- `([^`]+)`: (.*)$", text, flags=re.MULTILINE))


def test_every_module_is_listed_and_every_listed_one_exists() -> None:
    existing = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    missing, gone = existing - listed().keys(), listed().keys() - existing
    assert not missing and not gone, f"run python tools/structure.py; missing {missing}, gone {gone}"


def test_each_line_is_what_the_module_says_of_itself() -> None:
    assert listed() == modules(PACKAGE), "run python tools/structure.py"
    assert all(modules(PACKAGE).values()), "a module without a docstring"


def test_the_modules_of_the_request_life_exist() -> None:
    life = PAGE.read_text(encoding="utf-8").split(HEADING)[0]
    names = set(re.findall(r"`([a-z_/]+\.py)`", life))
    assert len(names) >= 8
    assert not {name for name in names if not (PACKAGE / name).is_file()}


def test_the_layers_of_the_page_are_those_of_the_linter() -> None:
    contract = Path(ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[[tool.importlinter.contracts]]")[1]
    rows = re.findall(r'"([^"]+)"', contract.split("layers = [")[1].split("]")[0])
    page = PAGE.read_text(encoding="utf-8")
    line = next(line.strip() for line in page.split("\n") if " > " in line and line.startswith("    "))
    assert re.split(r" > ", line) == [re.sub(r" [:|] ", ", ", row) for row in rows]

"""Writes the module list of docs/structure.md from the modules' docstrings: `python tools/structure.py`."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "structure.md"
HEADING = "## One line a module\n"


def modules(package: Path) -> dict[str, str]:
    """Every module under `package` by its path, with the first sentence of its docstring."""
    found = {}
    for path in sorted(package.rglob("*.py"), key=lambda path: (path.parent.as_posix(), path.name)):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found[path.relative_to(package).as_posix()] = " ".join(docstring.split("\n\n")[0].split())
    return found


def module_list(package: Path) -> str:
    """The list as it stands in the page."""
    return "".join(f"- `{name}`: {line}\n" for name, line in modules(package).items())


def main() -> None:
    """Replace everything after the heading."""
    before = PAGE.read_text(encoding="utf-8").split(HEADING)[0]
    PAGE.write_text(f"{before}{HEADING}\n{module_list(ROOT / 'src' / 'page4')}", encoding="utf-8")


if __name__ == "__main__":
    main()

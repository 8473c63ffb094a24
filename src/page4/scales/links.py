"""Where a link leads, step by step, as the kernel would walk it under a root of one's choice."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Literal, NamedTuple

MAX_LINKS = 40
State = Literal["file", "folder", "special", "dangling", "loop", "escape"]


class Walk(NamedTuple):
    """The end of a path: what is there, and where it is on this machine."""

    state: State
    path: Path


def walk(path: Path, root: Path = Path("/")) -> Walk:
    """Follow `path`, an absolute path at or below `root`, with `root` as the root folder.

    An absolute link starts again at `root`. `..` at the root stays there, as in a container: a path that did so and
    finds nothing is an escape, for it was meant to lead outside.
    """
    rest = list(reversed(path.relative_to(root).parts))
    current, links, left = root, 0, False
    while rest:
        part = rest.pop()
        if part == "..":
            left = left or (current == root and root != Path("/"))
            current = current if current == root else current.parent
            continue
        candidate = current / part
        try:
            text = link_text(candidate) if candidate.is_symlink() else None
            candidate.lstat()
        except OSError:
            return Walk("escape" if left else "dangling", candidate)
        if text is None:
            current = candidate
            continue
        links += 1
        if links > MAX_LINKS:
            return Walk("loop", candidate)
        current = root if text.startswith("/") else current
        rest.extend(part for part in reversed(text.split("/")) if part not in ("", "."))
    return Walk(_kind(current), current)


def link_text(path: Path) -> str:
    """What a link says, to the letter: `Path.readlink` would drop a `.`, a double slash and a slash at the end."""
    return os.fspath(os.readlink(path))  # noqa: PTH115


def _kind(path: Path) -> State:
    mode = path.lstat().st_mode
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "special"

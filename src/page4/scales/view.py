"""An overlay as it is seen from a root: every path is walked by our own rules before anything is opened."""

from __future__ import annotations

import os
from pathlib import Path

from page4.checkpoint.provenance import Provenance
from page4.errors import UsageError, message
from page4.scales.faults import Findings
from page4.scales.links import Walk, link_text, walk


class View:
    """Paths of the overlay `folder` and of its base, as from inside `root`."""

    def __init__(self, folder: Path, root: Path | None, findings: Findings) -> None:
        self.root = Path(os.path.realpath(root)) if root else Path("/")
        self.folder = _locate(folder, self.root)
        self.findings = findings
        self.base: Path | None = None
        self._seen: dict[str, Path | None] = {}

    def names(self) -> list[str]:
        """Every file and link of the overlay by relative path."""
        found: list[str] = []
        for path, folders, files in os.walk(self.folder):
            links = [name for name in folders if (Path(path) / name).is_symlink()]
            found += [(Path(path) / name).relative_to(self.folder).as_posix() for name in (*files, *links)]
        return sorted(found)

    def end(self, name: str) -> Walk:
        """Where a path of the overlay leads."""
        return walk(self.folder / name, self.root)

    def find_base(self, provenance: Provenance) -> None:
        """Set `base` from the provenance; a fault when it is not there."""
        if provenance.base.path is None:
            return
        found = walk(self.folder / provenance.base.path, self.root)
        if found.state == "folder":
            self.base = found.path
        else:
            code = "link-escape" if found.state == "escape" else "base-missing"
            self.findings.add(code, provenance.base.path, f"no folder at {found.path}")

    def base_end(self, name: str) -> Walk | None:
        """Where the base's own path of a file leads; None without a base."""
        return None if self.base is None else walk(self.base / name, self.root)

    def file(self, name: str, provenance: Provenance | None) -> Path | None:
        """The real path of a file that may be read, or None; the fault is recorded once."""
        if name not in self._seen:
            self._seen[name] = self._check(name, provenance)
        return self._seen[name]

    def _check(self, name: str, provenance: Provenance | None) -> Path | None:
        path = self.folder / name
        if not os.path.lexists(path):
            self.findings.add("file-missing", name, "nothing")
            return None
        is_link = path.is_symlink()
        if is_link and link_text(path).startswith("/"):
            self.findings.add("link-absolute", name, link_text(path))
        found = self.end(name)
        if found.state != "file":
            self._refuse(name, found, is_link=is_link)
            return None
        if self.folder not in found.path.parents and not self._is_of_base(name, found, provenance):
            return None
        return found.path

    def _refuse(self, name: str, found: Walk, *, is_link: bool) -> None:
        code = f"link-{found.state}" if found.state in ("dangling", "loop", "escape") else "file-unknown"
        self.findings.add(code if is_link else "file-unknown", name, f"{found.state} at {found.path}")

    def _is_of_base(self, name: str, found: Walk, provenance: Provenance | None) -> bool:
        """Whether a link that leaves the overlay ends where the base's own file of this name does."""
        own = self.base_end(name)
        if provenance is None:
            return False  # nothing says where the base is; that alone is a fault already, and nothing is opened
        if own is not None and own == found:
            return True
        inside = self.base is not None and self.base in found.path.parents
        self.findings.add("link-wrong" if inside else "link-escape", name, f"a link to {found.path}")
        return False


def _locate(folder: Path, root: Path) -> Path:
    """The overlay on this machine, named as seen from here or from inside `root`. Raises `UsageError`."""
    outside = Path(os.path.realpath(folder.absolute().parent)) / folder.name
    inside = root.joinpath(*folder.parts[1:]) if folder.is_absolute() else root / folder
    for place in (outside, inside):
        if place == root or root in place.parents:
            found = walk(place, root)
            if found.state == "folder":
                return found.path
    do = "name a folder in the root, as seen from outside or inside"
    raise UsageError(message(f"DIR {folder}", allowed=f"a folder inside --root {root}", got="none", do=do))

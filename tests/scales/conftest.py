"""One base, pack, report and overlay that the tests of this folder copy and break."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.scales.bases import make_base, make_pack, make_report

from page4.scales.overlay import build_overlay
from page4.scales.sources import Sources


@dataclass(frozen=True)
class World:
    """Paths of one set."""

    root: Path

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def pack(self) -> Path:
        return self.root / "pack"

    @property
    def report(self) -> Path:
        return self.root / "report.json"

    @property
    def overlay(self) -> Path:
        return self.root / "overlay"

    def build(self, name: str = "overlay", **options: Any) -> Path:
        """Build the overlay `name` from base, pack and report."""
        out = self.root / name
        build_overlay(self.base, self.pack, out, Sources(draft_report=self.report), **options)
        return out


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A base, a pack and a report, no overlay yet."""
    made = World(tmp_path / "world")
    make_base(made.base)
    make_pack(made.pack, made.base)
    make_report(made.report)
    return made


@pytest.fixture(scope="session")
def _built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = World(tmp_path_factory.mktemp("built") / "world")
    make_base(made.base)
    make_pack(made.pack, made.base)
    make_report(made.report)
    made.build()
    return made.root


@pytest.fixture
def built(_built: Path, tmp_path: Path) -> World:
    """The same with its overlay, moved together to a place of the test's own."""
    return World(Path(shutil.copytree(_built, tmp_path / "moved", symlinks=True)))

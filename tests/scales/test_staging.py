"""B27: folders appear whole or not at all, whatever kills the build, and the base is never written."""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from tests.scales.bases import PROVENANCE, TARGET, tree
from tests.scales.conftest import World

from page4.checkpoint import Checkpoint
from page4.checkpoint.binding import check_binding
from page4.errors import UsageError
from page4.scales import overlay as overlay_module
from page4.scales.staging import Stage, staged
from page4.scales.verify import verify_overlay

KILLS = 20
# Says when it starts to build, so that the kills fall into the build and not into the imports.
BUILD = """
import sys
from pathlib import Path
from page4.scales.overlay import build_overlay
from page4.scales.sources import Sources
root = Path(sys.argv[1])
print("start", flush=True)
build_overlay(root / "base", root / "pack", root / "overlay", Sources(draft_report=root / "report.json"), copy=True)
print("end", flush=True)
"""


@pytest.fixture(params=[0o077, 0o022], ids=["umask 077", "umask 022"])
def umask(request: pytest.FixtureRequest) -> Generator[int, None, None]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("copy", [False, True], ids=["links", "copy"])
def test_b27_modes_do_not_depend_on_the_umask(world: World, umask: int, copy: bool) -> None:
    out = world.build("new/inner/overlay", copy=copy)
    for path in [world.root / "new", *(world.root / "new").rglob("*")]:
        if not path.is_symlink():
            assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644), path
    assert verify_overlay(out).faults == []


@pytest.mark.parametrize("copy", [False, True], ids=["links", "copy"])
def test_b27_a_read_only_base_is_left_as_it_is(world: World, copy: bool) -> None:
    for path in [world.base / "assets", world.base]:
        path.chmod(0o555)
    before = tree(world.base)
    try:
        world.build(copy=copy)
        assert tree(world.base) == before
        assert verify_overlay(world.overlay).faults == []
    finally:
        for path in [world.base, world.base / "assets"]:
            path.chmod(0o755)


@pytest.mark.parametrize("target", ["base", "base/out", "base/new/out", ".", "pack", "pack/out", "report.json/out"])
@pytest.mark.parametrize("force", [False, True])
def test_b27_base_and_target_are_apart(world: World, target: str, force: bool) -> None:
    before = tree(world.root)
    with pytest.raises(UsageError, match=r"apart|empty"):
        world.build(target, force=force)
    assert tree(world.root) == before


def test_b27_the_base_through_a_link_is_still_the_base(world: World) -> None:
    (world.root / "alias").symlink_to("base")
    for target in ("alias", "alias/out"):
        with pytest.raises(UsageError):
            world.build(target, force=True)


def test_b27_a_target_with_files_needs_force(world: World) -> None:
    world.overlay.mkdir()
    (world.overlay / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="--force"):
        world.build()
    assert (world.overlay / "mine.txt").read_text() == "mine"
    world.build(force=True)
    assert not (world.overlay / "mine.txt").exists() and (world.overlay / PROVENANCE).exists()
    assert leftovers(world) == []


def test_an_empty_target_is_used(world: World) -> None:
    world.overlay.mkdir()
    world.build()
    check_binding(world.overlay)


@pytest.mark.parametrize("force", [False, True])
def test_a_file_or_link_is_no_target(world: World, force: bool) -> None:
    world.overlay.symlink_to("elsewhere")
    with pytest.raises(UsageError):
        world.build(force=force)
    with pytest.raises(UsageError):
        world.build("report.json", force=force)


def leftovers(world: World) -> list[str]:
    return [path.name for path in world.root.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("force", [False, True])
def test_b27_an_error_in_the_middle_leaves_nothing(world: World, monkeypatch: pytest.MonkeyPatch, force: bool) -> None:
    if force:
        world.build()
    before = tree(world.root)
    original = Stage.write

    def fail(stage: Stage, name: str, data: bytes) -> None:
        if name == overlay_module.INDEX_NAME:
            assert (stage.folder / TARGET).exists() and not (stage.folder / PROVENANCE).exists()
            raise OSError("the disk is full")
        original(stage, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(Stage, "write", fail)
        with pytest.raises(OSError, match="full"):
            world.build(force=force)
    after = tree(world.root)
    assert {**after, ".": None} == {**before, ".": None}
    world.build(force=force)
    assert verify_overlay(world.overlay).faults == [] and leftovers(world) == []


def test_b27_a_failed_rename_brings_the_old_folder_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.build()
    before = tree(world.overlay)
    original = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if ".staging-" in path.name:
            raise OSError("no")
        return original(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(OSError, match="no"):
            world.build(force=True)
    assert tree(world.overlay) == before and leftovers(world) == []


def test_b27_what_a_kill_between_two_renames_left_comes_back(world: World) -> None:
    world.build()
    before = tree(world.overlay)
    world.overlay.rename(world.root / ".overlay.old-abc")
    with pytest.raises(UsageError, match="--force"):
        world.build()
    assert tree(world.overlay) == before and leftovers(world) == []


def test_b27_of_two_builds_one_wins_whole(tmp_path: Path) -> None:
    target, inside, release = tmp_path / "out", threading.Event(), threading.Event()

    def first() -> None:
        with staged(target) as stage:
            stage.write("a", b"first")
            inside.set()
            assert release.wait(20)
            stage.write("b", b"first")

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(20)
    with pytest.raises(UsageError, match="one that runs"), staged(target, force=True) as stage:
        stage.write("a", b"second")
    assert not target.exists() and any(".staging-" in path.name for path in tmp_path.iterdir()), "the live one stays"
    release.set()
    thread.join()
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {"a": b"first", "b": b"first"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_b27_many_builds_at_once(world: World) -> None:
    outcomes: list[str] = []

    def build() -> None:
        try:
            world.build()
            outcomes.append("built")
        except UsageError:
            outcomes.append("refused")

    threads = [threading.Thread(target=build) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["built"] + ["refused"] * 7
    assert verify_overlay(world.overlay).faults == [] and leftovers(world) == []


def test_b27_a_build_that_is_killed_at_any_moment(world: World, rng: random.Random) -> None:
    before = tree(world.base)
    start = time.monotonic()
    assert run(world, None) == "start\nend\n"
    longest = time.monotonic() - start
    built = build_seconds(world)
    remove(world)
    states = set()
    for _ in range(KILLS):
        run(world, rng.uniform(0.0, 1.2 * built))
        states.add("whole" if world.overlay.exists() else "staged" if leftovers(world) else "nothing")
        if world.overlay.exists():
            assert verify_overlay(world.overlay, full=True).faults == []
            remove(world)
    assert tree(world.base) == before
    assert "staged" in states, f"no kill fell into the build ({states}, {built:.3f} s of {longest:.3f} s)"
    world.build(copy=True)
    assert verify_overlay(world.overlay, full=True).faults == [] and leftovers(world) == []
    assert Checkpoint.open(world.overlay).names()
    assert tree(world.base) == before


def remove(world: World) -> None:
    for path in sorted(world.overlay.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    world.overlay.rmdir()


def build_seconds(world: World) -> float:
    start = time.monotonic()
    world.build("timed", copy=True)
    return time.monotonic() - start


def run(world: World, kill_after_s: float | None) -> str:
    """Build in another process; kill it some seconds after it said that it starts."""
    command = [sys.executable, "-c", BUILD, str(world.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if kill_after_s is None:
            return process.stdout.read()
        assert process.stdout.readline() == "start\n"
        time.sleep(kill_after_s)
        process.send_signal(signal.SIGKILL)
    return json.dumps(process.returncode)

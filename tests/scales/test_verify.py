"""`scales verify`: one overlay broken in every way that we could think of, each named by its own faults."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.scales import bases
from tests.scales.bases import INDEX, PROVENANCE, SHARDS, forge, make_base, tree
from tests.scales.conftest import World
from tests.scales.corruptions import CASES

from page4.errors import UsageError
from page4.scales import verify_shards
from page4.scales.faults import CODES
from page4.scales.verify import verify_overlay


def codes(folder: Path, **options: Any) -> set[str]:
    return set(verify_overlay(folder, **options).codes)


def test_a_good_overlay_has_no_fault(built: World) -> None:
    findings = verify_overlay(built.overlay)
    assert findings.faults == [] and findings.notes == []
    assert findings.counts == {"files": 12, "shards": 2, "tensors": 12, "target_scales": 2, "draft_scales": 2}


@pytest.mark.parametrize("case", CASES)
def test_every_corruption_has_its_faults(built: World, case: str) -> None:
    expected, change = CASES[case]
    change(built)
    before = tree(built.root)
    findings = verify_overlay(built.overlay)
    assert set(findings.codes) == expected, findings.faults
    assert all(fault.what.isprintable() and len(fault.what) < 8000 for fault in findings.faults)
    assert tree(built.root) == before


# The command in a process of its own, which then says what it took. Processor time, as others may use this machine.
MEASURED = """
import sys, time
from page4 import cli
from page4.cli.memory import peak_memory_bytes
code = cli.main(["scales", "verify", sys.argv[1], "--json"])
print(peak_memory_bytes(), time.process_time(), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize("case", CASES)
def test_every_corruption_ends_the_command_with_1_within_bounds(built: World, case: str) -> None:
    expected, change = CASES[case]
    change(built)
    command = [sys.executable, "-c", MEASURED, str(built.overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["pass"] is False
    assert {fault["code"] for fault in report["faults"]} == expected
    memory, seconds = done.stderr.split()
    assert int(memory) < 200e6 and float(seconds) < 1.0


def test_there_are_enough_of_them_and_every_code_is_known() -> None:
    assert len(CASES) >= 25
    named = set().union(*(expected for expected, _ in CASES.values()))
    assert named <= set(CODES)
    # The last three are tested below; `unreadable` is for what nobody thought of.
    assert set(CODES) - named == {"hash-shard", "hash-unrecorded", "unreadable"}


def test_all_faults_are_collected(built: World) -> None:
    for name in ("total_size_wrong", "one_scale_one_ulp_up", "config_changed", "shard_of_another_seed", "link_added"):
        CASES[name][1](built)
    found = {"hash-index", "total-size", "hash-target-scales", "scale-record", "hash-config", "hash-shard-sample"}
    assert codes(built.overlay) == found | {"file-unknown", "link-escape"}


def large(world: World) -> Path:
    """A base whose shards are larger than what a sample reads whole."""
    make_base(world.base, size=200_000)
    bases.make_pack(world.pack, world.base)
    bases.make_report(world.report)
    return world.base


def test_full_finds_what_a_sample_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    large(world)
    world.build()
    assert codes(world.overlay) == set()
    path = world.base / SHARDS[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert codes(world.overlay) == {"hash-shard"}, "small enough to be hashed whole by default"
    monkeypatch.setattr(verify_shards, "WHOLE_BYTES", 1000)
    assert codes(world.overlay) == set()
    assert codes(world.overlay, full=True) == {"hash-shard"}


def test_full_without_recorded_hashes_is_no_pass(world: World) -> None:
    world.build(full=False)
    assert codes(world.overlay) == set()
    assert codes(world.overlay, full=True) == {"hash-unrecorded"}


# --root --------------------------------------------------------------------------------------------------------------


def test_a_root_that_holds_both_is_fine(built: World) -> None:
    assert codes(built.overlay, root=built.root) == set()


def test_a_root_without_the_base_is_an_escape(built: World) -> None:
    found = verify_overlay(built.overlay, root=built.overlay)
    assert set(found.codes) == {"link-escape"}
    assert {fault.where for fault in found.faults} >= {SHARDS[0], "tokenizer.json", "../base"}


def test_an_absolute_link_starts_at_the_root(built: World) -> None:
    (built.overlay / "tokenizer.json").unlink()
    (built.overlay / "tokenizer.json").symlink_to("/base/tokenizer.json")
    assert codes(built.overlay) == {"link-absolute", "link-dangling"}
    assert codes(built.overlay, root=built.root) == {"link-absolute"}


def test_a_link_that_is_good_outside_only(built: World) -> None:
    """Inside, `..` stops at the root, so a path that climbs too far ends somewhere else."""
    link = built.overlay / "tokenizer.json"
    link.unlink()
    link.symlink_to(f"../../{built.root.name}/base/tokenizer.json")
    assert codes(built.overlay) == set()
    assert codes(built.overlay, root=built.root) == {"link-escape"}
    assert codes(built.overlay, root=built.root.parent) == set()


def test_the_overlay_lies_in_the_root(built: World) -> None:
    for folder in (built.overlay, built.root / "none", Path("/overlays")):
        with pytest.raises(UsageError, match="--root"):
            verify_overlay(folder, root=built.base)


def test_the_overlay_may_be_named_as_from_inside(built: World) -> None:
    for folder in (Path("/overlay"), Path("/../overlay")):
        assert codes(folder, root=built.root) == set()
    (built.root / "current").symlink_to("/overlay")
    assert codes(built.root / "current", root=built.root) == set()
    assert codes(Path("/current"), root=built.root) == set()


def test_a_hub_base_inside_a_root(tmp_path: Path) -> None:
    world = World(tmp_path / "models")
    plain = make_base(world.root / "plain")
    snapshot, blobs = world.root / "hub" / "snapshots" / "r", world.root / "hub" / "blobs"
    blobs.mkdir(parents=True)
    for path in [p for p in plain.rglob("*") if p.is_file()]:
        shutil.copyfile(path, blobs / bases.sha256(path))
        link = snapshot / path.relative_to(plain)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blobs / bases.sha256(path), link.parent))
    bases.make_pack(world.pack, snapshot)
    bases.make_report(world.report)
    from page4.scales.overlay import build_overlay
    from page4.scales.sources import Sources

    build_overlay(snapshot, world.pack, world.overlay, Sources(draft_report=world.report))
    assert codes(world.overlay, root=world.root, full=True) == set()
    (blobs / bases.sha256(plain / SHARDS[0])).unlink()
    assert codes(world.overlay, root=world.root) == {"link-dangling"}


def test_a_copy_verifies_and_is_told_when_it_changes(world: World) -> None:
    world.build(copy=True)
    shutil.rmtree(world.base)
    assert codes(world.overlay, full=True) == set()
    (world.overlay / "config.json").write_text("{}")
    assert codes(world.overlay) == {"hash-config", "config-unreadable"}


def test_a_single_file_base_that_got_an_index(tmp_path: Path) -> None:
    world = World(tmp_path)
    make_base(world.base, shards=0)
    bases.make_report(world.report)
    from page4.scales.pack import make_pack

    make_pack(world.report, world.base, world.pack)
    world.build()
    assert codes(world.overlay) == set()
    (world.base / INDEX).write_text("{}")
    assert codes(world.overlay) == {"hash-base-index"}


def test_a_prototype_is_a_note(world: World) -> None:
    world.build()
    forge(world.overlay / PROVENANCE, lambda p: p["scales"][0].update(origin="prototype:unit"))
    findings = verify_overlay(world.overlay)
    assert findings.faults == [] and "prototype:unit" in findings.notes[0]


def test_whole_hashes_report_their_bytes(built: World) -> None:
    """Every byte of the recorded shards once: by verify, by an overlay that records them, by one that copies."""
    total = sum((built.base / name).stat().st_size for name in SHARDS)
    seen: list[int] = []
    assert not verify_overlay(built.overlay, full=True, on_bytes=seen.append).faults
    assert sum(seen) == total
    seen.clear()
    built.build("recorded", full=True, on_bytes=seen.append)
    assert sum(seen) == total
    seen.clear()
    built.build("copied", full=False, copy=True, on_bytes=seen.append)
    carried = [path for path in built.base.rglob("*") if path.is_file() and path.name != INDEX]
    assert sum(seen) == sum(path.stat().st_size for path in carried)

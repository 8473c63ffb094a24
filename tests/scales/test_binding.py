"""B28: scales of one base are not used with another, and B23: links of an overlay lead to its base and nowhere else."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.files import good_file, write_sharded
from tests.scales import bases
from tests.scales.bases import DRAFT, INDEX, PROVENANCE, SHARDS, TARGET, edit, forge, make_base
from tests.scales.conftest import World

from page4.checkpoint import Checkpoint
from page4.checkpoint.binding import check_binding
from page4.checkpoint.identity import EDGE_BYTES, PIECES
from page4.checkpoint.provenance import is_overlay
from page4.errors import CheckpointError, Page4Error, PathEscapeError, ScaleError


def replace_base(world: World, **options: Any) -> None:
    shutil.rmtree(world.base)
    make_base(world.base, **options)


def test_the_overlay_of_its_base_is_bound(built: World) -> None:
    check_binding(built.overlay)
    assert is_overlay(built.overlay) and not is_overlay(built.base)


def test_b28_another_seed_of_the_same_shape(built: World) -> None:
    before = {name: (built.base / name).stat().st_size for name in SHARDS}
    replace_base(built, seed=1)
    assert {name: (built.base / name).stat().st_size for name in SHARDS} == before
    with pytest.raises(ScaleError, match=r"sample_sha256.*another checkpoint of the same shape"):
        check_binding(built.overlay)


def test_b28_a_resharded_base(built: World) -> None:
    replace_base(built, shards=3)
    with pytest.raises(ScaleError, match="re-sharded"):
        check_binding(built.overlay)


def test_b28_a_base_without_its_index(built: World) -> None:
    replace_base(built, shards=0)
    with pytest.raises(ScaleError, match=r"got no model\.safetensors\.index\.json: re-sharded"):
        check_binding(built.overlay)


@pytest.mark.parametrize("name", [TARGET, DRAFT])
def test_b28_one_scale_edited_by_one_ulp(built: World, name: str) -> None:
    data = bytearray((built.overlay / name).read_bytes())
    data[-4] ^= 1
    (built.overlay / name).write_bytes(data)
    with pytest.raises(ScaleError, match=f"{name}: expected SHA-256"):
        check_binding(built.overlay)


CHANGES: dict[str, Any] = {
    "missing": lambda w: (w.overlay / PROVENANCE).unlink(),
    "truncated": lambda w: (w.overlay / PROVENANCE).write_bytes((w.overlay / PROVENANCE).read_bytes()[:-10]),
    "unknown version": lambda w: forge(w.overlay / PROVENANCE, lambda p: p.update(schema_version=2)),
    "edited by hand": lambda w: edit(w.overlay / PROVENANCE, lambda p: p["pack"].update(artifact_id="better")),
    "config": lambda w: (w.base / "config.json").write_text("{}"),
    "base index": lambda w: edit(w.base / INDEX, lambda i: i.update(more=1)),
    "merged index": lambda w: edit(w.overlay / INDEX, lambda i: i.update(more=1)),
    "own config": lambda w: (
        (w.overlay / "config.json").unlink(),
        (w.overlay / "config.json").write_text(json.dumps(bases.deep(8))),
    ),
    "base gone": lambda w: shutil.rmtree(w.base),
    "absolute base": lambda w: forge(w.overlay / PROVENANCE, lambda p: p["base"].update(path=str(w.base))),
    "shard cut": lambda w: (w.base / SHARDS[0]).write_bytes((w.base / SHARDS[0]).read_bytes()[:-1]),
}


@pytest.mark.parametrize("case", CHANGES)
def test_b28_changes_are_refused_in_one_line(built: World, case: str) -> None:
    CHANGES[case](built)
    with pytest.raises((ScaleError, CheckpointError)) as error:
        check_binding(built.overlay)
    assert str(error.value).isprintable()


def test_b28_a_copy_is_bound_too(world: World) -> None:
    world.build(copy=True)
    check_binding(world.overlay)
    other = make_base(world.root / "other", seed=1)
    shutil.copyfile(other / SHARDS[1], world.overlay / SHARDS[1])
    with pytest.raises(ScaleError, match="sample_sha256"):
        check_binding(world.overlay)


def test_b28_a_link_that_became_a_file_is_compared_itself(built: World) -> None:
    link = built.overlay / SHARDS[0]
    data = link.read_bytes()
    link.unlink()
    link.write_bytes(data)
    check_binding(built.overlay)
    link.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ScaleError, match="sample_sha256"):
        check_binding(built.overlay)


def test_b28_two_shards_swapped(built: World) -> None:
    swapped(built)
    with pytest.raises(CheckpointError):
        check_binding(built.overlay)


def test_the_sample_sees_the_ends_and_pieces_of_a_large_shard(tmp_path: Path) -> None:
    """What the docstring of `checkpoint.identity` says, byte by byte of one shard of 4 MiB."""
    world = World(tmp_path)
    size = 4 << 20
    make_base(world.base, shards=0, size=size // 8)
    path = world.base / "model.safetensors"
    start = path.read_bytes().index(b"}}") + 2
    from page4.checkpoint.identity import base_record

    def sample() -> str:
        shards = base_record(world.base, full=False).shards
        assert shards is not None
        return shards["model.safetensors"].sample_sha256

    first, end = sample(), path.stat().st_size
    gap = (end - start - 2 * EDGE_BYTES) // PIECES
    seen = {start: True, start + EDGE_BYTES - 1: True, end - 1: True, end - EDGE_BYTES: True}
    seen |= {start + EDGE_BYTES: True, start + EDGE_BYTES + gap // 2: False}
    for position, expected in seen.items():
        data = bytearray(path.read_bytes())
        data[position] ^= 0xFF
        path.write_bytes(data)
        assert (sample() != first) == expected, position
        data[position] ^= 0xFF
        path.write_bytes(data)


# B23: what the loader follows ----------------------------------------------------------------------------------------


def test_b23_the_loader_reads_through_an_overlay(built: World, opened: list[str]) -> None:
    checkpoint = Checkpoint.open(built.overlay)
    assert set(checkpoint.names()) > set(bases.base_tensors(bases.TINY, 0))
    assert {os.path.realpath(built.base / name) for name in SHARDS} <= set(opened)


def relink(world: World, name: str, target: str) -> None:
    (world.overlay / name).unlink()
    (world.overlay / name).symlink_to(target)


def secret(world: World) -> Path:
    """A good safetensors file that no index names."""
    path = world.root / "secret.safetensors"
    path.write_bytes(good_file(bases.base_tensors(bases.TINY, 0)))
    return path


def to_secret(world: World) -> None:
    relink(world, SHARDS[0], os.path.relpath(secret(world), world.overlay))


def other_base(world: World) -> None:
    """The provenance names another folder, whose index is not the recorded one."""
    write_sharded(world.root / "victim", {SHARDS[0]: {"x": b"1"}, SHARDS[1]: {"y": b"2"}})
    (world.root / "victim" / "config.json").write_bytes((world.base / "config.json").read_bytes())
    forge(world.overlay / PROVENANCE, lambda p: p["base"].update(path="../victim"))
    for name in SHARDS:
        relink(world, name, f"../victim/{name}")


def unnamed_shard(world: World) -> None:
    """A link to a weight file in the base folder that the base's index does not list."""
    (world.base / "extra.safetensors").write_bytes(good_file({"x": b"1"}))
    (world.overlay / "extra.safetensors").symlink_to("../base/extra.safetensors")
    edit(world.overlay / INDEX, lambda i: i["weight_map"].update(x="extra.safetensors"))


def swapped(world: World) -> None:
    relink(world, SHARDS[0], f"../base/{SHARDS[1]}")


def base_link_outside(world: World) -> None:
    path = secret(world)
    (world.base / SHARDS[0]).unlink()
    (world.base / SHARDS[0]).symlink_to(path)


def copied_with_link(world: World) -> None:
    forge(world.overlay / PROVENANCE, lambda p: (p.update(mode="copy"), p["base"].update(path=None)))


ESCAPES: dict[str, Any] = {
    "a file of nobody": to_secret,
    "another base": other_base,
    "a shard that the base does not list": unnamed_shard,
    "two shards swapped": swapped,
    "a base whose link leads outside": base_link_outside,
    "no provenance": lambda w: (w.overlay / PROVENANCE).unlink(),
    "broken provenance": lambda w: (w.overlay / PROVENANCE).write_text("{"),
    "unknown version": lambda w: forge(w.overlay / PROVENANCE, lambda p: p.update(schema_version=3)),
    "a provenance that is a link": lambda w: (
        (w.overlay / PROVENANCE).rename(w.root / "p.json"),
        (w.overlay / PROVENANCE).symlink_to("../p.json"),
    ),
    "config changed": lambda w: (w.base / "config.json").write_text("{}"),
    "index changed": lambda w: edit(w.base / INDEX, lambda i: i.update(more=1)),
    "said to be a copy": copied_with_link,
    "an absolute base": lambda w: forge(w.overlay / PROVENANCE, lambda p: p["base"].update(path=str(w.base))),
    "a base that is a file": lambda w: forge(w.overlay / PROVENANCE, lambda p: p["base"].update(path="../report.json")),
}


@pytest.mark.parametrize("case", ESCAPES)
def test_b23_nothing_else_is_followed_or_opened(built: World, opened: list[str], case: str) -> None:
    ESCAPES[case](built)
    links = [p for p in built.overlay.glob("*.safetensors") if p.is_symlink()]
    targets = {os.path.realpath(path) for path in links}
    opened.clear()
    with pytest.raises(PathEscapeError) as error:
        Checkpoint.open(built.overlay)
    assert isinstance(error.value, Page4Error) and str(error.value).isprintable()
    assert not targets & set(opened)

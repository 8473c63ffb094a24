"""Packs: what a report must hold before it becomes one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.scales import bases
from tests.scales.bases import INDEX, MANIFEST, TARGET, edit, make_base, make_report, sha256
from tests.scales.conftest import World

from page4.errors import CheckpointError, ScaleError, UsageError
from page4.scales.overlay import build_overlay
from page4.scales.pack import make_pack
from page4.scales.sources import Sources
from page4.scales.verify import verify_overlay

K3, V3, V4 = (f"model.layers.{name}_scale" for name in ("3.self_attn.k", "3.self_attn.v", "4.self_attn.v"))


@pytest.fixture
def out(world: World) -> Path:
    return world.root / "mine"


def test_a_pack_in_the_interchange_format(world: World, out: Path) -> None:
    make_pack(world.report, world.base, out)
    expected = {K3: bases.scale_of(2 * 6.3), V3: bases.scale_of(2 * 6.55)}
    assert {name: tensor.item() for name, tensor in load_file(out / TARGET).items()} == expected
    manifest = json.loads((out / MANIFEST).read_text())
    assert manifest["schema_version"] == 1 and manifest["artifact_id"].startswith("kvscales-")
    assert manifest["base_checkpoint"]["index_sha256"] == sha256(world.base / INDEX)
    assert manifest["scale_file"] == {
        "filename": TARGET, "sha256": sha256(out / TARGET), "tensor_count": 2, "tensor_names": [K3, V3],
    }  # fmt: skip
    assert [(t["layer"], t["kind"], t["max_abs"]) for t in manifest["tensors"]] == [(3, "k", 12.6), (3, "v", 13.1)]


def test_a_pack_becomes_an_overlay_and_the_same_report_the_same_pack(world: World, out: Path) -> None:
    make_pack(world.report, world.base, out)
    make_pack(world.report, world.base, world.root / "again")
    for name in (TARGET, MANIFEST):
        assert (out / name).read_bytes() == (world.root / "again" / name).read_bytes()
    build_overlay(world.base, out, world.overlay, Sources(draft_report=world.report))
    assert verify_overlay(world.overlay).faults == []


def test_b17_one_counted_forward_gives_its_max_abs_over_448(world: World, out: Path) -> None:
    tensors = {name: {"max_abs": 3.5, "token_count": 8} for name in (K3, V3)}
    make_pack(make_report(world.report, counted_forwards=1, tensors=tensors), world.base, out)
    assert load_file(out / TARGET)[K3].item() == 0.0078125


REFUSED: dict[str, tuple[Any, str]] = {
    "b17 nothing counted": (lambda r: r.update(counted_forwards=0), "counted_forwards"),
    "b18 a layer without tokens": (lambda r: r["tensors"][K3].update(token_count=0), "token_count"),
    "b18 counts differ": (lambda r: r["tensors"][K3].update(token_count=99), "token_count"),
    "a side missing": (lambda r: r["tensors"].pop(V3), r"no layers\.3\.self_attn\.v_scale"),
    "a layer too many": (lambda r: r["tensors"].update({"model.layers.9.self_attn.k_scale": {"max_abs": 1}}), "9"),
    "a GDN layer": (lambda r: r["tensors"].update({"model.layers.1.self_attn.k_scale": {"max_abs": 1}}), "layer 1"),
    "zero": (lambda r: r["tensors"][K3].update(max_abs=0.0), "max_abs"),
    "negative": (lambda r: r["tensors"][K3].update(max_abs=-1.0), "max_abs"),
    "infinite": (lambda r: r["tensors"][K3].update(max_abs=float("inf")), "Infinity"),
    "not a number": (lambda r: r["tensors"][K3].update(scale=float("nan")), "NaN"),
    "beyond fp32": (lambda r: r["tensors"][K3].update(max_abs=1e300, scale=None), "fp32 scale"),
    "a scale of another rule": (lambda r: r["tensors"][K3].update(scale=1.0), "max_abs"),
    "two spellings": (lambda r: r["tensors"].update({"layers.3.self_attn.k_scale": {"max_abs": 1}}), "one entry"),
    "another index": (lambda r: r.update(base_checkpoint={"index_sha256": "0" * 64}), "report .*index SHA-256"),
    "no index": (lambda r: r.update(base_checkpoint={"index_sha256": None, "shards": {}}), "neither"),
    "binds nothing": (lambda r: r.update(base_checkpoint={"name": "org/model"}), "neither"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_reports_that_do_not_become_packs(world: World, out: Path, case: str) -> None:
    change, pattern = REFUSED[case]
    edit(world.report, change)
    with pytest.raises(ScaleError, match=pattern) as error:
        make_pack(world.report, world.base, out)
    assert str(error.value).isprintable() and not out.exists()


def test_b28_a_report_of_another_config_or_seed(world: World, out: Path) -> None:
    make_pack(world.report, world.base, out)
    record = json.loads((out / MANIFEST).read_text())["base_checkpoint"]
    edit(world.report, lambda r: r.update(base_checkpoint=record))
    make_pack(world.report, world.base, world.root / "good")
    other = make_base(world.root / "other", seed=1)
    with pytest.raises(ScaleError, match="sample_sha256"):
        make_pack(world.report, other, world.root / "bad")
    (world.base / "config.json").write_text((world.base / "config.json").read_text() + " ")
    with pytest.raises(ScaleError, match=r"config\.json"):
        make_pack(world.report, world.base, world.root / "bad")
    assert not (world.root / "bad").exists()


def test_b28_a_resharded_base_is_said_to_be_one(world: World, out: Path) -> None:
    make_pack(world.report, world.base, out)
    record = json.loads((out / MANIFEST).read_text())["base_checkpoint"]
    edit(world.report, lambda r: r.update(base_checkpoint=record))
    three = make_base(world.root / "three", shards=3)
    with pytest.raises(ScaleError, match="re-sharded"):
        make_pack(world.report, three, world.root / "bad")


def test_a_rule_that_clips_keeps_its_own_scale(world: World, out: Path) -> None:
    edit(world.report, lambda r: (r.update(rule="percentile:99.9"), r["tensors"][K3].update(scale=0.0123)))
    make_pack(world.report, world.base, out)
    assert load_file(out / TARGET)[K3].item() == pytest.approx(0.0123, rel=1e-7)
    assert json.loads((out / MANIFEST).read_text())["rule"] == "percentile:99.9"


def test_a_report_without_a_base_is_noted(world: World, out: Path) -> None:
    assert len(make_pack(world.report, world.base, out).notes) == 1


def test_targets_that_may_not_be_written(world: World) -> None:
    for target in (world.base, world.base / "pack", world.root, world.report):
        before = bases.tree(world.root)
        with pytest.raises(UsageError):
            make_pack(world.report, world.base, target, force=True)
        assert bases.tree(world.root) == before


PACKS: dict[str, tuple[Any, type[Exception]]] = {
    "no manifest": (lambda p: (p / MANIFEST).unlink(), ScaleError),
    "truncated manifest": (lambda p: (p / MANIFEST).write_bytes((p / MANIFEST).read_bytes()[:-2]), ScaleError),
    "unknown version": (lambda p: edit(p / MANIFEST, lambda m: m.update(schema_version=2)), ScaleError),
    "another scale file": (lambda p: (p / "scales.safetensors").write_bytes(bases.scale_file({K3: 1.0})), ScaleError),
    "no scale file": (lambda p: (p / "scales.safetensors").unlink(), CheckpointError),
    "names": (lambda p: edit(p / MANIFEST, lambda m: m["scale_file"].update(tensor_names=[K3, V4])), ScaleError),
    "count": (lambda p: edit(p / MANIFEST, lambda m: m["scale_file"].update(tensor_count=24)), ScaleError),
    "layers": (lambda p: edit(p / MANIFEST, lambda m: m["tensors"][0].update(layer=7)), ScaleError),
    "twice": (lambda p: edit(p / MANIFEST, lambda m: m["tensors"].append(m["tensors"][0])), ScaleError),
    "scale": (lambda p: edit(p / MANIFEST, lambda m: m["tensors"][0].update(scale=1.0)), ScaleError),
    "b23 a link outside": (
        lambda p: ((p / "scales.safetensors").rename(p.parent / "s"), (p / "scales.safetensors").symlink_to("../s")),
        CheckpointError,
    ),
    "b29 hostile": (
        lambda p: (
            (p / "scales.safetensors").write_bytes(b"\xff" * 8 + b"{}" * 50),
            edit(p / MANIFEST, lambda m: m["scale_file"].update(sha256=sha256(p / "scales.safetensors"))),
        ),
        CheckpointError,
    ),
}


@pytest.mark.parametrize("case", PACKS)
def test_packs_that_are_not_what_they_say(world: World, case: str) -> None:
    change, error = PACKS[case]
    change(world.pack)
    with pytest.raises(error) as caught:
        world.build()
    assert str(caught.value).isprintable() and not world.overlay.exists()


def test_a_report_that_holds_whole_hashes_instead_of_samples(world: World, out: Path) -> None:
    shards = {
        name: {"size_bytes": path.stat().st_size, "header_sha256": header_sha256(path), "sha256": sha256(path)}
        for name in bases.SHARDS
        for path in [world.base / name]
    }
    record = {"index_sha256": sha256(world.base / INDEX), "shards": shards}
    edit(world.report, lambda r: r.update(base_checkpoint=record))
    make_pack(world.report, world.base, out)
    other = make_base(world.root / "other", seed=1)
    with pytest.raises(ScaleError, match=r"sha256 .*another checkpoint of the same shape"):
        make_pack(world.report, other, world.root / "bad")
    shards.pop(bases.SHARDS[0])
    edit(world.report, lambda r: r.update(base_checkpoint=record))
    with pytest.raises(ScaleError, match="the shards"):
        make_pack(world.report, world.base, world.root / "bad")


def header_sha256(path: Path) -> str:
    raw = path.read_bytes()
    return hashlib.sha256(raw[: 8 + int.from_bytes(raw[:8], "little")]).hexdigest()


def test_what_another_tool_keeps_under_shards_binds_nothing(world: World, out: Path) -> None:
    edit(world.report, lambda r: r.update(base_checkpoint={"index_sha256": None, "shards": {"a": "b"}}))
    with pytest.raises(ScaleError, match="neither"):
        make_pack(world.report, world.base, out)
    edit(world.report, lambda r: r.update(base_checkpoint={"index_sha256": sha256(world.base / INDEX), "shards": 2}))
    make_pack(world.report, world.base, out)


def test_the_report_in_a_folder(world: World, out: Path) -> None:
    (world.root / "run").mkdir()
    world.report.rename(world.root / "run" / "calibration-report.json")
    make_pack(world.root / "run", world.base, out)
    build_overlay(world.base, out, world.overlay, Sources(draft_report=world.root / "run"))
    assert verify_overlay(world.overlay).faults == []

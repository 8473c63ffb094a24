"""Overlays: links, index, values and provenance, against plain json and the safetensors package."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tests.scales import bases
from tests.scales.bases import DRAFT, INDEX, MANIFEST, PROVENANCE, SIDE_FILES, TARGET, TINY, edit, make_base, sha256
from tests.scales.conftest import World

from page4.checkpoint import Checkpoint, TensorBytes
from page4.checkpoint.binding import check_binding
from page4.codec import Scale
from page4.errors import CheckpointError, Page4Error, ScaleError, ShardError, UsageError
from page4.geometry import Geometry
from page4.model.kv_scales import resolve_scales
from page4.scales.overlay import build_overlay
from page4.scales.sources import Sources
from page4.scales.verify import verify_overlay

K3, V3 = "model.layers.3.self_attn.k_scale", "model.layers.3.self_attn.v_scale"
DRAFT_K, DRAFT_V = "mtp.layers.0.self_attn.k_scale", "mtp.layers.0.self_attn.v_scale"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"


def read(path: Path) -> dict[str, float]:
    """Every tensor of a file as the safetensors package reads it; each must be one fp32 number of shape []."""
    with safe_open(str(path), "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
    assert {(str(t.dtype), tuple(t.shape)) for t in tensors.values()} == {("torch.float32", ())}
    return {name: t.item() for name, t in tensors.items()}


def resolved(folder: Path) -> Any:
    return resolve_scales(Checkpoint.open(folder), Geometry.from_folder(folder), "fp8", with_draft=True)


def holds(folder: Path, **options: Any) -> None:
    assert verify_overlay(folder, **options).faults == []
    check_binding(folder)


def test_published_scales_are_taken_bit_for_bit(world: World) -> None:
    odd = {K3: bases.from_bits(0x3C123457), V3: bases.from_bits(0x3C765431)}
    (world.pack / "scales.safetensors").write_bytes(bases.scale_file(odd))
    edit(world.pack / MANIFEST, lambda m: m["scale_file"].update(sha256=sha256(world.pack / "scales.safetensors")))
    assert read(world.build() / TARGET) == odd
    holds(world.overlay)


def test_the_draft_comes_from_the_layer_after_the_last(world: World) -> None:
    expected = {name: bases.scale_of(2 * bases.max_abs_of(4, side)) for name, side in ((DRAFT_K, "k"), (DRAFT_V, "v"))}
    assert read(world.build() / DRAFT) == expected
    target = {K3: Scale(bases.scale_of(3.3 + 3)), V3: Scale(bases.scale_of(3.55 + 3))}
    assert resolved(world.overlay) == {
        3: (target[K3], target[V3]),
        4: (Scale(expected[DRAFT_K]), Scale(expected[DRAFT_V])),
    }


def test_envelope_takes_the_larger_max_abs_and_says_whose(world: World) -> None:
    report = bases.make_report(world.root / "other.json")
    edit(report, lambda r: r["tensors"].update({V3: {"max_abs": 0.5}, K3: {"max_abs": 900.0}}))
    sources = Sources("envelope", target_report=report, draft_report=world.report)
    build_overlay(world.base, world.pack, world.overlay, sources)
    assert read(world.overlay / TARGET) == {K3: bases.scale_of(900.0), V3: bases.scale_of(3.55 + 3)}
    scales = {s["name"]: s for s in json.loads((world.overlay / PROVENANCE).read_text())["scales"]}
    assert {name: (s["origin"], s["max_abs"]) for name, s in scales.items()} == {
        K3: ("report", 900.0),
        V3: ("published", 3.55 + 3),
        DRAFT_K: ("report", 2 * 7.3),
        DRAFT_V: ("report", 2 * 7.55),
    }
    assert json.loads((world.overlay / PROVENANCE).read_text())["target"]["source"] == "envelope"
    holds(world.overlay)


def test_provenance_holds_every_hash(world: World) -> None:
    record = json.loads((world.build() / PROVENANCE).read_text())
    found = {
        "base index": record["base"]["index_sha256"],
        "config": record["base"]["config_sha256"],
        "manifest": record["pack"]["manifest_sha256"],
        "pack": record["pack"]["scale_file_sha256"],
        "merged": record["index_sha256"],
        "target": record["target"]["sha256"],
        "draft": record["draft"]["sha256"],
        "report": record["draft_report_sha256"],
    }
    assert found == {
        "base index": sha256(world.base / INDEX),
        "config": sha256(world.base / "config.json"),
        "manifest": sha256(world.pack / MANIFEST),
        "pack": sha256(world.pack / "scales.safetensors"),
        "merged": sha256(world.overlay / INDEX),
        "target": sha256(world.overlay / TARGET),
        "draft": sha256(world.overlay / DRAFT),
        "report": sha256(world.report),
    }
    assert (record["target"]["tensor_names"], record["draft"]["tensor_count"]) == ([K3, V3], 2)
    assert {n: s["sha256"] for n, s in record["base"]["shards"].items()} == {
        n: sha256(world.base / n) for n in bases.SHARDS
    }


def test_b16_every_file_is_carried_and_the_index_is_new(world: World) -> None:
    (world.base / "sub").mkdir()
    (world.base / "sub" / INDEX).write_text("{}")
    world.build()
    for name, data in SIDE_FILES.items():
        assert (world.overlay / name).is_symlink() and (world.overlay / name).read_bytes() == data
        assert not (world.overlay / name).readlink().is_absolute()
    assert (world.overlay / "sub" / INDEX).is_symlink()
    assert not (world.overlay / INDEX).is_symlink()
    old, new = (json.loads((folder / INDEX).read_text()) for folder in (world.base, world.overlay))
    added = {K3: TARGET, V3: TARGET, DRAFT_K: DRAFT, DRAFT_V: DRAFT}
    assert new["weight_map"] == old["weight_map"] | added
    assert new["metadata"] == {"total_size": old["metadata"]["total_size"] + 16}


def test_b16_a_key_of_a_layer_without_a_cache_is_an_error(world: World) -> None:
    for name in ("model.layers.1.self_attn.k_scale", "model.visual.blocks.0.self_attn.k_scale"):
        shutil.rmtree(world.pack)
        bases.make_pack(world.pack, world.base)
        scales = {K3: 1.0, V3: 1.0, name: 1.0}
        (world.pack / "scales.safetensors").write_bytes(bases.scale_file(scales))
        entry = {"sha256": sha256(world.pack / "scales.safetensors"), "tensor_count": 3, "tensor_names": list(scales)}
        edit(world.pack / MANIFEST, lambda m, entry=entry: m["scale_file"].update(entry))
        with pytest.raises(ScaleError, match=name.replace(".", r"\.")):
            world.build()
        assert not world.overlay.exists()


def test_b13_all_twenty_four_of_a_deep_model_load(tmp_path: Path) -> None:
    config = bases.deep(48)
    base = make_base(tmp_path / "base", config=config)
    pack = bases.make_pack(tmp_path / "pack", base, config)
    report = bases.make_report(tmp_path / "report.json", config)
    build_overlay(base, pack, tmp_path / "out", Sources(draft_report=report))
    scales = resolved(tmp_path / "out")
    assert sorted(scales) == [*range(3, 48, 4), 48]
    assert sum(len(pair) for layer, pair in scales.items() if layer < 48) == 24 and len(scales[48]) == 2
    for layer in range(3, 48, 4):
        assert scales[layer] == tuple(Scale(bases.scale_of(bases.max_abs_of(layer, side))) for side in "kv")
    holds(tmp_path / "out")


def test_b14_a_report_without_a_draft_scale_is_refused_by_name(world: World) -> None:
    edit(world.report, lambda r: r["tensors"].pop("model.layers.4.self_attn.v_scale"))
    with pytest.raises(ScaleError, match=r"no layers\.4 \(the draft\)\.self_attn\.v_scale"):
        world.build()


def test_b13_a_pack_without_one_target_scale_is_refused_by_name(world: World) -> None:
    edit(world.pack / MANIFEST, lambda m: m["tensors"].pop())
    with pytest.raises(ScaleError, match=r"no layers\.3\.self_attn\.v_scale"):
        world.build()
    (world.pack / "scales.safetensors").write_bytes(bases.scale_file({K3: 1.0}))
    entry = {"sha256": sha256(world.pack / "scales.safetensors"), "tensor_count": 1, "tensor_names": [K3]}
    edit(world.pack / MANIFEST, lambda m: m["scale_file"].update(entry))
    with pytest.raises(ScaleError, match=r"no layers\.3\.self_attn\.v_scale"):
        world.build()
    assert not world.overlay.exists()


@pytest.mark.parametrize("draft", [DRAFT_K, DRAFT_V])
def test_b14_an_overlay_without_a_draft_scale_is_refused_when_loaded(world: World, draft: str) -> None:
    world.build(copy=True)
    kept = {name: value for name, value in read(world.overlay / DRAFT).items() if name != draft}
    (world.overlay / DRAFT).write_bytes(bases.scale_file(kept))
    edit(world.overlay / INDEX, lambda index: index["weight_map"].pop(draft))
    with pytest.raises(ScaleError, match=draft.replace(".", r"\.")):
        resolved(world.overlay)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
@pytest.mark.parametrize("naming", ["qsa", "proj"])
def test_b13_names_follow_the_base_and_load(tmp_path: Path, prefix: str, naming: Any) -> None:
    world = World(tmp_path)
    make_base(world.base, prefix=prefix)
    bases.make_pack(world.pack, world.base)
    bases.make_report(world.report)
    world.build(naming=naming)
    inner = {"qsa": "self_attn.{}_scale", "proj": "self_attn.{0}_proj.{0}_scale"}[naming]
    assert set(read(world.overlay / TARGET)) == {f"{prefix}layers.3.{inner.format(side)}" for side in "kv"}
    assert set(read(world.overlay / DRAFT)) == {f"mtp.layers.0.{inner.format(side)}" for side in "kv"}
    assert resolved(world.overlay)[3] == (Scale(bases.scale_of(6.3)), Scale(bases.scale_of(6.55)))
    holds(world.overlay)


@pytest.mark.parametrize(
    ("sources", "origin", "values"),
    [
        (Sources(draft_unit_scale=True), "prototype:unit", (1.0, 1.0)),
        (Sources(draft_from_layer=3), "prototype:layer-3", (bases.scale_of(6.3), bases.scale_of(6.55))),
    ],
)
def test_prototype_drafts_are_marked(world: World, sources: Sources, origin: str, values: tuple[float, float]) -> None:
    summary = build_overlay(world.base, world.pack, world.overlay, sources)
    assert read(world.overlay / DRAFT) == dict(zip((DRAFT_K, DRAFT_V), values, strict=True))
    record = json.loads((world.overlay / PROVENANCE).read_text())
    assert record["draft"]["source"] == origin and record["draft_report_sha256"] is None
    assert [s["origin"] for s in record["scales"]] == ["published", "published", origin, origin]
    assert len(summary.prototypes) == 2
    findings = verify_overlay(world.overlay)
    assert findings.faults == [] and len([note for note in findings.notes if origin in note]) == 2


@pytest.mark.parametrize(
    ("sources", "error"),
    [
        (Sources(), UsageError),
        (Sources(draft_unit_scale=True, draft_from_layer=3), UsageError),
        (Sources(draft_from_layer=1), ScaleError),
        (Sources(draft_from_layer=4), ScaleError),
        (Sources("envelope", draft_unit_scale=True), UsageError),
        (Sources("published", target_report=Path("r"), draft_unit_scale=True), UsageError),
        (Sources(draft_report=Path("none.json")), ScaleError),
    ],
    ids=str,
)
def test_sources_that_do_not_fit(world: World, sources: Sources, error: type[Page4Error]) -> None:
    with pytest.raises(error):
        build_overlay(world.base, world.pack, world.overlay, sources)
    assert not world.overlay.exists()


def test_a_base_without_a_draft_gets_none(tmp_path: Path) -> None:
    world = World(tmp_path)
    make_base(world.base, drafted=False)
    bases.make_pack(world.pack, world.base)
    build_overlay(world.base, world.pack, world.overlay, Sources())
    assert not (world.overlay / DRAFT).exists()
    holds(world.overlay)
    with pytest.raises(UsageError, match="no MTP head"):
        build_overlay(world.base, world.pack, world.root / "second", Sources(draft_unit_scale=True))


def test_a_single_file_base_gets_an_index(tmp_path: Path) -> None:
    world = World(tmp_path)
    make_base(world.base, shards=0)
    bases.make_report(world.report)
    from page4.scales.pack import make_pack

    make_pack(world.report, world.base, world.pack)
    world.build()
    index = json.loads((world.overlay / INDEX).read_text())
    tensors = bases.base_tensors(TINY, 0)
    assert {n for n, f in index["weight_map"].items() if f == "model.safetensors"} == set(tensors)
    assert index["metadata"]["total_size"] == sum(map(len, tensors.values())) + 16
    holds(world.overlay, full=True)
    checkpoint = Checkpoint.open(world.overlay)
    assert bytes(TensorBytes(checkpoint).view("lm_head.weight")) == tensors["lm_head.weight"]


def test_a_hub_snapshot(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--name"
    plain = make_base(tmp_path / "plain")
    snapshot = repo / "snapshots" / "abc"
    (repo / "blobs").mkdir(parents=True)
    for path in [p for p in plain.rglob("*") if p.is_file()]:
        blob = repo / "blobs" / sha256(path)
        shutil.copyfile(path, blob)
        link = snapshot / path.relative_to(plain)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    world = World(tmp_path)
    bases.make_pack(world.pack, snapshot)
    bases.make_report(world.report)
    build_overlay(snapshot, world.pack, world.overlay, Sources(draft_report=world.report), full=False)
    holds(world.overlay)
    assert resolved(world.overlay).keys() == {3, 4}
    assert (world.overlay / "assets" / "a.txt").read_bytes() == b"a text"
    build_overlay(snapshot, world.pack, world.root / "named", Sources(draft_report=world.report))
    holds(world.root / "named", full=True)


def test_base_and_overlay_move_together(world: World, tmp_path: Path) -> None:
    world.build("a/b/overlay")
    moved = shutil.move(str(world.root), str(tmp_path / "elsewhere"))
    holds(Path(moved) / "a" / "b" / "overlay", full=True)
    assert resolved(Path(moved) / "a" / "b" / "overlay").keys() == {3, 4}


def test_a_copy_moves_alone(world: World, tmp_path: Path) -> None:
    world.build(copy=True)
    moved = Path(shutil.move(str(world.overlay), str(tmp_path / "alone")))
    shutil.rmtree(world.root)
    assert not [path for path in moved.rglob("*") if path.is_symlink()]
    holds(moved, full=True)
    assert resolved(moved).keys() == {3, 4}


def test_a_base_reached_through_a_link_is_bound_where_it_lies(world: World) -> None:
    (world.root / "current").symlink_to("base")
    build_overlay(world.root / "current", world.pack, world.overlay, Sources(draft_report=world.report))
    (world.root / "current").unlink()
    holds(world.overlay)


def test_the_same_inputs_give_the_same_bytes(world: World) -> None:
    first, second = world.build("one"), world.build("two")
    names = {path.name for path in first.iterdir() if path.is_file() and not path.is_symlink()}
    assert names == {TARGET, DRAFT, INDEX, PROVENANCE}
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def test_a_base_with_scales_is_refused(world: World) -> None:
    from tests.checkpoint.files import good_file

    shard = world.base / bases.SHARDS[0]
    tensors = {**bases.base_tensors(TINY, 0), "model.layers.3.self_attn.attn.k_scale": b"1234"}
    shard.write_bytes(good_file(tensors))
    edit(world.base / INDEX, lambda index: index.update(weight_map=dict.fromkeys(tensors, shard.name)))
    edit(world.pack / MANIFEST, lambda m: m["base_checkpoint"].update(index_sha256=sha256(world.base / INDEX)))
    with pytest.raises(CheckpointError, match=r"layers\.3\.self_attn\.attn\.k_scale"):
        world.build()


def test_an_overlay_is_no_base(world: World) -> None:
    world.build(copy=True)
    with pytest.raises(CheckpointError):
        build_overlay(world.overlay, world.pack, world.root / "second", Sources(draft_report=world.report))


def test_b28_another_index_is_refused_before_anything_is_written(world: World) -> None:
    edit(world.pack / MANIFEST, lambda m: m["base_checkpoint"].update(index_sha256="0" * 64))
    with pytest.raises(ScaleError, match="index SHA-256"):
        world.build()
    assert sorted(p.name for p in world.root.iterdir()) == ["base", "pack", "report.json"]


def test_b28_a_pack_that_binds_nothing_is_refused(world: World) -> None:
    edit(world.pack / MANIFEST, lambda m: m.update(base_checkpoint={}))
    with pytest.raises(ScaleError, match="neither"):
        world.build()


DAMAGE: dict[str, Any] = {
    "cut 1": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "cut 1000": lambda path: path.write_bytes(path.read_bytes()[:-1000]),
    "deleted": lambda path: path.unlink(),
    "pointer": lambda path: path.write_bytes(POINTER),
    "one more": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_b25_a_base_with_a_damaged_shard_gets_no_overlay(world: World, damage: str) -> None:
    DAMAGE[damage](world.base / bases.SHARDS[1])
    with pytest.raises(ShardError, match=bases.SHARDS[1]):
        world.build()
    assert not world.overlay.exists()


BROKEN_BASES: dict[str, Any] = {
    "a link outside": lambda base: (base / "x.txt").symlink_to("../report.json"),
    "a dangling link": lambda base: (base / "x.txt").symlink_to("nowhere"),
    "a loop": lambda base: (base / "x.txt").symlink_to("x.txt"),
    "a link to a folder": lambda base: (base / "x").symlink_to("assets"),
    "a pipe": lambda base: os.mkfifo(base / "x"),
    "a name that cannot be shown": lambda base: (base / "x\n.txt").write_bytes(b""),
    "our name": lambda base: (base / TARGET).write_bytes(b""),
}


@pytest.mark.parametrize("case", BROKEN_BASES)
def test_b23_a_base_that_cannot_be_linked_is_refused(world: World, case: str) -> None:
    BROKEN_BASES[case](world.base)
    with pytest.raises(CheckpointError):
        world.build()
    assert not world.overlay.exists()

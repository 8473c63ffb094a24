"""Ways to break one overlay, each with the codes that must be reported, all of them and no other."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from typing import Any

from tests.checkpoint.files import good_file, json_file
from tests.scales import bases
from tests.scales.bases import DRAFT, INDEX, PROVENANCE, SHARDS, TARGET, edit, forge, sha256
from tests.scales.conftest import World

K3, V3 = "model.layers.3.self_attn.k_scale", "model.layers.3.self_attn.v_scale"
GOOD = {K3: 0.25, V3: 0.5}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"

CASES: dict[str, tuple[set[str], Callable[[World], Any]]] = {}


def case(*codes: str) -> Callable[[Callable[[World], Any]], Callable[[World], Any]]:
    def register(change: Callable[[World], Any]) -> Callable[[World], Any]:
        CASES[change.__name__] = (set(codes), change)
        return change

    return register


def relink(world: World, name: str, target: str) -> None:
    (world.overlay / name).unlink()
    (world.overlay / name).symlink_to(target)


def provenance(world: World, change: Any) -> None:
    forge(world.overlay / PROVENANCE, change)


def index(world: World, change: Any) -> None:
    edit(world.overlay / INDEX, change)


def scales(world: World, content: bytes) -> None:
    """Another target scale file, with a provenance that has its hash, as a careful forger would leave it."""
    (world.overlay / TARGET).write_bytes(content)
    provenance(world, lambda p: p["target"].update(sha256=sha256(world.overlay / TARGET)))


# files ---------------------------------------------------------------------------------------------------------------


@case("file-missing", "scale-missing")
def target_scale_file_gone(world: World) -> None:
    (world.overlay / TARGET).unlink()


@case("file-missing", "scale-missing")
def draft_scale_file_gone(world: World) -> None:
    (world.overlay / DRAFT).unlink()


@case("file-missing")
def side_file_gone(world: World) -> None:
    (world.overlay / "assets" / "a.txt").unlink()


@case("file-missing")
def shard_link_gone(world: World) -> None:
    (world.overlay / SHARDS[0]).unlink()


@case("file-unknown")
def weight_file_added(world: World) -> None:
    (world.overlay / "more.safetensors").write_bytes(good_file({"x": b"1"}))


@case("link-replaced")
def link_replaced_by_its_file(world: World) -> None:
    data = (world.overlay / SHARDS[0]).read_bytes()
    (world.overlay / SHARDS[0]).unlink()
    (world.overlay / SHARDS[0]).write_bytes(data)


@case("file-mode")
def scale_file_for_its_owner_only(world: World) -> None:
    (world.overlay / TARGET).chmod(0o600)


@case("folder-missing")
def no_folder(world: World) -> None:
    shutil.rmtree(world.overlay)


# links ---------------------------------------------------------------------------------------------------------------


@case("link-dangling")
def link_to_nothing(world: World) -> None:
    relink(world, "tokenizer.json", "../base/nothing.json")


@case("link-dangling")
def file_of_the_base_gone(world: World) -> None:
    (world.base / "tokenizer.json").unlink()


@case("link-loop")
def link_to_itself(world: World) -> None:
    relink(world, SHARDS[0], SHARDS[0])


@case("link-loop")
def links_to_each_other(world: World) -> None:
    relink(world, SHARDS[0], SHARDS[1])
    relink(world, SHARDS[1], SHARDS[0])


@case("link-escape")
def link_to_a_stranger(world: World) -> None:
    (world.root / "stranger.safetensors").write_bytes((world.base / SHARDS[0]).read_bytes())
    relink(world, SHARDS[0], "../stranger.safetensors")


@case("link-escape")
def link_to_the_system(world: World) -> None:
    relink(world, "tokenizer.json", "../" * 30 + "etc/passwd")


@case("link-wrong")
def two_shards_swapped(world: World) -> None:
    relink(world, SHARDS[0], f"../base/{SHARDS[1]}")


@case("link-absolute")
def link_that_cannot_move(world: World) -> None:
    relink(world, "tokenizer.json", str(world.base / "tokenizer.json"))


@case("base-missing", "link-dangling")
def base_gone(world: World) -> None:
    shutil.rmtree(world.base)


@case("link-replaced", "link-escape")
def index_is_a_link(world: World) -> None:
    (world.overlay / INDEX).rename(world.root / "index.json")
    (world.overlay / INDEX).symlink_to("../index.json")


@case("file-unknown", "link-escape")
def link_added(world: World) -> None:
    (world.overlay / "more.txt").symlink_to("../report.json")


# index ---------------------------------------------------------------------------------------------------------------


@case("index-missing")
def index_gone(world: World) -> None:
    (world.overlay / INDEX).unlink()


@case("index-unreadable")
def index_truncated(world: World) -> None:
    (world.overlay / INDEX).write_bytes((world.overlay / INDEX).read_bytes()[:-20])


@case("index-unreadable")
def index_nested(world: World) -> None:
    (world.overlay / INDEX).write_bytes(b'{"x":' * 50_000)


@case("hash-index")
def index_with_another_byte(world: World) -> None:
    with (world.overlay / INDEX).open("ab") as file:
        file.write(b"\n")


@case("hash-index", "total-size")
def total_size_wrong(world: World) -> None:
    index(world, lambda i: i["metadata"].update(total_size=1))


@case("hash-index", "index-unlisted", "index-base", "total-size")
def scale_not_listed(world: World) -> None:
    index(world, lambda i: i["weight_map"].pop(K3))


@case("hash-index", "index-unlisted", "index-base", "total-size")
def weight_not_listed(world: World) -> None:
    index(world, lambda i: i["weight_map"].pop("lm_head.weight"))


@case("hash-index", "index-not-in-shard", "index-base")
def tensor_that_nobody_holds(world: World) -> None:
    index(world, lambda i: i["weight_map"].update({"made.up": SHARDS[0]}))


@case("hash-index", "index-not-in-shard", "index-unlisted", "index-base")
def weight_in_the_wrong_shard(world: World) -> None:
    index(world, lambda i: i["weight_map"].update({"lm_head.weight": DRAFT}))


@case("hash-index", "index-name", "index-base")
def index_that_escapes(world: World) -> None:
    index(world, lambda i: i["weight_map"].update({"made.up": "../report.json"}))


# headers -------------------------------------------------------------------------------------------------------------


@case("shard-size")
def shard_one_byte_short(world: World) -> None:
    (world.base / SHARDS[0]).write_bytes((world.base / SHARDS[0]).read_bytes()[:-1])


@case("shard-size")
def shard_one_byte_long(world: World) -> None:
    (world.base / SHARDS[0]).write_bytes((world.base / SHARDS[0]).read_bytes() + b"\0")


@case("shard-size")
def shard_is_a_pointer(world: World) -> None:
    (world.base / SHARDS[0]).write_bytes(POINTER)


@case("shard-size")
def shard_is_empty(world: World) -> None:
    (world.base / SHARDS[0]).write_bytes(b"")


@case("shard-header")
def shard_header_is_a_list(world: World) -> None:
    (world.base / SHARDS[0]).write_bytes(struct.pack("<Q", 2) + b"[]" + b"\0" * 90)


@case("shard-header")
def shard_header_of_2_to_the_63(world: World) -> None:
    (world.base / SHARDS[0]).write_bytes(struct.pack("<Q", 2**63) + b"{}" * 90)


@case("hash-shard-header")
def shard_header_with_another_name_order(world: World) -> None:
    """The same tensors and the same data, in a header that is written differently."""
    raw = (world.base / SHARDS[0]).read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    text = json.dumps(dict(reversed(header.items()))).encode()
    assert len(text) == size
    (world.base / SHARDS[0]).write_bytes(raw[:8] + text + raw[8 + size :])


@case("hash-target-scales", "shard-header", "scale-missing")
def scale_header_hostile(world: World) -> None:
    (world.overlay / TARGET).write_bytes(struct.pack("<Q", 250_000) + b'{"a":' * 50_000)


# hashes --------------------------------------------------------------------------------------------------------------


@case("hash-shard-sample")
def shard_of_another_seed(world: World) -> None:
    other = bases.make_base(world.root / "other", seed=1)
    shutil.copyfile(other / SHARDS[0], world.base / SHARDS[0])


@case("hash-config")
def config_changed(world: World) -> None:
    edit(world.base / "config.json", lambda c: c.update(rms_norm_eps=1e-5))


@case("hash-config", "config-unreadable")
def config_of_another_model(world: World) -> None:
    (world.base / "config.json").write_text('{"model_type": "llama"}')


@case("hash-config", "provenance-invalid", "scale-missing", "scale-extra")
def config_with_other_layers(world: World) -> None:
    types = ["linear_attention"] * 2 + ["indexed_attention", "linear_attention"]
    edit(world.base / "config.json", lambda c: c.update(layer_types=types))


@case("hash-base-index")
def base_index_changed(world: World) -> None:
    edit(world.base / INDEX, lambda i: i["metadata"].update(note="newer"))


@case("hash-base-index")
def base_index_gone(world: World) -> None:
    (world.base / INDEX).unlink()


@case("hash-target-scales", "scale-record")
def one_scale_one_ulp_up(world: World) -> None:
    data = bytearray((world.overlay / TARGET).read_bytes())
    data[-4] ^= 1
    (world.overlay / TARGET).write_bytes(data)


@case("hash-draft-scales", "scale-record")
def draft_scales_swapped(world: World) -> None:
    data = (world.overlay / DRAFT).read_bytes()
    (world.overlay / DRAFT).write_bytes(data[:-8] + data[-4:] + data[-8:-4])


# provenance ----------------------------------------------------------------------------------------------------------


@case("provenance-missing")
def provenance_gone(world: World) -> None:
    (world.overlay / PROVENANCE).unlink()


@case("provenance-unreadable")
def provenance_truncated(world: World) -> None:
    (world.overlay / PROVENANCE).write_bytes((world.overlay / PROVENANCE).read_bytes()[:-10])


@case("provenance-unreadable")
def provenance_huge(world: World) -> None:
    (world.overlay / PROVENANCE).write_bytes(b"[" * (64 << 20))


@case("provenance-unreadable")
def provenance_full_of_lists(world: World) -> None:
    (world.overlay / PROVENANCE).write_bytes(b"[" + b"[]," * 1_390_000 + b"[]]")


@case("provenance-schema")
def provenance_of_the_future(world: World) -> None:
    provenance(world, lambda p: p.update(schema_version=2))


@case("provenance-invalid")
def provenance_without_a_base(world: World) -> None:
    provenance(world, lambda p: p.pop("base"))


@case("provenance-invalid")
def provenance_with_an_absolute_base(world: World) -> None:
    provenance(world, lambda p: p["base"].update(path="/"))


@case("provenance-invalid")
def provenance_that_contradicts_itself(world: World) -> None:
    provenance(world, lambda p: p["target"].update(tensor_count=24))


@case("provenance-hash")
def provenance_with_another_manifest(world: World) -> None:
    edit(world.overlay / PROVENANCE, lambda p: p["pack"].update(manifest_sha256="0" * 64))


@case("provenance-hash")
def provenance_that_hides_a_prototype(world: World) -> None:
    edit(world.overlay / PROVENANCE, lambda p: p["scales"][-1].update(origin="measured"))


@case("hash-shard-sample")
def provenance_of_another_shard(world: World) -> None:
    provenance(world, lambda p: p["base"]["shards"][SHARDS[1]].update(sample_sha256="0" * 64))


@case("link-replaced")
def provenance_is_a_link(world: World) -> None:
    (world.overlay / PROVENANCE).rename(world.root / "p.json")
    (world.overlay / PROVENANCE).symlink_to("../p.json")


# coverage ------------------------------------------------------------------------------------------------------------


@case("scale-missing", "index-not-in-shard")
def one_side_gone(world: World) -> None:
    scales(world, bases.scale_file({K3: bases.scale_of(6.3)}))


@case("scale-extra", "index-unlisted")
def layer_without_a_cache(world: World) -> None:
    values = {K3: bases.scale_of(6.3), V3: bases.scale_of(6.55), "model.layers.1.self_attn.k_scale": 1.0}
    scales(world, bases.scale_file(values))


@case("scale-twice", "index-unlisted")
def two_spellings(world: World) -> None:
    values = {K3: bases.scale_of(6.3), V3: bases.scale_of(6.55), "model.layers.3.self_attn.attn.k_scale": 1.0}
    scales(world, bases.scale_file(values))


# values --------------------------------------------------------------------------------------------------------------


@case("scale-record")
def other_scales(world: World) -> None:
    scales(world, bases.scale_file(GOOD))


@case("scale-value", "scale-record")
def scale_of_zero(world: World) -> None:
    scales(world, bases.scale_file({K3: bases.scale_of(6.3), V3: 0.0}))


@case("scale-value", "scale-record")
def scale_not_a_number(world: World) -> None:
    scales(world, bases.scale_file({K3: float("nan"), V3: bases.scale_of(6.55)}))


@case("scale-value", "scale-record")
def scale_negative(world: World) -> None:
    scales(world, bases.scale_file({K3: bases.scale_of(6.3), V3: -bases.scale_of(6.55)}))


@case("scale-type", "scale-record")
def scale_an_integer(world: World) -> None:
    scales(world, bases.scale_file({K3: bases.scale_of(6.3), V3: bases.scale_of(6.55)}, dtype="I32"))


@case("scale-type", "scale-record", "total-size")
def scale_a_vector(world: World) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}
    header = {K3: {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}, V3: entry}
    scales(world, json_file(header, struct.pack("<3f", bases.scale_of(6.3), 1.0, 1.0)))

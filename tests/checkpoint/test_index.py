"""Checkpoint folders: escapes (B23), truncated, missing and replaced shards (B25), the index as an allow-list."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

import pytest
from tests.checkpoint.files import good_file, write_index, write_sharded

from page4.checkpoint import Checkpoint, TensorBytes
from page4.errors import CheckpointError, HeaderError, IndexFileError, PathEscapeError, ShardError

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SHARDS = {A: {"x": b"12345678", "y": b"abc"}, B: {"z": b"zz"}}
INDEX = "model.safetensors.index.json"
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sharded(tmp_path / "model", SHARDS)
    return tmp_path / "model"


def read(checkpoint: Checkpoint, name: str) -> bytes:
    return bytes(TensorBytes(checkpoint).view(name))


def test_the_recorder_sees_what_is_opened(folder: Path, opened: list[str]) -> None:
    read(Checkpoint.open(folder), "x")
    assert {os.path.realpath(folder / name) for name in (A, B, INDEX)} <= set(opened)


def test_a_sharded_folder(folder: Path) -> None:
    checkpoint = Checkpoint.open(str(folder))
    assert checkpoint.names() == ("x", "y", "z") and "x" in checkpoint and "w" not in checkpoint
    assert checkpoint.entry("y") == ("U8", (3,), 8, 11)
    assert checkpoint.path("z").name == B and {path.name for path in checkpoint.files} == {A, B}
    assert checkpoint.index_sha256 == hashlib.sha256((folder / INDEX).read_bytes()).hexdigest()
    assert [read(checkpoint, name) for name in ("x", "y", "z")] == [b"12345678", b"abc", b"zz"]
    assert checkpoint.unlisted == ()


def test_a_single_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(good_file(SHARDS[A]))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.names() == ("x", "y") and checkpoint.index_sha256 is None
    assert read(checkpoint, "y") == b"abc"


def test_the_index_is_an_allow_list(folder: Path) -> None:
    write_index(folder, {"x": A, "z": B}, 10)
    (folder / "extra.safetensors").write_bytes(b"never looked at")
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.names() == ("x", "z") and checkpoint.unlisted == (("y", A),)


def test_the_index_decides_which_of_two_copies_counts(folder: Path) -> None:
    (folder / B).write_bytes(good_file({"z": b"zz", "x": b"other"}))
    checkpoint = Checkpoint.open(folder)
    assert read(checkpoint, "x") == b"12345678" and checkpoint.unlisted == (("x", B),)


# B23 -----------------------------------------------------------------------------------------------------------------

ESCAPES: list[object] = [
    "../trap.safetensors", "../x.safetensors", "/etc/hostname", "/etc/trap.safetensors", "a/../../trap.safetensors",
    "sub/inner.safetensors", "./model.safetensors", "..", ".", "", " ", ".safetensors", "C:\\x", "C:x.safetensors",
    "C:\\x.safetensors", "\\\\host\\share\\x.safetensors", "..\\trap.safetensors", "a\0b.safetensors",
    "trap.safetensors\0", "a\nb.safetensors", "model.bin", "model.safetensors.bin", "model.SAFETENSORS", "~/x.bin",
    "file:///etc/x.safetensors", "a" * 250 + ".safetensors", "\u202ex.safetensors", "\ud800.safetensors",
]  # fmt: skip


@pytest.mark.parametrize("name", ESCAPES, ids=ascii)
def test_a_name_that_is_not_plain_is_refused_before_anything_is_opened(
    folder: Path, opened: list[str], name: object
) -> None:
    trap = folder.parent / "trap.safetensors"
    trap.write_bytes(good_file({"x": b"12345678"}))
    (folder / "sub").mkdir()
    (folder / "sub" / "inner.safetensors").write_bytes(trap.read_bytes())
    write_index(folder, {"x": name, "z": B})
    opened.clear()
    with pytest.raises((PathEscapeError, IndexFileError)) as error:
        Checkpoint.open(folder)
    assert str(error.value).isprintable()
    assert set(opened) == {os.path.realpath(folder / INDEX)}


@pytest.mark.parametrize("value", [5, None, True, 1.5, [A], {"file": A}, -1], ids=repr)
def test_a_file_name_that_is_no_string_is_refused_by_tensor(folder: Path, opened: list[str], value: object) -> None:
    write_index(folder, {"tensor_x": value, "z": B})
    opened.clear()
    with pytest.raises(IndexFileError, match="tensor_x"):
        Checkpoint.open(folder)
    assert set(opened) == {os.path.realpath(folder / INDEX)}


@pytest.mark.parametrize("how", ["absolute", "relative", "chain", "dangling", "through a folder", "single", "index"])
def test_a_link_that_leaves_the_folder_is_refused_and_its_target_not_opened(
    folder: Path, opened: list[str], how: str
) -> None:
    trap = folder.parent / "trap.safetensors"
    trap.write_bytes(good_file({"x": b"12345678", "y": b"abc"}))
    link = folder / A
    if how == "single":
        (folder / INDEX).unlink()
        link = folder / "model.safetensors"
        link.symlink_to(trap)
    elif how == "index":
        link = folder / INDEX
        trap.write_bytes(link.read_bytes())
        link.unlink()
        link.symlink_to(trap)
    else:
        link.unlink()
    if how == "absolute":
        link.symlink_to(trap)
    elif how == "relative":
        link.symlink_to("../trap.safetensors")
    elif how == "chain":
        (folder / "second").symlink_to("../trap.safetensors")
        link.symlink_to("second")
    elif how == "dangling":
        link.symlink_to("../nowhere.safetensors")
    elif how == "through a folder":
        (folder / "out").symlink_to("..")
        link.symlink_to("out/trap.safetensors")
    opened.clear()
    with pytest.raises(PathEscapeError, match=link.name):
        Checkpoint.open(folder)
    assert os.path.realpath(trap) not in opened and os.path.realpath(folder / B) not in opened


def test_links_inside_the_folder_and_a_linked_folder_are_fine(folder: Path) -> None:
    (folder / A).rename(folder / "renamed")
    (folder / A).symlink_to("renamed")
    (folder.parent / "alias").symlink_to("model")
    assert Checkpoint.open(folder.parent / "alias").names() == ("x", "y", "z")


def hub_snapshot(root: Path) -> Path:
    """The folder layout of the hub cache: snapshot files are links to blobs."""
    repo = root / "models--org--name"
    snapshot = repo / "snapshots" / "0123abc"
    write_sharded(snapshot, SHARDS)
    (repo / "blobs").mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(repo / "blobs" / f"{number:064x}")
        path.symlink_to(f"../../blobs/{number:064x}")
    return snapshot


def test_a_hub_snapshot_is_accepted(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(hub_snapshot(tmp_path))
    assert checkpoint.names() == ("x", "y", "z") and read(checkpoint, "z") == b"zz"


@pytest.mark.parametrize("how", ["other repository", "refs", "blobs is a link", "subfolder of blobs"])
def test_a_hub_snapshot_may_not_leave_its_blobs(tmp_path: Path, how: str) -> None:
    snapshot = hub_snapshot(tmp_path)
    repo = snapshot.parent.parent
    (snapshot / A).unlink()
    if how == "other repository":
        other = tmp_path / "models--org--other" / "blobs"
        other.mkdir(parents=True)
        (other / "abc").write_bytes(good_file(SHARDS[A]))
        (snapshot / A).symlink_to("../../../models--org--other/blobs/abc")
    elif how == "refs":
        (repo / "refs").mkdir()
        (repo / "refs" / "abc").write_bytes(good_file(SHARDS[A]))
        (snapshot / A).symlink_to("../../refs/abc")
    elif how == "blobs is a link":
        (repo / "blobs").rename(tmp_path / "elsewhere")
        (repo / "blobs").symlink_to(tmp_path / "elsewhere")
        (snapshot / A).symlink_to(f"../../blobs/{0:064x}")
    else:
        (repo / "blobs" / "deep").mkdir()
        (repo / "blobs" / "deep" / "abc").write_bytes(good_file(SHARDS[A]))
        (snapshot / A).symlink_to("../../blobs/deep/abc")
    with pytest.raises(PathEscapeError):
        Checkpoint.open(snapshot)


# B25 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", ["cut 1", "cut 4096", "append 1", "empty", "pointer", "deleted", "folder", "header only"]
)
def test_a_damaged_shard_is_refused_with_file_and_sizes(tmp_path: Path, opened: list[str], how: str) -> None:
    folder = tmp_path / "m"
    write_sharded(folder, {A: {"x": b"1" * 10_000}, B: {"z": b"2" * 10_000}})
    path = folder / B
    content = path.read_bytes()
    changed = {
        "cut 1": content[:-1], "cut 4096": content[:-4096], "append 1": content + b"\0", "empty": b"",
        "pointer": POINTER, "header only": content[:-10_000],
    }.get(how)  # fmt: skip
    if changed is not None:
        path.write_bytes(changed)
    else:
        path.unlink()
        if how == "folder":
            path.mkdir()
    opened.clear()
    with pytest.raises(ShardError) as error:
        Checkpoint.open(folder)
    text = str(error.value)
    assert B in text and text.isprintable()
    if changed:
        assert str(len(changed)) in text
    if how in ("cut 1", "cut 4096", "append 1", "header only"):
        assert f"{len(content)} bytes" in text
    if how == "pointer":
        assert "LFS" in text
    if how in ("deleted", "folder"):
        assert os.path.realpath(folder / A) not in opened  # existence is checked before any shard is opened


@pytest.mark.parametrize("size", [14, 12, 0, 10**15])
def test_a_wrong_total_size_is_said(folder: Path, caplog: pytest.LogCaptureFixture, size: int) -> None:
    write_index(folder, {"x": A, "y": A, "z": B}, size)
    with caplog.at_level(logging.WARNING, "page4"):
        Checkpoint.open(folder)
    assert [record.getMessage() for record in caplog.records] == [
        f"{INDEX}: metadata.total_size is {size}, the tensors it lists have 13 bytes"
    ]


def test_a_right_or_absent_total_size_is_silent(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    Checkpoint.open(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": A, "y": A, "z": B}}))
    Checkpoint.open(folder)
    assert caplog.records == []


def test_a_tensor_that_its_shard_does_not_hold_is_named(folder: Path) -> None:
    write_index(folder, {"x": A, "y": B, "w": B, "z": B})
    with pytest.raises(IndexFileError, match=rf"no y in {B}, w in {B}"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"{}", b"{", b'{"weight_map": {}}', b'{"weight_map": []}', b'{"weight_map": null}', b"\xff\xfe{}",
        b'{"weight_map": {"x": "%s", "x": "%s"}}' % (A.encode(), B.encode()),
        b'{"weight_map": {"x": "%s"}, "weight_map": {"z": "%s"}}' % (A.encode(), B.encode()),
        b'{"weight_map": {"x": "%s"}} trailing' % A.encode(),
        b'{"metadata": {"total_size": "big"}, "weight_map": {"x": "%s"}}' % A.encode(),
        b'{"metadata": {"total_size": -1}, "weight_map": {"x": "%s"}}' % A.encode(),
        b'{"metadata": ' + b"[" * 50_000 + b"]" * 50_000 + b', "weight_map": {"x": "%s"}}' % A.encode(),
        b'{"metadata": {"a": [1,,2]}, "weight_map": {"x": "%s"}}' % A.encode(),
        b'{"metadata": {"a": %s}, "weight_map": {"x": "%s"}}' % (b'"' + b"b" * 2_000_000 + b'"', A.encode()),
        POINTER,
    ],
    ids=lambda c: repr(c[:40]),
)  # fmt: skip
def test_a_malformed_index_is_one_clean_error(folder: Path, content: bytes) -> None:
    (folder / INDEX).write_bytes(content)
    with pytest.raises(IndexFileError, match=r"index\.json") as error:
        Checkpoint.open(folder)
    assert str(error.value).isprintable()


def test_other_keys_of_an_index_are_passed_over(folder: Path) -> None:
    index = {
        "metadata": {"total_size": 13, "note": 'a"b', "more": [1, -2.5e3, None, True, {"deep": []}], "empty": {}},
        "format": "pt",
        "weight_map": {"x": A, "y": A, "z": B},
        "version": 1.0,
    }
    (folder / INDEX).write_text(json.dumps(index, indent=3))
    assert Checkpoint.open(folder).names() == ("x", "y", "z")
    (folder / INDEX).write_text(json.dumps({**index, "metadata": None}))
    assert Checkpoint.open(folder).names() == ("x", "y", "z")


def test_folders_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="nothing"):
        Checkpoint.open(tmp_path / "absent")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="a file"):
        Checkpoint.open(tmp_path / "file")
    (tmp_path / "pytorch_model.bin").write_text("x")
    with pytest.raises(CheckpointError, match="neither"):
        Checkpoint.open(tmp_path)


def test_a_bad_header_behind_an_index_is_named(folder: Path) -> None:
    (folder / B).write_bytes(b"\x02\0\0\0\0\0\0\0[]")
    with pytest.raises(HeaderError, match=B):
        Checkpoint.open(folder)


def test_a_file_that_changes_after_the_check_is_refused(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    (folder / A).write_bytes((folder / A).read_bytes()[:-1])
    with pytest.raises(ShardError, match=A):
        read(checkpoint, "x")


def test_released_bytes_can_be_read_again(tmp_path: Path) -> None:
    payload = bytes(range(256)) * 256
    write_sharded(tmp_path, {A: {"x": payload, "y": payload[::-1]}, B: {"z": b"zz"}})
    checkpoint = Checkpoint.open(tmp_path)
    data = TensorBytes(checkpoint)
    view = data.view("x")
    data.release("x")
    assert bytes(view) == payload and bytes(data.view("y")) == payload[::-1]

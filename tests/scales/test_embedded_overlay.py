"""Corruptions of an overlay of the embedded checkpoint, as `page4 demo` leaves it: each refused with its fault."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.scales.bases import DRAFT, INDEX, PROVENANCE, TARGET, edit, forge, make_report

from page4 import cli, embedded_checkpoint
from page4.scales.overlay import build_overlay
from page4.scales.pack import make_pack
from page4.scales.sources import Sources
from page4.scales.verify import verify_overlay

WEIGHTS = "model.safetensors"
NAME = "model.layers.3.self_attn.k_scale"


@pytest.fixture(scope="module")
def overlay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("embedded")
    shutil.copytree(embedded_checkpoint(), root / "base")
    report = root / "report.json"
    # The checkpoint calls its sparse layers full attention, as the public model does.
    types = ["linear_attention"] * 3 + ["indexed_attention"]
    make_report(report, {"num_hidden_layers": 8, "layer_types": types * 2})
    make_pack(report, root / "base", root / "pack")
    build_overlay(root / "base", root / "pack", root / "overlay", Sources(draft_report=report))
    return root / "overlay"


@pytest.fixture
def copy(overlay: Path, request: pytest.FixtureRequest) -> Path:
    """A copy beside the overlay, so that its links still lead to the base."""
    return Path(shutil.copytree(overlay, overlay.parent / "case", symlinks=True, dirs_exist_ok=False))


@pytest.fixture(autouse=True)
def _no_case_is_left(overlay: Path) -> None:
    shutil.rmtree(overlay.parent / "case", ignore_errors=True)


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def relink(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def replace(path: Path, data: bytes) -> None:
    """A file in place of a link."""
    path.unlink()
    path.write_bytes(data)


def changed_weights(folder: Path) -> None:
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-1] ^= 1
    replace(folder / WEIGHTS, bytes(data))


def loop(folder: Path) -> None:
    relink(folder / WEIGHTS, "other.safetensors")
    (folder / "other.safetensors").symlink_to(WEIGHTS)


Change = Callable[[Path], object]


def forged(change: Callable[[dict[str, Any]], object]) -> Change:
    """A provenance changed by somebody who knows the format."""
    return lambda folder: forge(folder / PROVENANCE, change)


def edited(name: str, change: Callable[[dict[str, Any]], object]) -> Change:
    return lambda folder: edit(folder / name, change)


CASES: dict[str, tuple[Change, str]] = {
    "no provenance": (lambda f: (f / PROVENANCE).unlink(), "provenance-missing"),
    "provenance cut": (lambda f: cut(f / PROVENANCE, 9), "provenance-unreadable"),
    "provenance of another schema": (forged(lambda p: p.update(schema_version=7)), "provenance-schema"),
    "provenance edited": (edited(PROVENANCE, lambda p: p["pack"].update(artifact_id="x")), "provenance-hash"),
    "a scale forged": (forged(lambda p: p["scales"][0].update(scale=0.5)), "scale-record"),
    "base path forged": (forged(lambda p: p["base"].update(path="../nowhere")), "base-missing"),
    "config hash forged": (forged(lambda p: p["base"].update(config_sha256="0" * 64)), "hash-config"),
    "no index": (lambda f: (f / INDEX).unlink(), "index-missing"),
    "index no JSON": (lambda f: (f / INDEX).write_text("{"), "index-unreadable"),
    "index with a tensor too many": (edited(INDEX, lambda i: i["weight_map"].update(x=WEIGHTS)), "index-not-in-shard"),
    "index without a scale": (edited(INDEX, lambda i: i["weight_map"].pop(NAME)), "index-unlisted"),
    "index with another size": (edited(INDEX, lambda i: i["metadata"].update(total_size=1)), "total-size"),
    "index that leaves the folder": (
        edited(INDEX, lambda i: i["weight_map"].update({NAME: "../x.safetensors"})), "index-name"
    ),
    "no target scales": (lambda f: (f / TARGET).unlink(), "file-missing"),
    "no draft scales": (lambda f: (f / DRAFT).unlink(), "file-missing"),
    "target scales cut": (lambda f: cut(f / TARGET, 1), "shard-size"),
    "a target scale off by one bit": (lambda f: flip(f / TARGET, -4), "hash-target-scales"),
    "a draft scale off by one bit": (lambda f: flip(f / DRAFT, -4), "hash-draft-scales"),
    "a header of 2^63 bytes": (lambda f: (f / TARGET).write_bytes(struct.pack("<Q", 1 << 63) + b"{}"), "shard-header"),
    "a link to nothing": (lambda f: relink(f / WEIGHTS, "../base/gone.safetensors"), "link-dangling"),
    "links in a loop": (loop, "link-loop"),
    "a link outside": (lambda f: relink(f / "config.json", os.path.relpath("/etc/hostname", f)), "link-escape"),
    "an absolute link": (lambda f: relink(f / WEIGHTS, str(f.parent / "base" / WEIGHTS)), "link-absolute"),
    "a link to another file": (lambda f: relink(f / "config.json", "../base/tokenizer.json"), "link-wrong"),
    "weights changed by one bit": (changed_weights, "hash-shard-sample"),
    "a config of its own": (lambda f: replace(f / "config.json", b"{}"), "hash-config"),
    "a weight file of nobody": (lambda f: shutil.copyfile(f / TARGET, f / "more.safetensors"), "file-unknown"),
    "a file that others cannot read": (lambda f: (f / TARGET).chmod(0o600), "file-mode"),
}  # fmt: skip


def test_as_it_was_built_it_passes(overlay: Path) -> None:
    found = verify_overlay(overlay, full=True)
    assert not found.faults and found.counts["target_scales"] == 4 and found.counts["draft_scales"] == 2


@pytest.mark.parametrize("case", CASES)
def test_a_corruption_is_refused_with_its_fault(copy: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    change, code = CASES[case]
    change(copy)
    began = time.process_time()
    assert cli.main(["scales", "verify", str(copy), "--json"]) == 1
    seconds = time.process_time() - began
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert code in {fault["code"] for fault in faults}, faults
    assert seconds < 1.0

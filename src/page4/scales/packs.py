"""Reads scale packs, ours and other people's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from page4.checkpoint.documents import parse_document, read_bounded
from page4.checkpoint.hashes import sha256_of_bytes, sha256_of_file
from page4.checkpoint.header import check_regular_file
from page4.checkpoint.paths import resolve_inside
from page4.checkpoint.scale_names import place
from page4.errors import ScaleError, message
from page4.geometry import Geometry
from page4.scales.choice import Choice, Choices, Place, check_coverage, target_places
from page4.scales.scale_file import MAX_SCALE_FILE_BYTES, read_scale_file
from page4.scales.schema import MANIFEST_NAME, PackManifest, PackTensor

# A manifest may print fewer digits of a scale than the file holds; more than this is another scale.
_SAME = 1e-5


@dataclass(frozen=True)
class Pack:
    """A checked pack: its files agree with each other. `values` are the fp32 scales by tensor name."""

    folder: Path
    manifest: PackManifest
    manifest_sha256: str
    values: dict[str, float]


def read_pack(folder: Path) -> Pack:
    """Read a pack and check its hash, names and counts. Raises `ScaleError`, `CheckpointError`."""
    if not folder.is_dir():
        got = "a file" if folder.exists() else "nothing"
        raise ScaleError(message(f"PACK {folder}", allowed="a folder", got=got, do="give the folder of a scale pack"))
    path = resolve_inside(folder, MANIFEST_NAME)
    text = read_bounded(path)
    manifest = parse_document(text, path, PackManifest)
    entry = manifest.scale_file
    file = resolve_inside(folder, entry.filename)
    if (size := check_regular_file(file)) > MAX_SCALE_FILE_BYTES:
        _refuse(str(file), f"at most {MAX_SCALE_FILE_BYTES} bytes", f"{size} bytes")
    if (found := sha256_of_file(file)) != entry.sha256:
        _refuse(str(file), f"SHA-256 {entry.sha256}, as in {MANIFEST_NAME}", found)
    values = read_scale_file(file)
    if sorted(entry.tensor_names) != sorted(values):
        differ = sorted(set(entry.tensor_names) ^ set(values)) or "a name twice"
        _refuse(f"{path}: scale_file.tensor_names", f"the names in {entry.filename}", f"a difference: {differ}")
    if entry.tensor_count != len(values):
        _refuse(f"{path}: scale_file.tensor_count", str(len(values)), str(entry.tensor_count))
    return Pack(folder, manifest, sha256_of_bytes(text), values)


def published(pack: Pack, geometry: Geometry) -> Choices:
    """The target's scales as the pack has them, bit for bit. Raises `ScaleError` unless none is missing or too much."""
    values: dict[Place, float] = {}
    places: list[Place] = []
    for name, value in pack.values.items():
        layer, sides = place(name, geometry)
        places += [(layer, side) for side in sides]
        values |= {(layer, side): value for side in sides}
    wanted = target_places(geometry)
    check_coverage(places, wanted, geometry, f"PACK {pack.folder}: {pack.manifest.scale_file.filename}")
    listed: list[Place] = [(tensor.layer, tensor.kind) for tensor in pack.manifest.tensors]
    check_coverage(listed, wanted, geometry, f"PACK {pack.folder}: {MANIFEST_NAME}: tensors")
    return {
        (tensor.layer, tensor.kind): _choice(pack, tensor, values[tensor.layer, tensor.kind])
        for tensor in sorted(pack.manifest.tensors, key=lambda tensor: (tensor.layer, tensor.kind))
    }


def _choice(pack: Pack, tensor: PackTensor, value: float) -> Choice:
    if tensor.scale is not None and abs(tensor.scale - value) > _SAME * value:
        what = f"PACK {pack.folder}: {MANIFEST_NAME}: scale of layer {tensor.layer} {tensor.kind}"
        _refuse(what, f"{value!r}, as in {pack.manifest.scale_file.filename}", repr(tensor.scale))
    return Choice(value, tensor.max_abs, "published")


def _refuse(what: str, allowed: str, got: str) -> NoReturn:
    raise ScaleError(message(what, allowed=allowed, got=got, do="get the pack again"))

"""The interchange files: bounded, strict, one line for each fault, other people's keys kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.scales import bases

from page4.errors import DocumentError, ScaleError
from page4.scales.scale_file import read_scale_file, scale_file_bytes
from page4.scales.schema import CalibrationReport, PackManifest, document_bytes, read_document

HASH = "a" * 64
MANIFEST: dict[str, Any] = {
    "schema_version": 1,
    "artifact_id": "x",
    "base_checkpoint": {"index_sha256": HASH},
    "scale_file": {"filename": "s.safetensors", "sha256": HASH, "tensor_count": 0, "tensor_names": []},
    "tensors": [{"layer": 3, "kind": "k", "max_abs": 2, "histogram": [1, 2]}],
    "calibration": {"tool": "another"},
}


def write(path: Path, value: object) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_unknown_keys_are_kept(tmp_path: Path) -> None:
    manifest = read_document(write(tmp_path / "m.json", MANIFEST), PackManifest)
    kept = json.loads(document_bytes(manifest))
    assert kept["calibration"] == {"tool": "another"} and kept["tensors"][0]["histogram"] == [1, 2]
    assert manifest.tensors[0].max_abs == 2.0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"schema_version": "1"}, "schema_version"),
        ({"schema_version": True}, "schema_version"),
        ({"schema_version": 1.0}, "schema_version"),
        ({"schema_version": None}, "schema_version"),
        ({"artifact_id": 5}, "artifact_id"),
        ({"base_checkpoint": {"index_sha256": "A" * 64}}, "base_checkpoint.index_sha256"),
        ({"base_checkpoint": None}, "base_checkpoint"),
        ({"scale_file": {**MANIFEST["scale_file"], "filename": "../s.safetensors"}}, "scale_file.filename"),
        ({"scale_file": {**MANIFEST["scale_file"], "tensor_count": "0"}}, "scale_file.tensor_count"),
        ({"tensors": [{"layer": 3, "kind": "q", "max_abs": 2}]}, "tensors.0.kind"),
        ({"tensors": [{"layer": -1, "kind": "k", "max_abs": 2}]}, "tensors.0.layer"),
        ({"tensors": [{"layer": 3, "kind": "k", "max_abs": 0}]}, "tensors.0.max_abs"),
        ({"tensors": [{"layer": 3, "kind": "k"}]}, "tensors.0.max_abs"),
        ({"tensors": [{"layer": 3, "kind": "k", "max_abs": True}]}, "tensors.0.max_abs"),
        ({"tensors": {}}, "tensors"),
    ],
)
def test_a_wrong_field_is_named_in_one_line(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    with pytest.raises(ScaleError) as error:
        read_document(write(tmp_path / "m.json", {**MANIFEST, **change}), PackManifest)
    assert f": {field}: expected" in str(error.value) and str(error.value).isprintable()


TEXTS = {
    "truncated": (json.dumps(MANIFEST)[:-5], "unreadable"),
    "empty": ("", "unreadable"),
    "a list": ("[]", "unreadable"),
    "NaN": ('{"schema_version": 1, "x": NaN}', "unreadable"),
    "Infinity": ('{"schema_version": 1, "x": -Infinity}', "unreadable"),
    "a key twice": ('{"schema_version": 1, "schema_version": 1}', "unreadable"),
    "an inner key twice": ('{"schema_version": 1, "x": {"a": 1, "a": 1}}', "unreadable"),
    "deep": ('{"a":' * 50_000, "unreadable"),
    "a huge integer": ('{"schema_version": ' + "1" * 5000 + "}", "unreadable"),
    "too large": ('{"schema_version": 1, "x": "' + "a" * (5 << 20) + '"}', "unreadable"),
    "another version": ('{"schema_version": 7}', "schema"),
    "no version": ("{}", "schema"),
    "overflow": (json.dumps(MANIFEST).replace('"max_abs": 2', '"max_abs": 1e999'), "invalid"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_malformed_files_are_refused_by_kind(tmp_path: Path, case: str) -> None:
    text, kind = TEXTS[case]
    with pytest.raises(DocumentError) as error:
        read_document(write(tmp_path / "m.json", text), PackManifest)
    assert error.value.kind == kind
    assert str(error.value).isprintable() and len(str(error.value)) < 5000


def test_a_missing_file_a_folder_and_bad_utf8(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_bytes(b'{"schema_version": 1, "x": "\xff"}')
    for name, kind in (("none.json", "missing"), (".", "missing"), ("bad.json", "unreadable")):
        with pytest.raises(DocumentError) as error:
            read_document(tmp_path / name, PackManifest)
        assert error.value.kind == kind


def test_a_report_needs_its_tensors_only(tmp_path: Path) -> None:
    content = {"tensors": {"model.layers.3.self_attn.k_scale": {"max_abs": 3.5, "tokens": 7}}}
    report = read_document(write(tmp_path / "r.json", content), CalibrationReport)
    assert report.tensors["model.layers.3.self_attn.k_scale"].token_count == 7
    with pytest.raises(ScaleError, match="kind"):
        read_document(write(tmp_path / "r.json", {**content, "kind": "a speed report"}), CalibrationReport)
    with pytest.raises(ScaleError, match="schema_version"):
        read_document(write(tmp_path / "r.json", {**content, "schema_version": 2}), CalibrationReport)


def test_scale_files_are_read_and_written_as_safetensors_does(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    scales = {"b": bases.from_bits(0x3C123457), "a": 0.5, "c" * 30: 2.0**-140}
    (tmp_path / "s.safetensors").write_bytes(scale_file_bytes(scales))
    loaded = load_file(tmp_path / "s.safetensors")
    assert {name: tensor.item() for name, tensor in loaded.items()} == scales
    assert all(tuple(t.shape) == () and str(t.dtype) == "torch.float32" for t in loaded.values())
    assert read_scale_file(tmp_path / "s.safetensors") == scales
    assert scale_file_bytes(dict(reversed(scales.items()))) == (tmp_path / "s.safetensors").read_bytes()
    (tmp_path / "t.safetensors").write_bytes(bases.scale_file(scales))
    assert read_scale_file(tmp_path / "t.safetensors") == scales


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, float("nan"), float("inf"), float("-inf")], ids=repr)
def test_b13_a_scale_that_is_no_scale_is_refused_by_name(tmp_path: Path, value: float) -> None:
    (tmp_path / "s.safetensors").write_bytes(bases.scale_file({"good": 1.0, "bad": value}))
    with pytest.raises(ScaleError, match="bad: expected a finite positive number"):
        read_scale_file(tmp_path / "s.safetensors")


def test_other_types_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "s.safetensors").write_bytes(bases.scale_file({"bad": 1.0}, dtype="I32"))
    with pytest.raises(ScaleError, match=r"bad: expected one F32 number of shape \[\], got I32 \[\]"):
        read_scale_file(tmp_path / "s.safetensors")


def test_no_module_of_the_scale_tools_imports_torch() -> None:
    code = (
        "import sys\n"
        "from page4.checkpoint import binding\n"
        "from page4.scales import overlay, pack, verify, schema\n"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

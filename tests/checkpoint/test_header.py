"""Malformed and hostile safetensors headers (B29), against files of the safetensors package and raw bytes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.checkpoint.files import entry, good_file, json_file, raw_file

from page4.checkpoint import read_header
from page4.checkpoint.header import DTYPE_BITS, MAX_HEADER_BYTES
from page4.errors import CheckpointError, HeaderError, ShardError

EIGHT = b"\0" * 8
ONE = {"a": entry([2], 0, 8)}
DEEP = b'{"a":' * 50_000


SECOND = '"dtype":"F32","shape":[2],"data_offsets":[8,16]'
NOTHING = '"dtype":"U8","shape":[0],"data_offsets":[0,0]'


def text(value: str, data: bytes = EIGHT) -> bytes:
    return raw_file(value.encode(), data)


def good(inner: str = '"dtype":"F32","shape":[2],"data_offsets":[0,8]') -> str:
    return "{" + inner + "}"


BAD_HEADERS: dict[str, bytes] = {
    "length 2**63": raw_file(b"{}", b"", length=2**63),
    "length 2**64-1": raw_file(b"{}", b"", length=2**64 - 1),
    "length just above the limit": raw_file(b"{}", b"", length=MAX_HEADER_BYTES + 1),
    "list": text("[]"),
    "number": text("17"),
    "null": text("null"),
    "string": text('"a"'),
    "space before the brace": text(" " + json.dumps(ONE)),
    "empty header": raw_file(b"", EIGHT),
    "zero bytes": raw_file(b"\0" * 100),
    "open object": text("{"),
    "open string": text('{"a'),
    "no value": text('{"a":}'),
    "no colon": text('{"a" {}}'),
    "trailing comma": text('{"a":' + good() + ",}"),
    "two commas": text('{"a":' + good() + ',,"b":' + good() + "}"),
    "text after the object": text('{"a":' + good() + "}x"),
    "two objects": text('{"a":' + good() + "}{}"),
    "comment": text('{"a":' + good() + "/* */}"),
    "single quotes": text("{'a':" + good() + "}"),
    "entry is a list": json_file({"a": [1]}, EIGHT),
    "entry is null": json_file({"a": None}, EIGHT),
    "entry is empty": json_file({"a": {}}, EIGHT),
    "no dtype": json_file({"a": {"shape": [2], "data_offsets": [0, 8]}}, EIGHT),
    "no shape": json_file({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, EIGHT),
    "no offsets": json_file({"a": {"dtype": "F32", "shape": [2]}}, EIGHT),
    "unknown entry key": json_file({"a": {**ONE["a"], "x": 1}}, EIGHT),
    "reversed offsets": json_file({"a": entry([2], 8, 0)}, EIGHT),
    "negative offset": json_file({"a": entry([2], -8, 0)}, EIGHT),
    "float offset": json_file({"a": entry([2], 0, 8.0)}, EIGHT),
    "exponent offset": text('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8e0]}}'),
    "string offset": json_file({"a": entry([2], 0, "8")}, EIGHT),
    "boolean offset": json_file({"a": entry([1], False, 4)}, EIGHT),
    "null offset": json_file({"a": entry([2], None, 8)}, EIGHT),
    "leading zero": text('{"a":{"dtype":"F32","shape":[02],"data_offsets":[0,8]}}'),
    "plus sign": text('{"a":{"dtype":"F32","shape":[+2],"data_offsets":[0,8]}}'),
    "hexadecimal": text('{"a":{"dtype":"F32","shape":[0x2],"data_offsets":[0,8]}}'),
    "NaN": text('{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}'),
    "one offset": json_file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8]}}, EIGHT),
    "three offsets": json_file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]}}, EIGHT),
    "nested offsets": json_file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [[0], 8]}}, EIGHT),
    "overlap": json_file({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, b"\0" * 12),
    "same place": json_file({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}, EIGHT),
    "contained": json_file({"a": entry([4], 0, 16), "b": entry([1], 4, 8)}, b"\0" * 16),
    "hole at start": json_file({"a": entry([1], 4, 8)}, EIGHT),
    "hole between": json_file({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, b"\0" * 12),
    "shape too small": json_file({"a": entry([1], 0, 8)}, EIGHT),
    "shape too big": json_file({"a": entry([2], 0, 4)}, b"\0" * 4),
    "scalar of eight bytes": json_file({"a": entry([], 0, 8)}, EIGHT),
    "negative size": json_file({"a": entry([-2], 0, 8)}, EIGHT),
    "two negative sizes": json_file({"a": entry([-2, -1], 0, 8)}, EIGHT),
    "float size": json_file({"a": entry([2.0], 0, 8)}, EIGHT),
    "shape is a number": text('{"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}}'),
    "product above 2**63": json_file({"a": entry([2**32, 2**32], 0, 8)}, EIGHT),
    "product wraps to 2": json_file({"a": entry([2**63 + 1, 2], 0, 8)}, EIGHT),
    "product above 2**63 times zero": json_file({"a": entry([2**32, 2**32, 0], 0, 0)}),
    "size of 2**64": json_file({"a": entry([2**64, 0], 0, 0)}),
    "thousand-digit size": text('{"a":{"dtype":"F32","shape":[' + "9" * 1000 + '],"data_offsets":[0,8]}}'),
    "thousand-digit offset": text('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,' + "9" * 1000 + "]}}"),
    "thousand axes": json_file({"a": entry([1] * 1000 + [2], 0, 8)}, EIGHT),
    "unknown dtype": json_file({"a": entry([2], 0, 8, "F33")}, EIGHT),
    "lower-case dtype": json_file({"a": entry([2], 0, 8, "f32")}, EIGHT),
    "dtype is a number": json_file({"a": entry([2], 0, 8, 32)}, EIGHT),
    "half a byte": json_file({"a": entry([1], 0, 1, "F4")}, b"\0"),
    "deep object": raw_file(DEEP + b"1" + b"}" * 50_000),
    "deep list": raw_file(b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    "deep shape": text('{"a":{"dtype":"F32","shape":' + "[" * 50_000 + "]" * 50_000 + ',"data_offsets":[0,8]}}'),
    "deep metadata": text('{"__metadata__":' + "{" * 50_000 + "}" * 50_000 + "}"),
    "invalid UTF-8 in a name": raw_file(b'{"\xff":' + good().encode() + b"}", EIGHT),
    "overlong UTF-8": raw_file(b'{"\xc0\xaf":' + good().encode() + b"}", EIGHT),
    "UTF-8 surrogate": raw_file(b'{"\xed\xa0\x80":' + good().encode() + b"}", EIGHT),
    "UTF-16": raw_file(json.dumps(ONE).encode("utf-16"), EIGHT),
    "byte order mark": raw_file(b"\xef\xbb\xbf" + json.dumps(ONE).encode(), EIGHT),
    "lone surrogate escape": text('{"\\ud800":' + good() + "}"),
    "bad escape": text('{"\\x61":' + good() + "}"),
    "raw newline in a name": text('{"a\nb":' + good() + "}"),
    "NUL in a name": text('{"a\0b":' + good() + "}"),
    "name of 5000 bytes": json_file({"a" * 5000: entry([2], 0, 8)}, EIGHT),
    "duplicate, other offsets": text('{"a":' + good() + ',"a":' + good(SECOND) + "}", b"\0" * 16),
    "duplicate, same offsets": text('{"a":' + good() + ',"a":' + good() + "}"),
    "duplicate by escape": text('{"a":' + good() + ',"\\u0061":' + good() + "}"),
    "duplicate empty tensor": text('{"a":' + good(NOTHING) + ',"a":' + good(NOTHING) + "}", b""),
    "duplicate dtype": text('{"a":' + good('"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]') + "}"),
    "duplicate shape": text('{"a":' + good('"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]') + "}"),
    "duplicate metadata": text('{"__metadata__":{},"__metadata__":{},"a":' + good() + "}"),
    "duplicate metadata key": text('{"__metadata__":{"a":"b","a":"b"},"a":' + good() + "}"),
    "metadata number": json_file({"__metadata__": {"a": 1}, **ONE}, EIGHT),
    "metadata null": json_file({"__metadata__": {"a": None}, **ONE}, EIGHT),
    "metadata object": json_file({"__metadata__": {"a": {"b": "c"}}, **ONE}, EIGHT),
    "metadata list": json_file({"__metadata__": ["a"], **ONE}, EIGHT),
    "metadata string": json_file({"__metadata__": "a", **ONE}, EIGHT),
    "metadata as a tensor": json_file({"__metadata__": entry([2], 0, 8)}, EIGHT),
    "metadata of a megabyte": json_file({"__metadata__": {"a": "b" * 2**20}, **ONE}, EIGHT),
}  # fmt: skip

BAD_SIZES: dict[str, bytes] = {
    "empty": b"",
    "one byte": b"\0",
    "nine bytes": raw_file(b"{"),
    "header longer than the file": raw_file(b"{}", b"", length=3),
    "end after the data": json_file({"a": entry([3], 0, 12)}, EIGHT),
    "one byte short": json_file(ONE, b"\0" * 7),
    "one byte more": json_file(ONE, b"\0" * 9),
    "no tensors but data": json_file({}, b"\0"),
    "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456789\n",
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_a_bad_header_is_one_clean_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(BAD_HEADERS[name])
    start = time.perf_counter()
    with pytest.raises(HeaderError) as error:
        read_header(path)
    assert time.perf_counter() - start < 1.0
    check_message(str(error.value))


@pytest.mark.parametrize("name", BAD_SIZES)
def test_a_wrong_size_names_file_and_both_sizes(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(BAD_SIZES[name])
    with pytest.raises(ShardError) as error:
        read_header(path)
    check_message(str(error.value))
    assert str(path) in str(error.value) and str(len(BAD_SIZES[name])) in str(error.value)


def check_message(text: str) -> None:
    assert text.isprintable() and len(text) < 8000
    assert "model.safetensors" in text and "expected" in text and "got" in text and ";" in text


READ_ALL = """
import resource, sys
from pathlib import Path
from page4.checkpoint.header import read_header
from page4.errors import CheckpointError
for path in sys.argv[1:]:
    try:
        read_header(Path(path))
    except CheckpointError:
        continue
    print("accepted", path)
status = Path("/proc/self/status")  # there ru_maxrss may be the parent's
lines = status.read_text().split("\\n") if status.exists() else []
print(next((int(l.split()[1]) for l in lines if l.startswith("VmHWM")), resource.getrusage(0).ru_maxrss))
"""


def test_every_bad_header_stays_below_200_mb(tmp_path: Path) -> None:
    """All cases, plus headers as large as the limit allows, in a fresh process that reports its peak."""
    many = b",".join(b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(150_001))
    contents = {
        "spaces": b"{" + b" " * (MAX_HEADER_BYTES - 1),
        "one name": b'{"' + b"a" * (MAX_HEADER_BYTES - 2),
        "escapes": b'{"' + b"\\n" * (MAX_HEADER_BYTES // 2 - 1),
        "shape": b'{"a":{"dtype":"U8","shape":[' + b"1," * 1_000_000,
        "metadata": b'{"__metadata__":{' + b",".join(b'"%d":""' % i for i in range(100_000)),
        "tensors": b"{" + many + b"," + b" " * (MAX_HEADER_BYTES - len(many) - 2),
    }
    small = {f"small-{i}": content for i, content in enumerate({**BAD_HEADERS, **BAD_SIZES}.values())}
    files = {name: raw_file(content) for name, content in contents.items()} | small
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    command = [sys.executable, "-c", READ_ALL, *(str(tmp_path / name) for name in files)]
    *accepted, peak_kb = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
    for name in contents:
        (tmp_path / name).unlink()
    assert accepted == []
    assert int(peak_kb) * (1 if sys.platform == "darwin" else 1024) < 200e6


def test_reads_what_the_safetensors_package_writes(tmp_path: Path, generator: torch.Generator) -> None:
    dtypes = {
        "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64, "I64": torch.int64,
        "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    }  # fmt: skip
    tensors = {
        f"{name}.{i}": torch.randint(0, 2, shape, generator=generator).to(dtype)
        for name, dtype in dtypes.items()
        for i, shape in enumerate([(), (1,), (3, 5), (0, 4), (2, 1, 3)])
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt", "note": 'quo"te \\ \n é'})
    header = read_header(path)
    assert header.metadata == {"format": "pt", "note": 'quo"te \\ \n é'}
    assert set(header.tensors) == set(tensors)
    content = path.read_bytes()
    assert header.file_size == len(content)
    for name, tensor in tensors.items():
        found = header.tensors[name]
        assert (found.dtype, found.shape) == (name.split(".")[0], tuple(tensor.shape))
        stored = content[header.data_start + found.begin : header.data_start + found.end]
        assert stored == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_any_order_and_spacing_of_good_json_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    header = (
        '{ "b" :\t{"data_offsets" : [ 4 , 12 ] ,\n"shape":[2, 1],"dtype" : "F32"}, '
        '"\\u00e9\\n":{"shape":[],"data_offsets":[0,4],"dtype":"I32"} }  '
    )
    path.write_bytes(raw_file(header.encode(), b"\0" * 12))
    tensors = read_header(path).tensors
    assert tensors == {"b": ("F32", (2, 1), 4, 12), "é\n": ("I32", (), 0, 4)}


def test_an_empty_header_is_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(json_file({}))
    assert read_header(path).tensors == {}


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_has_its_size(tmp_path: Path, dtype: str) -> None:
    size = DTYPE_BITS[dtype]
    path = tmp_path / "x.safetensors"
    path.write_bytes(json_file({"a": entry([8], 0, size, dtype)}, b"\0" * size))
    assert read_header(path).tensors["a"].end == size
    path.write_bytes(json_file({"a": entry([8], 0, size + 1, dtype)}, b"\0" * (size + 1)))
    with pytest.raises(HeaderError, match=str(size)):
        read_header(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_mutated_files_are_read_or_refused(tmp_path: Path, seed: int) -> None:
    """Any damage gives a checkpoint error or a header whose tensors lie in the file; nothing else is raised."""
    random_ = random.Random(seed)
    content = bytearray(good_file({"alpha": b"12345678", "beta": b"", "gamma": b"x" * 20}))
    for _ in range(random_.randint(1, 4)):
        where = random_.randrange(len(content))
        match random_.randrange(4):
            case 0:
                content[where] = random_.randrange(256)
            case 1:
                del content[where : where + random_.randint(1, 8)]
            case 2:
                content[where:where] = random_.choice([b'"', b"{", b"}", b"[", b",", b"9", b"-", b"\\", b"\0", b" "])
            case 3:
                content[where:where] = content[where // 2 : where]
        if not content:
            break
    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes(content))
    try:
        header = read_header(path)
    except CheckpointError as error:
        assert str(error).isprintable()
        return
    ends = [found.end for found in header.tensors.values()]
    assert header.data_start + max(ends, default=0) == header.file_size == len(content)


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo", "loop"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.safetensors"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        import os

        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path.name)
    with pytest.raises(ShardError, match=r"x\.safetensors"):
        read_header(path)

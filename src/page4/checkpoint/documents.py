"""JSON files about scales: bounded, each key once, checked by a pydantic model; a fault is one line that names it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from page4.checkpoint.header import check_regular_file
from page4.errors import DocumentError, ShardError, message

MAX_DOCUMENT_BYTES = 4 << 20
MAX_BRACKETS = 200_000  # a list costs far more than the two bytes that open and close it
_GET = "get the file again from where it was made"
Model = TypeVar("Model", bound=BaseModel)


class Record(BaseModel):
    """Part of a document: no conversion between types; keys that page4 does not know are kept."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class Document(Record):
    """A whole file; only version 1 is read."""

    version_required: ClassVar[bool] = True

    schema_version: int = 1


DocumentModel = TypeVar("DocumentModel", bound=Document)


def read_document(path: Path, model: type[DocumentModel]) -> DocumentModel:
    """Read and check a file. Raises `DocumentError` with the kind of fault."""
    return parse_document(read_bounded(path), path, model)


def parse_document(text: bytes, path: Path, model: type[DocumentModel]) -> DocumentModel:
    """Check the content of a file; `path` is for messages."""
    value = parse_object(text, path)
    version = value.get("schema_version", None if model.version_required else 1)
    if type(version) is not int or version != 1:
        got = "none" if version is None else repr(version)
        _refuse(path, "schema", "schema_version", "1", got, "use the version of page4 that wrote it")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        got = "nothing" if first["type"] == "missing" else repr(first["input"])
        _refuse(path, "invalid", field, first["msg"], got[:200], _GET)


def read_bounded(path: Path) -> bytes:
    """The bytes of a regular file of at most 4 MiB. Raises `DocumentError`."""
    try:
        size = check_regular_file(path)
    except ShardError as error:
        raise DocumentError(str(error), "missing") from None
    if size > MAX_DOCUMENT_BYTES:
        _refuse(path, "unreadable", "", f"at most {MAX_DOCUMENT_BYTES} bytes", f"{size} bytes", _GET)
    with path.open("rb") as file:
        return file.read(MAX_DOCUMENT_BYTES)


def parse_object(text: bytes, path: Path) -> dict[str, Any]:
    """The JSON object in a file, each key once. Raises `DocumentError`; `path` is for messages."""
    if (brackets := text.count(b"[") + text.count(b"{")) > MAX_BRACKETS:
        _refuse(path, "unreadable", "", f"at most {MAX_BRACKETS} lists and objects", f"{brackets} brackets", _GET)
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        _refuse(path, "unreadable", "", "a JSON object", f"{type(error).__name__}: {error}", _GET)
    if not isinstance(value, dict):
        _refuse(path, "unreadable", "", "a JSON object", type(value).__name__, _GET)
    return value


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} twice")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _refuse(path: Path, kind: str, field: str, allowed: str, got: str, do: str) -> NoReturn:
    what = f"{path}: {field}" if field else str(path)
    raise DocumentError(message(what, allowed=allowed, got=got, do=do), kind)


def document_bytes(value: BaseModel) -> bytes:
    """The file of a document: the same bytes for the same content, keys in the order of the model."""
    return json.dumps(value.model_dump(mode="json"), indent=1, allow_nan=False).encode() + b"\n"

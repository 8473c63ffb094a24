"""The index of an overlay, against the headers of its weight files and against the base's index, both ways."""

from __future__ import annotations

from page4.checkpoint.index_file import INDEX_NAME, SINGLE_NAME, Index, read_index
from page4.checkpoint.paths import check_shard_name
from page4.checkpoint.provenance import Provenance
from page4.errors import CheckpointError, PathEscapeError
from page4.scales.faults import Findings
from page4.scales.verify_shards import Headers
from page4.scales.view import View

_SHOWN = 5


def check_index(view: View, provenance: Provenance | None, headers: Headers) -> None:
    """Faults of the index, of what it lists, and of what it does not list."""
    index = _read(view, provenance)
    base_map = None if provenance is None else _base_map(view, provenance, headers)
    if index is None:
        return
    if provenance is not None and index.sha256 != provenance.index_sha256:
        view.findings.add("hash-index", INDEX_NAME, index.sha256)
    _check_names(view, provenance, index)
    _check_headers(view.findings, index, headers)
    scales = _scale_map(provenance)
    _check_unlisted(view.findings, index, headers, {**(base_map or {}), **scales}, set(scales.values()))
    if base_map is not None:
        _check_base(view.findings, index, {**base_map, **scales})
    view.findings.counts["tensors"] = len(index.weight_map)


def _read(view: View, provenance: Provenance | None) -> Index | None:
    if not (view.folder / INDEX_NAME).is_symlink() and not (view.folder / INDEX_NAME).exists():
        view.findings.add("index-missing", INDEX_NAME, "nothing")
        return None
    path = view.file(INDEX_NAME, provenance)
    try:
        return None if path is None else read_index(path)
    except CheckpointError as error:
        view.findings.add("index-unreadable", INDEX_NAME, error)
        return None


def _base_map(view: View, provenance: Provenance, headers: Headers) -> dict[str, str] | None:
    """Which tensor lies in which file of the base; None when that cannot be told."""
    found = view.base_end(INDEX_NAME)
    recorded = provenance.base.index_sha256
    if found is None:
        return None
    if recorded is None:
        if found.state != "dangling":
            view.findings.add("hash-base-index", INDEX_NAME, "the base has an index now")
            return None
        return dict.fromkeys(headers[SINGLE_NAME][1].tensors, SINGLE_NAME) if SINGLE_NAME in headers else None
    if found.state != "file":
        view.findings.add("hash-base-index", INDEX_NAME, f"{found.state} at {found.path}")
        return None
    try:
        index = read_index(found.path)
    except CheckpointError as error:
        view.findings.add("hash-base-index", INDEX_NAME, error)
        return None
    if index.sha256 != recorded:
        view.findings.add("hash-base-index", INDEX_NAME, index.sha256)
    return index.weight_map


def _scale_map(provenance: Provenance | None) -> dict[str, str]:
    records = () if provenance is None else provenance.scale_files
    return {name: record.filename for record in records for name in record.tensor_names}


def _check_names(view: View, provenance: Provenance | None, index: Index) -> None:
    for shard in sorted(set(index.weight_map.values())):
        try:
            view.file(check_shard_name(shard), provenance)
        except PathEscapeError as error:
            view.findings.add("index-name", INDEX_NAME, error)


def _check_headers(findings: Findings, index: Index, headers: Headers) -> None:
    """Every listed tensor is in its shard, and total_size is their sum."""
    size, whole = 0, True
    absent: dict[str, list[str]] = {}
    for name, shard in index.weight_map.items():
        if shard not in headers:
            whole = False  # the shard itself is a fault already
        elif name not in headers[shard][1].tensors:
            absent.setdefault(shard, []).append(name)
        else:
            entry = headers[shard][1].tensors[name]
            size += entry.end - entry.begin
    for shard, names in absent.items():
        findings.add("index-not-in-shard", shard, _some(names))
    if whole and not absent and index.total_size != size:
        findings.add("total-size", INDEX_NAME, f"{index.total_size}, the listed tensors have {size} bytes")


def _check_unlisted(
    findings: Findings, index: Index, headers: Headers, expected: dict[str, str], scale_files: set[str]
) -> None:
    """No shard holds a tensor that should be listed there and is not; of a scale file, no tensor at all."""
    for shard, (_, header) in headers.items():
        names = [
            name
            for name in header.tensors
            if index.weight_map.get(name) != shard and (expected.get(name) == shard or shard in scale_files)
        ]
        if names:
            findings.add("index-unlisted", shard, _some(names))


def _check_base(findings: Findings, index: Index, expected: dict[str, str]) -> None:
    """Nothing but the scales was added to the base's index, and nothing was taken away or moved."""
    for word, names in {
        "missing": [name for name in expected if name not in index.weight_map],
        "too much": [name for name in index.weight_map if name not in expected],
        "in another file": [n for n, shard in expected.items() if index.weight_map.get(n, shard) != shard],
    }.items():
        if names:
            findings.add("index-base", INDEX_NAME, f"{word}: {_some(names)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(sorted(names)[:_SHOWN]) + more

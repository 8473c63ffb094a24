"""Weight files of an overlay: headers, sizes, samples and, when asked for, whole hashes."""

from __future__ import annotations

from pathlib import Path

from page4.checkpoint.hashes import OnBytes, sha256_of_file
from page4.checkpoint.header import ShardHeader, read_header
from page4.checkpoint.identity import ShardRecord, shard_record
from page4.checkpoint.provenance import Provenance
from page4.errors import HeaderError, ShardError
from page4.scales.faults import Findings
from page4.scales.view import View

WHOLE_BYTES = 256 << 20
Headers = dict[str, tuple[Path, ShardHeader]]


def check_shards(view: View, provenance: Provenance | None, *, full: bool, on_bytes: OnBytes | None = None) -> Headers:
    """The readable weight files by name; faults for all others and for those that are not the recorded ones."""
    names = {name for name in view.names() if name.endswith(".safetensors") and "/" not in name}
    records: dict[str, ShardRecord] = {}
    scale_files: dict[str, tuple[str, str]] = {}
    if provenance is not None:
        records = provenance.base.shards
        codes = ("hash-target-scales", "hash-draft-scales")
        scale_files = {r.filename: (code, r.sha256) for code, r in zip(codes, provenance.scale_files, strict=False)}
    whole = full or sum(record.size_bytes for record in records.values()) <= WHOLE_BYTES
    headers: Headers = {}
    for name in sorted(names):
        path = view.file(name, provenance)
        header = None if path is None else _header(view.findings, name, path)
        if path is None:
            continue
        if name in scale_files and (found := sha256_of_file(path)) != scale_files[name][1]:
            view.findings.add(scale_files[name][0], name, found)
        if header is not None:
            headers[name] = (path, header)
            if name in records:
                sure = whole and records[name].sha256 is not None
                seen = shard_record(path, header, full=sure, on_bytes=on_bytes)
                _compare(view.findings, name, records[name], seen, full=full)
    view.findings.counts["shards"] = len(records)
    return headers


def _header(findings: Findings, name: str, path: Path) -> ShardHeader | None:
    try:
        return read_header(path)
    except HeaderError as error:
        findings.add("shard-header", name, error)
    except ShardError as error:
        findings.add("shard-size", name, error)
    return None


def _compare(findings: Findings, name: str, record: ShardRecord, found: ShardRecord, *, full: bool) -> None:
    if found.size_bytes != record.size_bytes:
        findings.add("shard-size", name, f"{found.size_bytes} bytes, {record.size_bytes} in the provenance")
    elif found.header_sha256 != record.header_sha256:
        findings.add("hash-shard-header", name, found.header_sha256)
    elif record.sample_sha256 not in (None, found.sample_sha256):
        findings.add("hash-shard-sample", name, found.sample_sha256)
    elif found.sha256 not in (None, record.sha256):
        findings.add("hash-shard", name, found.sha256)
    if full and record.sha256 is None:
        findings.add("hash-unrecorded", name, "build the overlay with --full to record it")

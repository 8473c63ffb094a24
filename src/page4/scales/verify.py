"""`page4 scales verify`: everything that an overlay claims is derived again; all faults are collected, none is raised.

How strong. Config, indexes and scale files are hashed whole. Shards are compared by size, header and a sample of their
data; `full` hashes them whole, where the build recorded it (see `checkpoint.identity`). Up to 256 MiB in all they are
hashed whole in any case.
"""

from __future__ import annotations

from pathlib import Path

from page4.checkpoint.hashes import CONFIG_NAME, MAX_CONFIG_BYTES, OnBytes, sha256_of_file
from page4.checkpoint.index_file import INDEX_NAME
from page4.checkpoint.provenance import PROVENANCE_NAME, Provenance, read_unsealed
from page4.errors import ConfigError, DocumentError, Page4Error, PathEscapeError
from page4.geometry import Geometry
from page4.scales.faults import Findings
from page4.scales.files import FILE_MODE
from page4.scales.verify_index import check_index
from page4.scales.verify_scales import check_scales
from page4.scales.verify_shards import check_shards
from page4.scales.view import View


def verify_overlay(
    folder: Path, *, full: bool = False, root: Path | None = None, on_bytes: OnBytes | None = None
) -> Findings:
    """Verify an overlay; it holds when `faults` is empty.

    `root`: links are followed as inside a container whose root is this folder. `on_bytes` hears of what is hashed
    whole. Raises `UsageError` when the overlay does not lie in the root, and nothing else that a file can cause.
    """
    findings = Findings()
    if root is None and not folder.is_dir():
        findings.add("folder-missing", str(folder), "a file" if folder.exists() else "nothing")
        return findings
    view = View(folder, root, findings)
    provenance = _provenance(view)
    try:
        if provenance is not None:
            view.find_base(provenance)
            _check_record(view, provenance)
        _check_files(view, provenance)
        geometry = _geometry(view, provenance)
        shards = check_shards(view, provenance, full=full, on_bytes=on_bytes)
        check_index(view, provenance, shards)
        check_scales(view, provenance, geometry, shards)
    except (OSError, MemoryError, Page4Error) as error:
        findings.add("unreadable", str(folder), f"{type(error).__name__}: {error}")
    if provenance is not None:
        findings.notes += [f"prototype scale, not calibrated: {name}" for name in provenance.prototypes]
    return findings


def _provenance(view: View) -> Provenance | None:
    try:
        provenance = read_unsealed(view.folder)
        if (found := provenance.digest()) != provenance.self_sha256:
            view.findings.add("provenance-hash", PROVENANCE_NAME, found)
        return provenance
    except DocumentError as error:
        view.findings.add(f"provenance-{error.kind}", PROVENANCE_NAME, error)
    except PathEscapeError as error:
        view.findings.add("link-replaced", PROVENANCE_NAME, error)
    except OSError as error:
        view.findings.add("provenance-unreadable", PROVENANCE_NAME, error)
    return None


def _check_record(view: View, provenance: Provenance) -> None:
    """Counts and names inside the provenance agree with each other."""
    listed = sorted(name for record in provenance.scale_files for name in record.tensor_names)
    problems = {
        "scales": sorted(scale.name for scale in provenance.scales) == listed,
        "tensor_count": all(r.tensor_count == len(r.tensor_names) for r in provenance.scale_files),
        "mode": (provenance.base.path is None) == (provenance.mode == "copy"),
        "files": {CONFIG_NAME, *provenance.base.shards} <= set(provenance.files),
        "draft_layers": bool(provenance.draft_layers) == (provenance.draft is not None),
    }
    for field, holds in problems.items():
        if not holds:
            view.findings.add("provenance-invalid", PROVENANCE_NAME, f"{field} contradicts the rest")


def _check_files(view: View, provenance: Provenance | None) -> None:
    """What is there is what the records name: links where links were made, files where files were written."""
    present = view.names()
    view.findings.counts["files"] = len(present)
    if provenance is None:
        for name in present:
            view.file(name, None)
        return
    written = {PROVENANCE_NAME, INDEX_NAME, *(record.filename for record in provenance.scale_files)}
    for name in provenance.files:
        view.file(name, provenance)
        is_link = (view.folder / name).is_symlink()
        if name in present and is_link != (provenance.mode == "links"):
            view.findings.add("link-replaced", name, "a link" if is_link else "a file")
    for name in sorted(written):
        _check_written(view, name, provenance)
    for name in sorted(set(present) - set(provenance.files) - written):
        if (view.folder / name).is_symlink() or name.endswith(".safetensors"):
            view.findings.add("file-unknown", name, "in no record")
            view.file(name, provenance)


def _check_written(view: View, name: str, provenance: Provenance) -> None:
    path = view.folder / name
    if path.is_symlink():
        view.findings.add("link-replaced", name, "a link")
    found = None if name == INDEX_NAME and not path.exists() else view.file(name, provenance)
    if found is not None and found.stat().st_mode & FILE_MODE & 0o444 != 0o444:
        view.findings.add("file-mode", name, f"mode {found.stat().st_mode & 0o777:04o}")


def _geometry(view: View, provenance: Provenance | None) -> Geometry | None:
    path = view.file(CONFIG_NAME, provenance)
    if path is None:
        return None
    found = sha256_of_file(path) if path.stat().st_size <= MAX_CONFIG_BYTES else "a larger file"
    if provenance is not None and found != provenance.base.config_sha256:
        view.findings.add("hash-config", CONFIG_NAME, found)
    try:
        return Geometry.from_file(path)
    except ConfigError as error:
        view.findings.add("config-unreadable", CONFIG_NAME, error)
        return None

"""Faults of an overlay: a stable code each, what it is about, and what was found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

CODES = {
    "folder-missing": "the overlay is no folder",
    "provenance-missing": "there is no provenance",
    "provenance-unreadable": "the provenance is no JSON object, has a key twice or is too large",
    "provenance-schema": "the provenance has another schema version",
    "provenance-hash": "the provenance was edited: its own hash does not match",
    "provenance-invalid": "a field of the provenance is missing or wrong, or two fields contradict each other",
    "base-missing": "the base folder of the provenance is not there",
    "file-missing": "a file that was carried over or written is not there",
    "file-unknown": "a weight file or a link that no record names",
    "file-mode": "a written file that other users cannot read",
    "link-dangling": "a link leads to nothing",
    "link-loop": "links lead to each other",
    "link-escape": "a link leads outside overlay and base, or out of the root",
    "link-wrong": "a link leads to another file of the base than its own",
    "link-absolute": "a link that breaks when base and overlay move together",
    "link-replaced": "a file stands where a link should, or a link where a file should",
    "hash-config": "config.json is not the one of the provenance",
    "hash-base-index": "the base's index is not the one of the provenance",
    "hash-index": "the overlay's index is not the one of the provenance",
    "hash-target-scales": "the target's scale file is not the one of the provenance",
    "hash-draft-scales": "the draft's scale file is not the one of the provenance",
    "hash-shard": "a shard, hashed whole, is not the one of the provenance",
    "hash-shard-header": "the header of a shard is not the one of the provenance",
    "hash-shard-sample": "the sampled data of a shard is not that of the provenance",
    "hash-unrecorded": "the whole hash of a shard was asked for but never recorded",
    "shard-size": "a weight file is truncated, too long, empty, a pointer, or of another size than recorded",
    "shard-header": "the header of a weight file is malformed",
    "index-missing": "there is no index",
    "index-unreadable": "the index is malformed",
    "index-name": "the index names a file that is no plain safetensors name",
    "index-not-in-shard": "the index lists a tensor that its shard lacks",
    "index-unlisted": "a scale file, or a shard where the base lists it, holds a tensor that the index lacks",
    "index-base": "the index and the base's index disagree about a tensor",
    "total-size": "metadata.total_size is not the size of the listed tensors",
    "config-unreadable": "config.json does not describe a model that page4 knows",
    "scale-missing": "a layer and side without a scale",
    "scale-extra": "a scale tensor of no layer, or of an unknown spelling",
    "scale-twice": "two scales for one layer and side",
    "scale-type": "a scale that is not one F32 number of shape []",
    "scale-value": "a scale that is not finite and positive",
    "scale-record": "a scale that is not the one of the provenance",
    "unreadable": "a file that cannot be read",
}


class Fault(NamedTuple):
    """One thing that is wrong."""

    code: str
    where: str
    what: str


@dataclass
class Findings:
    """What a verification collects: faults, each once, and notes that are no faults."""

    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, code: str, where: str, what: object) -> None:
        """Record a fault."""
        assert code in CODES, code
        fault = Fault(code, where, " ".join(str(what).split()))
        if fault not in self.faults:
            self.faults.append(fault)

    @property
    def codes(self) -> list[str]:
        """The codes of all faults, each once, in the order of their table."""
        found = {fault.code for fault in self.faults}
        return [code for code in CODES if code in found]

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "pass": not self.faults,
            "faults": [fault._asdict() for fault in self.faults],
            "notes": self.notes,
            "counts": self.counts,
        }

"""The shards that an unfinished calibration has done, in `OUT/.partial/`, bound to the run that they belong to."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from page4.errors import ScaleError, UsageError, message
from page4.scales.files import STAGED, digest_of, json_bytes, make_folder, write_whole
from page4.scales.kv_statistics import KvStatistics, Place, Statistics

FOLDER, SETTINGS, LOCK = ".partial", "settings.json", "lock"


@dataclass(frozen=True)
class Shard:
    """What one shard of the samples gave."""

    name: str
    tokens: int
    counted_forwards: int
    statistics: Statistics


class Partial:
    """Holds `OUT/.partial` for one run; a second run in the same folder is refused while the first is alive."""

    def __init__(self, out: Path, settings: Mapping[str, Any], *, restart: bool) -> None:
        """Raises `UsageError` when the folder belongs to other settings (unless `restart`) or to a live run."""
        self.folder, self._identity = out / FOLDER, digest_of(settings)
        self._made_out = not out.exists()
        make_folder(self.folder)
        self._lock = (self.folder / LOCK).open("w")
        try:
            self._take_lock()
            self._claim(settings, restart=restart)
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """A run that failed before its first shard leaves nothing at all."""
        if kind is not None and not list(self.folder.glob("shard-*")):
            shutil.rmtree(self.folder, ignore_errors=True)
            if self._made_out and not any(self.folder.parent.iterdir()):
                self.folder.parent.rmdir()
        self._lock.close()

    def load(self, name: str) -> Shard | None:
        """A shard of an earlier run, or None. Raises `ScaleError` when its file is damaged."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            body = content["body"]
            if content["sha256"] != digest_of(body) or body["run"] != self._identity or body["name"] != name:
                raise ValueError("its digest does not match")
            statistics: Statistics = {
                _place(key): KvStatistics.from_object(entry) for key, entry in body["statistics"].items()
            }
            return Shard(name, int(body["tokens"]), int(body["counted_forwards"]), statistics)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            allowed, do = "what an earlier run wrote", "run again with --restart"
            raise ScaleError(message(str(path), allowed=allowed, got=f"a damaged file ({error})", do=do)) from None

    def save(self, shard: Shard) -> None:
        """Keep a finished shard."""
        body = {
            "counted_forwards": shard.counted_forwards,
            "name": shard.name,
            "run": self._identity,
            "statistics": {f"{layer} {side}": entry.as_object() for (layer, side), entry in shard.statistics.items()},
            "tokens": shard.tokens,
        }
        write_whole(self.folder / f"{shard.name}.json", json_bytes({"body": body, "sha256": digest_of(body)}))

    def finish(self, files: Mapping[str, bytes]) -> None:
        """Put the results beside the folder, in the order given, each whole; then drop the folder."""
        for name, data in files.items():
            write_whole(self.folder.parent / name, data, stage=self.folder)
        shutil.rmtree(self.folder)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            do = "wait for it or choose another --out"
            got = "another run that is under way"
            raise UsageError(message(str(self.folder.parent), allowed="one run", got=got, do=do)) from None

    def _claim(self, settings: Mapping[str, Any], *, restart: bool) -> None:
        path = self.folder / SETTINGS
        for stale in self.folder.glob(f"*{STAGED}"):
            stale.unlink()
        if restart:
            path.unlink(missing_ok=True)
        if path.exists():
            check_same(str(path), json.loads(path.read_text(encoding="utf-8")), settings)
            return
        # Shards without settings are what an interrupted restart or clean-up left.
        for old in self.folder.glob("shard-*.json"):
            old.unlink()
        write_whole(path, json_bytes(settings))


def check_same(where: str, before: Any, settings: Mapping[str, Any]) -> None:
    """Raise `UsageError` that names the settings in which an earlier run differs."""
    if before == settings:
        return
    old = before if isinstance(before, dict) else {}
    odd = [key for key in sorted({*old, *settings}) if old.get(key) != settings.get(key)]
    got = ", ".join(f"{key} {_short(settings.get(key))} (was {_short(old.get(key))})" for key in odd)
    do = "use the same arguments, another --out, or --restart to begin anew"
    raise UsageError(message(where, allowed="the settings of the run in this folder", got=got, do=do))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _place(key: str) -> Place:
    layer, side = key.split(" ")
    if side == "k" or side == "v":
        return int(layer), "k" if side == "k" else "v"
    raise ValueError(f"no side {side!r}")

"""calibrate: samples through the real model, exact statistics of K and V shard by shard, one report at the end."""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from page4 import __version__, env
from page4.checkpoint.identity import base_record
from page4.engine.options import check_count, compute_dtype, device_of, set_threads
from page4.engine.tokenizer import Tokenizer
from page4.errors import UsageError, message
from page4.geometry import Geometry
from page4.model.weights import load_model
from page4.scales.files import digest_of, json_bytes
from page4.scales.observe import Observer, check_complete, expected_layers
from page4.scales.partial import Partial, Shard
from page4.scales.report import ROUNDING, RUN_NAME, build_report, read_report
from page4.scales.rules import Rule
from page4.scales.sample_file import read_samples
from page4.scales.sample_lane import SampleLane
from page4.scales.samples import Sample, SampleSet, choose, tokenize
from page4.scales.schema import REPORT_NAME


@dataclass(frozen=True)
class CalibrationOptions:
    """What a calibration depends on beside the checkpoint and the samples; raises `UsageError` for a bad value."""

    rule: str = "absmax"
    max_seq_length: int = 2048
    num_samples: int = 512
    seed: int = 42
    batch_size: int = 1
    dtype: str = "auto"
    shard_size: int = 32
    mix: Mapping[str, int] = field(default_factory=dict)
    device: str = "cpu"

    def __post_init__(self) -> None:
        Rule.parse(self.rule)
        for what in ("max_seq_length", "num_samples", "batch_size", "shard_size"):
            check_count(what, getattr(self, what))
        check_count("seed", self.seed, 0)


@dataclass(frozen=True)
class Calibration:
    """A finished calibration: the report as written, and how many of its shards an earlier run had left."""

    report: dict[str, Any]
    shards: int
    resumed_shards: int


@dataclass(frozen=True)
class Progress:
    """Told before the first token and then after every step, tokens in all; resumed shards count at once."""

    on_start: Callable[[int], None] = lambda total: None
    on_tokens: Callable[[int], None] = lambda count: None


def calibrate(
    model: Path,
    prompts: Path,
    out: Path,
    options: CalibrationOptions,
    *,
    restart: bool = False,
    progress: Progress | None = None,
) -> Calibration:
    """Write `out/calibration-report.json`, and beside it `calibration-run.json`: when, where and with what.

    An interrupted run goes on from its finished shards when it is called again with the same arguments; `restart` drops
    what an earlier one left. Raises `UsageError` and `CheckpointError` before weights are read, and `ScaleError` when
    what was seen gives no scales; no report is written then.
    """
    progress, began = progress or Progress(), time.monotonic()
    env.check()
    set_threads()
    _check_out(model, out)
    geometry = Geometry.from_folder(model)
    dtype = compute_dtype(options.dtype, geometry, device_of(options.device))
    chosen = _samples(model, prompts, geometry, options)
    settings = _settings(model, chosen, options, dtype)
    _check_finished(out, settings, restart=restart)
    parts = _cut(chosen.samples, options.shard_size)
    progress.on_start(chosen.tokens)
    with Partial(out, settings, restart=restart) as partial:
        if restart:
            (out / REPORT_NAME).unlink(missing_ok=True)
        earlier = [shard for name in parts if (shard := partial.load(name)) is not None]
        progress.on_tokens(sum(shard.tokens for shard in earlier))
        done = {shard.name: shard for shard in earlier}
        missing = {name: samples for name, samples in parts.items() if name not in done}
        for shard in _measure(model, missing, options, dtype, progress.on_tokens):
            partial.save(shard)
            done[shard.name] = shard
        shards = [done[name] for name in parts]
        report = build_report(settings=settings, samples=chosen.manifest, shards=shards, run=digest_of(settings))
        run = _run_facts(options, dtype, time.monotonic() - began, len(earlier))
        partial.finish({RUN_NAME: json_bytes(run), REPORT_NAME: json_bytes(report)})
    return Calibration(report, len(parts), len(earlier))


def _measure(
    model: Path,
    parts: Mapping[str, Sequence[Sample]],
    options: CalibrationOptions,
    dtype: torch.dtype,
    on_tokens: Callable[[int], None],
) -> Iterator[Shard]:
    """Each part's statistics, checked, as they are done; no weight is read when there is no part."""
    if not parts:
        return
    loaded = load_model(model, dtype, device_of(options.device))
    layers = expected_layers(loaded.geometry, with_draft=loaded.draft is not None)
    longest = max(len(sample.token_ids) for samples in parts.values() for sample in samples)
    lane = SampleLane(loaded, batch_size=options.batch_size, max_tokens=longest)
    observer = Observer()
    with observer.attached(loaded):
        for name, samples in parts.items():
            for first in range(0, len(samples), options.batch_size):
                lane.run(samples[first : first + options.batch_size], observer, on_tokens)
            statistics, forwards = observer.take()
            tokens = sum(len(sample.token_ids) for sample in samples)
            check_complete(statistics, layers, tokens=tokens, counted_forwards=forwards)
            yield Shard(name, tokens, forwards, statistics)


def _samples(model: Path, prompts: Path, geometry: Geometry, options: CalibrationOptions) -> SampleSet:
    tokenizer = Tokenizer.from_folder(model)
    longest = min(options.max_seq_length, geometry.max_positions)
    samples = tokenize(read_samples(prompts), tokenizer, vocab_size=geometry.vocab_size, max_seq_length=longest)
    return choose(samples, tokenizer, num_samples=options.num_samples, seed=options.seed, mix=options.mix)


def _settings(model: Path, chosen: SampleSet, options: CalibrationOptions, dtype: torch.dtype) -> dict[str, Any]:
    """All that the report depends on: two runs with equal settings write the same bytes."""
    return {
        "base_checkpoint": base_record(model).model_dump(mode="json"),
        "batch_size": options.batch_size,
        "dtype": str(dtype).removeprefix("torch."),
        "max_seq_length": options.max_seq_length,
        "rule": options.rule,
        "samples": chosen.manifest["manifest_sha256"],
        "shard_size": options.shard_size,
    }


def _cut(samples: Sequence[Sample], size: int) -> dict[str, Sequence[Sample]]:
    """The shards by name, in order."""
    starts = range(0, len(samples), size)
    return {
        f"shard-{number:04d}-of-{len(starts):04d}": samples[first : first + size]
        for number, first in enumerate(starts, start=1)
    }


def _check_out(model: Path, out: Path) -> None:
    base, target = model.resolve(), out.resolve()
    if base == target or base in target.parents:
        do = "name a folder outside of the checkpoint"
        raise UsageError(message("--out", allowed="a folder apart from MODEL", got=str(out), do=do))
    if out.exists() and not out.is_dir():
        raise UsageError(message("--out", allowed="a folder", got=f"the file {out}", do="choose another name"))


def _check_finished(out: Path, settings: Mapping[str, Any], *, restart: bool) -> None:
    """A report that is there already is replaced by the same one, or on request, and never by another."""
    if restart or not (out / REPORT_NAME).exists():
        return
    if read_report(out).get("run_sha256") != digest_of(settings):
        got, do = "a report of another run", "choose another --out, or --restart to replace it"
        raise UsageError(message(f"--out {out}", allowed="a folder without a report", got=got, do=do))


def _run_facts(options: CalibrationOptions, dtype: torch.dtype, seconds: float, resumed: int) -> dict[str, Any]:
    """What may differ between two runs that write the same report."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": options.device,
        "duration_seconds": round(seconds, 3),
        "expected_rounding": {
            "max_abs_relative": ROUNDING[str(dtype).removeprefix("torch.")],
            "of": "max_abs at another batch size or number of threads",
        },
        "machine": platform.machine(),
        "resumed_shards": resumed,
        "threads": torch.get_num_threads(),
        "versions": {"page4": __version__, "python": platform.python_version(), "torch": torch.__version__},
    }

"""effect: proof that each scale of an overlay takes effect where it should, on both sides, and nowhere else.

The lane runs over prompts with the overlay's scales, and then again with one scale at a time multiplied by each of
`PROBES`. Beside the cache under test lie shadows without any scale (`scales.shadow`): attention over them says what
unquantised K/V give, and what E4M3 at a given pair of scales has to give. A scale that is not loaded, not used, used on
one side or in another layer cannot agree with that. Factors that are powers of two would prove nothing while values are
normal, for E4M3 is a floating format: 1.3 rounds values elsewhere, 1/32 clips them, and a large factor lets them
underflow. At 4096 the typical value of a layer is still normal (448 / 4096 is 7 times the least normal number), so
growth is asked for at 65536; 4096 has to agree with its shadow like every other probe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from page4.assets import calibration_samples
from page4.checkpoint.scale_names import SIDES, Side
from page4.codec import Scale
from page4.engine.llm import LLM
from page4.engine.options import check_count
from page4.engine.params import SamplingParams
from page4.engine.tokenizer import Tokenizer
from page4.geometry import Geometry
from page4.model.kv_scales import Scales
from page4.scales.observe import tensor_name
from page4.scales.probe import AttentionProbe, LayerDistances, LogitsWatch, logit_error
from page4.scales.sample_file import read_samples
from page4.scales.sample_lane import SampleLane
from page4.scales.samples import Sample, choose, tokenize


@dataclass(frozen=True)
class Probe:
    """A factor on one scale, and how many times the attention error has to grow at least (None: it need not)."""

    name: str
    factor: float
    growth: float | None


PROBES = (
    Probe("x1.3", 1.3, None),
    Probe("/32", 1 / 32, 4.0),
    Probe("x4096", 4096.0, None),
    Probe("x65536", 65536.0, 4.0),
)
# E4M3 has three bits of mantissa: one value is off by at most 1/16 of itself, and attention averages over many.
MAX_ERROR = 0.15
# Of the error that E4M3 itself makes. Arithmetic in 16 bits stays below; another scale makes an error of that size.
MAX_MISMATCH = 0.25
DRAFTS = 3


@dataclass(frozen=True)
class EffectOptions:
    """Which prompts (None: the shipped calibration samples), and how far; raises `UsageError` for a bad value."""

    prompts: Path | None = None
    num_samples: int = 3
    max_seq_length: int = 640
    new_tokens: int = 24
    seed: int = 42
    dtype: str = "auto"
    allow_prototype_scales: bool = False

    def __post_init__(self) -> None:
        for what in ("num_samples", "max_seq_length", "new_tokens"):
            check_count(what, getattr(self, what))
        check_count("seed", self.seed, 0)


@dataclass(frozen=True)
class ProbeResult:
    """One scale at one factor: relative errors of attention, of what it should be, and of the logits behind it."""

    probe: str
    error: float
    expected: float
    mismatch: float
    moved: float
    growth: float
    target_logits: float | None
    draft_logits: float | None


@dataclass(frozen=True)
class ScaleResult:
    """What was found about one scale; `faults` is empty when it provably takes effect."""

    layer: int
    side: Side
    scale: float
    error: float
    served_error: float
    probes: tuple[ProbeResult, ...]
    faults: tuple[str, ...]


@dataclass(frozen=True)
class Effect:
    """The results by layer and side, and how the lane as a whole compares with K/V in the model's own type."""

    scales: tuple[ScaleResult, ...]
    tokens: int
    target_logits: float | None
    draft_logits: float | None

    @property
    def faults(self) -> tuple[str, ...]:
        """All faults; each names its scale."""
        return tuple(f"{tensor_name((s.layer, s.side))}: {fault}" for s in self.scales for fault in s.faults)

    def as_object(self) -> dict[str, Any]:
        """For `--json`."""
        limits = {"max_error": MAX_ERROR, "max_mismatch_of_expected": MAX_MISMATCH}
        probes = [vars(probe) for probe in PROBES]
        scales = [vars(s) | {"probes": [vars(p) for p in s.probes], "faults": list(s.faults)} for s in self.scales]
        logits = {"target_logit_error": self.target_logits, "draft_logit_error": self.draft_logits}
        return {"limits": limits, "probes": probes, "tokens": self.tokens, **logits, "scales": scales}


def measure_effect(
    folder: Path, options: EffectOptions, on_progress: Callable[[int, int], None] | None = None
) -> Effect:
    """Run the lane of `folder` at its own scales and at every probe of every scale.

    `on_progress(done, all)` hears of each run. Raises what `LLM` raises when the lane is refused, `UsageError` for
    unusable prompts.
    """
    geometry = Geometry.from_folder(folder)
    samples = _samples(folder, geometry, options)
    llm = _serve(folder, options, longest=max(len(sample.token_ids) for sample in samples))
    own = llm.lane.scales
    runs = 3 + len(own) * len(SIDES) * len(PROBES)
    tell = on_progress or (lambda done, total: None)
    served = _served(llm, samples, own, options.new_tokens)
    tell(1, runs)
    every = max(1, sum(len(sample.token_ids) for sample in samples) // 64)
    plain = _run(llm, samples, None, {}, own, every).watch
    tell(2, runs)
    base = _run(llm, samples, own, own, own, every)
    tell(3, runs)
    results, done = [], 3
    for layer in sorted(own):
        for side in range(len(SIDES)):
            found = []
            for probe in PROBES:
                changed = _scaled(own, layer, side, probe.factor)
                run = _run(llm, samples, changed, {layer: changed[layer]}, own, every)
                found.append(_probe_result(probe, run, base.distances[layer], plain, layer))
                tell(done := done + 1, runs)
            results.append(_judge(layer, side, own, base.distances[layer], served[layer], found))
    return Effect(
        tuple(results),
        sum(len(sample.token_ids) for sample in samples),
        logit_error(base.watch.target, plain.target),
        logit_error(base.watch.draft, plain.draft),
    )


@dataclass(frozen=True)
class _Run:
    distances: dict[int, LayerDistances]
    watch: LogitsWatch


def _samples(folder: Path, geometry: Geometry, options: EffectOptions) -> Sequence[Sample]:
    tokenizer = Tokenizer.from_folder(folder)
    raw = read_samples(options.prompts or calibration_samples())
    longest = min(options.max_seq_length, geometry.max_positions - options.new_tokens)
    samples = tokenize(raw, tokenizer, vocab_size=geometry.vocab_size, max_seq_length=longest)
    return choose(samples, tokenizer, num_samples=options.num_samples, seed=options.seed).samples


def _serve(folder: Path, options: EffectOptions, *, longest: int) -> LLM:
    """The engine as it would serve the overlay, with drafts where there is a draft head with scales."""
    from page4.checkpoint import Checkpoint
    from page4.model.kv_scales import find_scales

    checkpoint, geometry = Checkpoint.open(folder), Geometry.from_folder(folder)
    has_draft = geometry.mtp_layers != 0 and any(name.startswith("mtp.") for name in checkpoint.names())
    drafted = has_draft and not find_scales(checkpoint, geometry, "auto", "fp8", with_draft=True).faults
    return LLM(
        folder,
        dtype=options.dtype,
        kv_cache_dtype="fp8_e4m3",
        draft_kv_dtype="fp8_e4m3" if drafted else "auto",
        speculative_config={"method": "mtp", "num_speculative_tokens": DRAFTS} if has_draft else None,
        max_model_len=longest + options.new_tokens,
        max_num_seqs=1,
        allow_prototype_scales=options.allow_prototype_scales,
        e4m3_mtp=True,
    )


def _served(llm: LLM, samples: Sequence[Sample], own: Scales, new_tokens: int) -> dict[int, LayerDistances]:
    """Every layer while the engine itself generates: prefill, drafts and verification."""
    probe = AttentionProbe(llm.core.model, llm.core.arena, own, own)
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    with probe.attached():
        for sample in samples:
            llm.generate([list(sample.token_ids)], params)
    return probe.distances


def _run(
    llm: LLM, samples: Sequence[Sample], scales: Scales | None, watched: Mapping[int, Any], own: Scales, every: int
) -> _Run:
    """All samples at `scales` (None: unquantised), the attention of the `watched` layers compared with shadows."""
    model, longest = llm.core.model, max(len(sample.token_ids) for sample in samples)
    lane = SampleLane(model, batch_size=1, max_tokens=longest, scales=scales, all_draft_rows=True)
    probe, watch = AttentionProbe(model, lane.arena, watched, own), LogitsWatch(model, every)
    with probe.attached():
        for sample in samples:
            lane.run([sample], watch)
    return _Run(probe.distances, watch)


def _scaled(own: Scales, layer: int, side: int, factor: float) -> Scales:
    pair = list(own[layer])
    pair[side] = Scale(pair[side].value * factor)
    return {**own, layer: (pair[0], pair[1])}


def _probe_result(probe: Probe, run: _Run, base: LayerDistances, plain: LogitsWatch, layer: int) -> ProbeResult:
    found = run.distances[layer]
    at_rest = base.error.relative
    return ProbeResult(
        probe=probe.name,
        error=found.error.relative,
        expected=found.expected.relative,
        mismatch=found.mismatch.relative,
        moved=found.moved.relative,
        growth=found.error.relative / at_rest if at_rest > 0 else math.inf,
        target_logits=logit_error(run.watch.target, plain.target),
        draft_logits=logit_error(run.watch.draft, plain.draft),
    )


def _judge(
    layer: int,
    side: int,
    own: Scales,
    base: LayerDistances,
    served: LayerDistances,
    probes: Sequence[ProbeResult],
) -> ScaleResult:
    faults = [*_faults_at_rest("prompts", base), *_faults_at_rest("serving", served)]
    for probe, found in zip(PROBES, probes, strict=True):
        faults += _faults_of_probe(probe, found)
    return ScaleResult(
        layer,
        SIDES[side],
        own[layer][side].value,
        base.error.relative,
        served.error.relative,
        tuple(probes),
        tuple(faults),
    )


def _faults_at_rest(where: str, found: LayerDistances) -> list[str]:
    """At the overlay's own scales. Comparisons are written so that NaN is a fault."""
    faults = []
    if not found.error.relative <= MAX_ERROR:
        faults.append(f"{where}: attention is off by {found.error.relative:.3g}, at most {MAX_ERROR} is allowed")
    if not found.mismatch.relative <= MAX_MISMATCH * found.expected.relative:
        faults.append(
            f"{where}: attention is {found.mismatch.relative:.3g} away from what E4M3 at this layer's scales gives, "
            f"at most {MAX_MISMATCH} of its own error of {found.expected.relative:.3g} is allowed"
        )
    return faults


def _faults_of_probe(probe: Probe, found: ProbeResult) -> list[str]:
    faults = []
    limit = MAX_MISMATCH * found.expected
    if not found.moved > limit:
        faults.append(
            f"{probe.name}: attention does not change (by {found.moved:.3g}, more than {limit:.3g} is expected)"
        )
    if not found.mismatch <= limit:
        faults.append(
            f"{probe.name}: attention is {found.mismatch:.3g} away from what E4M3 at the changed scale gives, "
            f"at most {limit:.3g} is allowed"
        )
    if probe.growth is not None and not found.growth >= probe.growth:
        faults.append(f"{probe.name}: the error grows {found.growth:.3g} times, at least {probe.growth:g} is expected")
    return faults

"""The work of `page4 demo`: an overlay of the embedded checkpoint, and the lanes that are compared over it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from page4.cli import console, report
from page4.cli.demo_prompts import PROMPTS

if TYPE_CHECKING:
    from page4.engine import RequestOutput
    from page4.engine.metrics import KVCounts
    from page4.scales.effect import Effect
    from page4.scales.faults import Findings

DRAFTS = 3
NEW_TOKENS = 96
WARM_UP_TOKENS = 8
MAX_MODEL_LEN = 8192


@dataclass(frozen=True)
class Built:
    """The overlay of the embedded checkpoint, and what was found about it on the way."""

    folder: Path
    calibration: dict[str, Any]
    findings: Findings
    effect: Effect


@dataclass(frozen=True)
class LaneRun:
    """What one lane wrote, and its figures; `perplexity` is None where it was not asked for."""

    results: list[RequestOutput]
    decode_tokens_per_s: float
    tokens_per_step: float
    acceptance: list[float]
    kv: tuple[KVCounts, ...]
    kv_bytes_per_token: int
    perplexity: float | None

    @property
    def token_ids(self) -> list[list[int]]:
        """New tokens of each prompt."""
        return [list(result.outputs[0].token_ids) for result in self.results]


def build(base: Path, out: Path) -> Built:
    """Calibrate, pack, overlay, verify and prove; everything goes into folders of `out`, old ones are replaced."""
    from page4.assets import calibration_samples
    from page4.scales.calibrate import CalibrationOptions, Progress, calibrate
    from page4.scales.effect import EffectOptions, measure_effect
    from page4.scales.overlay import build_overlay
    from page4.scales.pack import make_pack
    from page4.scales.schema import REPORT_NAME
    from page4.scales.sources import Sources
    from page4.scales.verify import verify_overlay

    with console.counting_bar("calibrating") as bar:
        progress = Progress(on_start=bar.start, on_tokens=bar.advance)
        target = out / "calibration"
        measured = calibrate(
            base, calibration_samples(), target, CalibrationOptions(), restart=target.exists(), progress=progress
        )
    with console.spinner("building the overlay"):
        make_pack(target / REPORT_NAME, base, out / "pack", force=True)
        folder = out / "overlay"
        build_overlay(base, out / "pack", folder, Sources(draft_report=target / REPORT_NAME), force=True)
        findings = verify_overlay(folder, full=True)
    with console.step_bar("proving the scales", "runs") as tell:
        effect = measure_effect(folder, EffectOptions(), tell)
    return Built(folder, measured.report, findings, effect)


def run_lane(folder: Path, *, drafts: int, e4m3: bool, score: bool) -> LaneRun:
    """All prompts one after another after a short warm-up, greedy; `score`: the perplexity of a held-out text.

    16-bit K/V are bfloat16, whatever the type of the arithmetic.
    """
    import page4

    llm = page4.LLM(
        folder,
        kv_cache_dtype="fp8_e4m3" if e4m3 else "bfloat16",
        speculative_config={"method": "mtp", "num_speculative_tokens": drafts} if drafts else None,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=1,
        e4m3_mtp=True,
    )
    llm.generate([PROMPTS[-1]], page4.SamplingParams(max_tokens=WARM_UP_TOKENS, ignore_eos=True))
    before = report.Counts.of(llm)
    params = page4.SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
    results = [result for prompt in PROMPTS for result in llm.generate([prompt], params)]
    counts = report.Counts.of(llm) - before
    perplexity = _perplexity(llm) if score else None
    fields = llm.core.arena.layout.kv.values()
    kv_bytes = sum(field.num_bytes for field in fields) // llm.core.arena.layout.page_tokens
    return LaneRun(
        results,
        counts.decode_tokens_per_s,
        counts.tokens_per_step,
        counts.acceptance,
        llm.kv_counts(),
        kv_bytes,
        perplexity,
    )


def _perplexity(llm: Any) -> float:
    """Exp of the mean negative log probability of every token but the first of a text that is long enough to prune."""
    import page4
    from page4.assets import held_out_text

    params = page4.SamplingParams(max_tokens=1, prompt_logprobs=0)
    ids = llm.tokenizer.encode(held_out_text().read_text(encoding="utf-8"))[: MAX_MODEL_LEN - 1]
    [result] = llm.generate([ids], params)
    found = [
        next(entry.logprob for entry in place if entry.token_id == token)
        for place, token in zip(result.prompt_logprobs[1:], ids[1:], strict=True)
    ]
    return math.exp(-sum(found) / len(found))

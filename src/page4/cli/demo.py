"""`page4 demo`: the embedded checkpoint with and without MTP, and whether the tokens agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from page4.cli import console, flags, models, report
from page4.cli.demo_prompts import PROMPTS

if TYPE_CHECKING:
    from pathlib import Path

    from page4.engine import LLM, RequestOutput

DRAFTS = 3
NEW_TOKENS = 96
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Run:
    """What one lane wrote, and its figures."""

    results: list[RequestOutput]
    decode_tokens_per_s: float
    tokens_per_step: float
    acceptance: list[float]

    @property
    def token_ids(self) -> list[list[int]]:
        """New tokens of each prompt."""
        return [list(result.outputs[0].token_ids) for result in self.results]


def demo(json: flags.Json = False) -> None:
    """Generate from the embedded checkpoint with and without MTP and compare: exit code 1 when tokens differ."""
    folder = models.embedded()
    with console.spinner("running the embedded checkpoint without MTP"):
        plain = run(folder, 0)
    with console.spinner(f"running the embedded checkpoint with MTP, {DRAFTS} drafts"):
        drafted = run(folder, DRAFTS)
    equal = plain.token_ids == drafted.token_ids
    if json:
        console.print_json(as_object(plain, drafted, equal))
    else:
        show(plain, drafted, equal)
    if not equal:
        raise typer.Exit(1)


def run(folder: Path, drafts: int) -> Run:
    """All prompts, one after another, after a short warm-up."""
    import page4

    speculative = {"method": "mtp", "num_speculative_tokens": drafts} if drafts else None
    llm: LLM = page4.LLM(folder, speculative_config=speculative, max_model_len=2048)
    llm.generate([PROMPTS[-1]], page4.SamplingParams(max_tokens=WARM_UP_TOKENS, ignore_eos=True))
    before = report.Counts.of(llm)
    params = page4.SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
    results = [result for prompt in PROMPTS for result in llm.generate([prompt], params)]
    counts = report.Counts.of(llm) - before
    return Run(results, counts.decode_tokens_per_s, counts.tokens_per_step, counts.acceptance)


def as_object(plain: Run, drafted: Run, equal: bool) -> dict[str, Any]:
    """The JSON of the demo."""
    return {
        "mtp_tokens_equal": equal,
        "outputs": report.outputs_object(drafted.results),
        "acceptance_per_position": drafted.acceptance,
        "tokens_per_target_step": drafted.tokens_per_step,
        "decode_tokens_per_s": {"mtp": drafted.decode_tokens_per_s, "no_mtp": plain.decode_tokens_per_s},
    }


def show(plain: Run, drafted: Run, equal: bool) -> None:
    """Prompts dim, new text bold, then the verdict and the figures."""
    out = console.stdout()
    for number, (prompt, result) in enumerate(zip(PROMPTS, drafted.results, strict=True)):
        completion = result.outputs[0]
        sizes = f"{len(result.prompt_token_ids)} tokens in, {len(completion.token_ids)} out, {completion.finish_reason}"
        out.print(f"--- prompt {number + 1} of {len(PROMPTS)}: {sizes}", style="cyan")
        out.print(prompt, style="dim", end="")
        out.print(completion.text, style="bold")
    total = sum(len(ids) for ids in drafted.token_ids)
    speedup = drafted.decode_tokens_per_s / plain.decode_tokens_per_s if plain.decode_tokens_per_s else 0.0
    out.print(f"--- {len(PROMPTS)} prompts, {total} new tokens, greedy, {DRAFTS} drafts a step", style="cyan")
    out.print(f"MTP tokens equal: {'yes' if equal else 'NO'}", style="bold green" if equal else "bold red")
    out.print(f"acceptance per draft position: {' '.join(f'{share:.2f}' for share in drafted.acceptance)}")
    out.print(f"tokens a target step: {drafted.tokens_per_step:.2f} with MTP, {plain.tokens_per_step:.2f} without")
    out.print(
        f"decode speed: {drafted.decode_tokens_per_s:.0f} tokens/s with MTP, "
        f"{plain.decode_tokens_per_s:.0f} without ({speedup:.2f}x)"
    )

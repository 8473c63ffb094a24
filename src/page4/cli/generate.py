"""`page4 generate`: text from prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from page4.cli import console, flags, models, prompts, report
from page4.cli.flags import PROMPTS, SAMPLING, Number, option
from page4.engine.admission import DEFAULT_BATCHED_TOKENS
from page4.errors import EngineError

if TYPE_CHECKING:
    from page4.engine import RequestOutput


def generate(
    model: flags.Model,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="One prompt each; - reads standard input.", show_default=False),
    ] = None,
    prompt_file: flags.PromptFile = None,
    prompt_token_ids: Annotated[
        Path | None,
        option(
            "--prompt-token-ids", metavar="FILE", help="JSON: a list of token ids, or a list of lists.", panel=PROMPTS
        ),
    ] = None,
    chat: Annotated[
        bool, option("--chat", help="Put each text prompt through the checkpoint's chat template.", panel=PROMPTS)
    ] = False,
    max_tokens: Annotated[int, option("--max-tokens", help="New tokens at most.", panel=SAMPLING, **Number)] = 128,
    min_tokens: Annotated[
        int, option("--min-tokens", metavar="N", help="New tokens before a stop counts.", panel=SAMPLING)
    ] = 0,
    temperature: Annotated[float, option("--temperature", metavar="X", help="0 is greedy.", panel=SAMPLING)] = 0.0,
    top_p: Annotated[
        float, option("--top-p", metavar="X", help="Sample from the smallest set with this mass.", panel=SAMPLING)
    ] = 1.0,
    top_k: Annotated[
        int, option("--top-k", metavar="N", help="Sample from the k most likely; 0 is all.", panel=SAMPLING)
    ] = 0,
    min_p: Annotated[
        float,
        option("--min-p", metavar="X", help="Drop tokens below this share of the most likely one.", panel=SAMPLING),
    ] = 0.0,
    seed: Annotated[int, option("--seed", metavar="N", help="Seed of the sampler.", panel=SAMPLING)] = 0,
    stop: Annotated[
        list[str] | None,
        option("--stop", metavar="TEXT", help="End before this text; may be repeated.", panel=SAMPLING),
    ] = None,
    stop_token_ids: Annotated[
        list[int] | None,
        option("--stop-token-ids", metavar="ID", help="End at this token id; may be repeated.", panel=SAMPLING),
    ] = None,
    ignore_eos: Annotated[bool, option("--ignore-eos", help="Go on after an end token.", panel=SAMPLING)] = False,
    n: Annotated[int, option("--n", metavar="N", help="Completions of each prompt.", panel=SAMPLING)] = 1,
    logprobs: Annotated[
        int | None,
        option("--logprobs", metavar="N", help="With --json: log probabilities of the top N tokens.", panel=SAMPLING),
    ] = None,
    dtype: flags.Weights = flags.DType.auto,
    kv_cache_dtype: flags.KVCache = flags.KVCacheDType.auto,
    draft_kv_dtype: flags.DraftKV = None,
    allow_unit_scales: flags.UnitScales = False,
    allow_prototype_scales: flags.PrototypeScales = False,
    e4m3_mtp: flags.E4M3MTP = False,
    speculative_config: flags.Speculative = None,
    max_model_len: flags.MaxModelLen = None,
    max_num_batched_tokens: flags.MaxBatched = DEFAULT_BATCHED_TOKENS,
    max_num_seqs: flags.MaxSeqs = 8,
    kv_cache_memory_bytes: flags.KVBytes = None,
    block_size: flags.BlockSize = 16,
    device: flags.Device = "cpu",
    revision: flags.Revision = None,
    json: flags.Json = False,
) -> None:
    """Generate text from prompts: arguments, files, lists of token ids, or a pipe."""
    speculative = flags.speculative_config(speculative_config)
    wanted = prompts.collect(prompt or [], prompt_file or [], prompt_token_ids)
    folder = models.resolve(model, revision)

    import page4
    from page4.cli.preflight import as_token_ids

    params = page4.SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop=stop or [],
        stop_token_ids=stop_token_ids or [],
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        n=n,
    )
    token_ids = as_token_ids(folder, wanted, chat=chat, max_model_len=max_model_len, stop_ids=params.stop_token_ids)
    with console.spinner(f"loading {model}"):
        llm = page4.LLM(
            folder,
            dtype=dtype.value,
            kv_cache_dtype=kv_cache_dtype.value,
            draft_kv_dtype=None if draft_kv_dtype is None else draft_kv_dtype.value,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            block_size=block_size,
            speculative_config=speculative,
            allow_unit_scales=allow_unit_scales,
            allow_prototype_scales=allow_prototype_scales,
            e4m3_mtp=e4m3_mtp or None,
            seed=seed,
            device=device,
        )
    for note in llm.notes:
        console.stderr().print(f"page4: note: {note}")
    with console.token_bar(len(token_ids) * n * max_tokens) as advance:
        results = llm.generate(token_ids, params, on_chunk=lambda chunk: advance(len(chunk.token_ids)))
    counts = report.Counts.of(llm)
    if json:
        metrics = report.metrics_object(counts)
        lane = {"lane": llm.lane.as_object(), "kv_cache": report.kv_object(llm.kv_counts())}
        console.print_json({"outputs": report.outputs_object(results), "metrics": metrics, **lane})
    else:
        show(results, counts)
        if clips := report.clips_line(llm.kv_counts()):
            console.stderr().print(clips, style="dim")
    check_finished(results)


def check_finished(results: list[RequestOutput]) -> None:
    """Raise `EngineError` naming the first request that ended in an error; what it wrote has been shown."""
    for number, result in enumerate(results):
        for completion in result.outputs:
            if completion.finish_reason == "error":
                raise EngineError(f"prompt {number}: {completion.error}")


def show(results: list[RequestOutput], counts: report.Counts) -> None:
    """Texts on stdout, with a heading each when there are several; figures on stderr."""
    texts = [(number, completion) for number, result in enumerate(results) for completion in result.outputs]
    for number, completion in texts:
        if len(texts) > 1:
            console.print_text(f"--- prompt {number}, {len(completion.token_ids)} tokens, {completion.finish_reason}\n")
        console.print_text(completion.text if completion.text.endswith("\n") else completion.text + "\n")
    console.stderr().print(report.summary_line(counts), style="dim")

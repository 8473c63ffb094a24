"""`LLM`: a checkpoint folder in, text out. Everything is checked before weights are read or memory is taken."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from page4 import env
from page4.cache.layout import CacheLayout
from page4.cache.storage import Arena
from page4.checkpoint import Checkpoint
from page4.engine.admission import DEFAULT_BATCHED_TOKENS, Sizes, check_prompt, concurrent_windows, plan_arena
from page4.engine.core import EngineCore, Limits
from page4.engine.lane import LaneOptions, admit
from page4.engine.metrics import EngineMetrics, KVCounts
from page4.engine.options import cache_dtype, check_count, compute_dtype, device_of, num_drafts, set_threads
from page4.engine.output import CompletionOutput, RequestMetrics, RequestOutput, StreamChunk, Usage
from page4.engine.params import SamplingParams
from page4.engine.tokenizer import Tokenizer, read_json
from page4.errors import UsageError, message
from page4.geometry import Geometry
from page4.model.weights import load_model

Prompt = str | Sequence[int]
Stream = Generator[StreamChunk, None, None]


class LLM:
    """A qwen4_exp checkpoint, ready to generate.

    model: a folder (default: the embedded checkpoint). dtype: auto (float32 on a CPU), float32, float16 or bfloat16.
    kv_cache_dtype, draft_kv_dtype: auto (as dtype), a 16-bit type, float32, or fp8_e4m3, which needs calibrated scales
    in the checkpoint. max_model_len: tokens of prompt and output together. kv_cache_memory_bytes: size of the arena;
    by default enough for `max_num_seqs` requests under 1 GiB. speculative_config: {"method": "mtp",
    "num_speculative_tokens": k}, k = 0..7. e4m3_mtp: admit drafts over E4M3 K/V (None: PAGE4_E4M3_MTP).
    allow_unit_scales, allow_prototype_scales: run without calibrated scales, which `lane.warnings` then says.
    Raises errors of `page4.errors` before weights are read.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        draft_kv_dtype: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS,
        kv_cache_memory_bytes: int | None = None,
        block_size: int = 16,
        speculative_config: Mapping[str, Any] | None = None,
        allow_unit_scales: bool = False,
        allow_prototype_scales: bool = False,
        e4m3_mtp: bool | None = None,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        env.check()
        for what, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
            check_count(what, value)
        for what, given in (("kv_cache_memory_bytes", kv_cache_memory_bytes), ("max_model_len", max_model_len)):
            if given is not None:
                check_count(what, given)
        check_count("seed", seed, -(2**63))
        check_count("block_size", block_size, 4)
        set_threads()
        self.model_path = _folder(model)
        geometry = Geometry.from_folder(self.model_path)
        checkpoint = Checkpoint.open(self.model_path)
        has_draft = geometry.mtp_layers != 0 and any(name.startswith("mtp.") for name in checkpoint.names())
        drafts = num_drafts(speculative_config, has_draft=has_draft)
        running = concurrent_windows(max_num_seqs, max_num_batched_tokens, drafts)
        where = device_of(device)
        compute = compute_dtype(dtype, geometry, where)
        kv_dtype = cache_dtype("kv_cache_dtype", kv_cache_dtype, compute)
        draft_dtype = kv_dtype if draft_kv_dtype is None else cache_dtype("draft_kv_dtype", draft_kv_dtype, compute)
        self.lane = admit(
            self.model_path,
            checkpoint,
            geometry,
            LaneOptions(
                kv_dtype,
                draft_dtype if drafts else None,
                drafts,
                allow_unit_scales=allow_unit_scales,
                allow_prototype_scales=allow_prototype_scales,
                e4m3_mtp=e4m3_mtp,
            ),
        )
        layout = CacheLayout.of(
            geometry,
            dtype=compute,
            kv_dtype=kv_dtype,
            draft_kv_dtype=draft_dtype,
            page_tokens=block_size,
            with_draft=drafts > 0,
        )
        sizes = Sizes(layout.page_bytes, layout.page_tokens, layout.pages_per_state)
        plan = plan_arena(
            sizes,
            max_positions=geometry.max_positions,
            max_num_seqs=running,
            max_model_len=max_model_len,
            memory_bytes=kv_cache_memory_bytes,
        )
        self.tokenizer = Tokenizer.from_folder(self.model_path)
        self.notes: tuple[str, ...] = () if plan.note is None else (plan.note,)
        self.geometry = geometry
        loaded = load_model(self.model_path, compute, where, with_draft=drafts > 0)
        arena = Arena(layout, plan.num_pages, where, env.get("POISON"), self.lane.scales)
        self.load_report = loaded.load_report
        self.weight_bytes = _weight_bytes(checkpoint, loaded.load_report.loaded, compute)
        self.arena_bytes = arena.num_bytes
        self._core = EngineCore(
            loaded,
            arena,
            Limits(max_num_batched_tokens, running, plan.max_model_len, drafts),
            sizes=sizes,
            tokenizer=self.tokenizer,
            eos_ids=_eos_ids(self.model_path, geometry),
            seed=seed,
        )
        self._ids = itertools.count()
        self._inbox: dict[str, list[StreamChunk]] = {}
        self._others: list[StreamChunk] = []

    @property
    def metrics(self) -> EngineMetrics:
        """Counters since the engine was made; `kv` are those of this moment."""
        self._core.metrics.kv = self.kv_counts()
        return self._core.metrics

    @property
    def max_model_len(self) -> int:
        """Tokens that a request may have, prompt and output together."""
        return self._core.limits.max_model_len

    @property
    def core(self) -> EngineCore:
        """The engine below: scheduler, allocator and arena, for tests and tools."""
        return self._core

    def kv_counts(self) -> tuple[KVCounts, ...]:
        """What the E4M3 writer has done so far, by layer and side; empty for 16-bit K/V. Waits for the device."""
        return KVCounts.of(self._core.arena)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_chunk: Callable[[StreamChunk], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (texts or token ids) together; results in the order of the prompts.

        `params` is one for all or one for each; `on_chunk` sees every chunk as it comes. All prompts are checked before
        the first is queued. A request that failed has an output with `finish_reason` "error" and the reason in `error`.
        """
        many = _as_list(prompts)
        each = [params or SamplingParams()] * len(many) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(many):
            raise UsageError(message("params", allowed=f"one or {len(many)}", got=len(each), do="pass one a prompt"))
        ids = [self._encode(prompt) for prompt in many]
        for tokens in ids:
            check_prompt(tokens, vocab_size=self.geometry.vocab_size, max_model_len=self.max_model_len)
        collectors: dict[str, _Collector] = {}
        try:
            for tokens, settings in zip(ids, each, strict=True):
                name = self._open("generate", tokens, settings)
                collectors[name] = _Collector(name, tokens, settings)
            while not all(collector.done for collector in collectors.values()):
                preemptions = {name: self._core.preemptions(name) for name in collectors}
                self._pump()
                for name, collector in collectors.items():
                    for chunk in self._take(name):
                        collector.add(chunk, preemptions[name])
                        if on_chunk is not None:
                            on_chunk(chunk)
        finally:
            for name, collector in collectors.items():
                del self._inbox[name]
                if not collector.done:
                    self._core.discard(name)
        return [collector.result(self._core.prompt_logprobs(name)) for name, collector in collectors.items()]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Chunks of one prompt's completions as they come; closing the iterator aborts the request."""
        chunks = self._stream(self._encode(prompt), params or SamplingParams())
        next(chunks)  # queued from here on, and closed like any generator: by close(), or when nobody refers to it
        return chunks

    def _stream(self, prompt: list[int], params: SamplingParams) -> Stream:
        """First an empty chunk once the request is queued, then its own."""
        name = self._open("stream", prompt, params)
        unfinished = params.n
        try:
            yield StreamChunk(name, 0, (), "", Usage(len(prompt), 0))
            while unfinished:
                while not self._inbox[name]:
                    self._pump()
                for chunk in self._take(name):
                    unfinished -= chunk.finish_reason is not None
                    yield chunk
        finally:
            del self._inbox[name]
            self._core.discard(name)

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Queue a request under an id of the caller's; `step` delivers its chunks."""
        self._core.add(request_id, self._encode(prompt), params or SamplingParams())

    def step(self) -> list[StreamChunk]:
        """Run one step of everything that is queued; chunks of `add_request`'s requests come back."""
        self._pump()
        chunks, self._others = self._others, []
        return chunks

    def abort(self, request_id: str) -> None:
        """End a request and free all that it holds, at any time; an unknown id is fine."""
        self._core.abort(request_id)

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do or deliver."""
        return bool(self._others) or self._core.has_unfinished()

    def prompt_logprobs(self, request_id: str) -> Any:
        """Log probabilities of a finished request's prompt tokens, once (for `add_request`)."""
        return self._core.prompt_logprobs(request_id)

    def _open(self, kind: str, prompt: list[int], params: SamplingParams) -> str:
        """Queue a request of the engine's own and keep its chunks for whoever iterates over them."""
        name = f"{kind}-{next(self._ids)}"
        self._core.add(name, prompt, params)
        self._inbox[name] = []
        return name

    def _pump(self) -> None:
        """Run one step and sort its chunks: streams and calls under way share the engine."""
        for chunk in self._core.step():
            self._inbox.get(chunk.request_id, self._others).append(chunk)

    def _take(self, name: str) -> list[StreamChunk]:
        chunks, self._inbox[name] = self._inbox[name], []
        return chunks

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, (str, Sequence)):
            do = "pass one of them"
            raise UsageError(message("prompt", allowed="a text or a list of token ids", got=repr(prompt), do=do))
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            do = "pass token ids or add tokenizer.json to the folder"
            raise UsageError(message("prompt", allowed="token ids without a tokenizer", got="text", do=do))
        return self.tokenizer.encode(prompt)


class _Collector:
    """Puts the chunks of one request together."""

    def __init__(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        self._id, self._prompt = request_id, prompt
        self._outputs = [CompletionOutput(index) for index in range(params.n)]
        if params.logprobs is not None:
            for output in self._outputs:
                output.logprobs = []
        self._start = time.perf_counter()
        self._first: float | None = None
        self._end = self._start
        self._preemptions = 0

    @property
    def done(self) -> bool:
        return all(output.finish_reason is not None for output in self._outputs)

    def add(self, chunk: StreamChunk, preemptions: int) -> None:
        now = time.perf_counter()
        if self._first is None and chunk.token_ids:
            self._first = now - self._start
        self._end, self._preemptions = now, max(self._preemptions, preemptions)
        self._outputs[chunk.index].add(chunk)

    def result(self, prompt_logprobs: Any) -> RequestOutput:
        usage = Usage(len(self._prompt), sum(len(output.token_ids) for output in self._outputs))
        metrics = RequestMetrics(self._first, self._end - self._start, self._preemptions)
        return RequestOutput(self._id, self._prompt, self._outputs, usage, metrics, prompt_logprobs)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a text, or a sequence that begins with a token id) becomes a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _folder(model: str | Path | None) -> Path:
    if model is None:
        from page4.assets import embedded_checkpoint

        return embedded_checkpoint()
    return Path(model)


def _eos_ids(folder: Path, geometry: Geometry) -> frozenset[int]:
    """End-of-text ids of the config and of generation_config.json."""
    found = read_json(folder / "generation_config.json").get("eos_token_id")
    more = found if isinstance(found, list) else [found]
    return frozenset(geometry.eos_token_ids) | {token for token in more if isinstance(token, int)}


def _weight_bytes(checkpoint: Checkpoint, loaded: Sequence[str], dtype: torch.dtype) -> int:
    """Bytes of the weights in memory, at the activations' type."""
    total = 0
    for name in loaded:
        count = 1
        for size in checkpoint.entry(name).shape:
            count *= size
        total += count * dtype.itemsize
    return total

"""One step of the engine, and the life of every completion in it.

A step: the scheduler picks rows; the target runs them; tokens are verified and emitted one by one; states advance by
the accepted rows only; the draft head catches up and proposes the next windows. What a step learns is handed out by
request (`ledger`), never by row, so a request that left meanwhile gets nothing.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from page4 import attend
from page4.cache.pages import PageAllocator, StateSlot
from page4.cache.storage import Arena
from page4.engine.admission import Sizes, check_fits, check_prompt, check_token_ids
from page4.engine.chance import SeedSource, child_seed
from page4.engine.detokenize import Detokenizer
from page4.engine.drafting import CatchUp, Drafter
from page4.engine.emission import Delta, Emission
from page4.engine.ledger import StepLedger
from page4.engine.metrics import EngineMetrics
from page4.engine.output import StreamChunk, Usage
from page4.engine.params import SamplingParams
from page4.engine.request import FinishReason, Request
from page4.engine.sampling import Logprobs, logprobs
from page4.engine.scheduler import Scheduler, StepPlan, Work
from page4.engine.tokenizer import Tokenizer
from page4.engine.verifying import Asked, Verified, gives_token, verify
from page4.engine.watchdog import WatchdogEvent
from page4.errors import KernelError, UsageError, message
from page4.model.batch import RowSpan, StepBatch
from page4.model.decoder import Model

_LOG = logging.getLogger("page4")


@dataclass(frozen=True)
class Limits:
    """Limits of an engine: rows a step, requests at once, tokens of a request, drafts a window."""

    max_num_batched_tokens: int
    max_running: int
    max_model_len: int
    drafts: int


class _RowsRefused(Exception):
    """The forward refused a row (a NaN index score, for example); the cause says why."""


class EngineCore:
    """Continuous batching over one model and one arena. Not thread-safe: one caller steps it."""

    def __init__(
        self,
        model: Model,
        arena: Arena,
        limits: Limits,
        *,
        sizes: Sizes,
        tokenizer: Tokenizer | None,
        eos_ids: frozenset[int],
        seed: int,
    ) -> None:
        self.model, self.arena, self.limits = model, arena, limits
        self.metrics = EngineMetrics(
            accepted_per_position=[0] * limits.drafts, drafted_per_position=[0] * limits.drafts
        )
        self.allocator = PageAllocator(arena.num_pages, arena.layout.pages_per_state, arena.poison_pages)
        self.scheduler = Scheduler(
            self.allocator,
            sizes,
            limits.max_num_batched_tokens,
            limits.max_running,
            limits.max_model_len,
            limits.drafts,
            self._enter,
            self._leave,
        )
        self._tokenizer, self._eos_ids = tokenizer, eos_ids
        self._seeds, self._arrivals = SeedSource(seed), itertools.count()
        self._ledger = StepLedger()
        self._emissions: dict[str, Emission] = {}
        self._by_id: dict[str, list[Request]] = {}
        self._q: dict[str, Tensor] = {}
        self._prompt_logprobs: dict[str, list[Logprobs | None]] = {}
        self._undelivered: list[StreamChunk] = []
        self._drafter: Drafter | None = None
        if limits.drafts:
            assert model.draft is not None, "drafts were admitted without a draft head"
            self._drafter = Drafter(model.draft, arena, self.allocator.pages)

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        """Queue a request, all its `n` completions. Raises before anything is kept when it can never be served."""
        if request_id in self._by_id:
            do = "wait until it ends or choose another id"
            raise UsageError(message("request_id", allowed="one that is not in use", got=repr(request_id), do=do))
        vocab = self.model.geometry.vocab_size
        check_prompt(prompt, vocab_size=vocab, max_model_len=self.limits.max_model_len)
        check_token_ids("stop token id", params.stop_token_ids, vocab)
        if params.stop and self._tokenizer is None:
            do = "use stop_token_ids"
            raise UsageError(message("stop", allowed="none without a tokenizer", got=list(params.stop), do=do))
        most = self.limits.max_model_len
        limit = most if params.max_tokens is None else min(most, len(prompt) + params.max_tokens)
        check_fits(self.scheduler.sizes, num_pages=self.arena.num_pages, tokens=limit)
        seed = self._seeds.draw() if params.seed is None else params.seed
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        requests = [
            Request(
                request_id=request_id,
                index=index,
                arrival=next(self._arrivals),
                params=params,
                prompt_len=len(prompt),
                token_ids=list(prompt),
                seed=child_seed(seed, index),
                length_limit=limit,
                stop_ids=stop_ids,
            )
            for index in range(params.n)
        ]
        self._by_id[request_id] = requests
        if params.prompt_logprobs is not None:
            self._prompt_logprobs[request_id] = [None]
        for request in requests:
            self._emissions[request.owner] = Emission(request, self._detokenizer(params))
            if request.num_tokens >= request.length_limit and params.prompt_logprobs is None:
                # A prompt that fills the model length leaves no room for a token.
                self._end(request, "length")
            else:
                self.scheduler.add(request)

    def abort(self, request_id: str, reason: FinishReason = "abort", error: str | None = None) -> None:
        """End a request now and take back all that it holds; an unknown or finished id is fine."""
        for request in self._by_id.get(request_id, []):
            if not request.finished:
                self._end(request, reason, error)

    def discard(self, request_id: str) -> None:
        """Abort a request that nobody listens to any more: its last chunks and log probabilities go too."""
        self.abort(request_id)
        self._undelivered = [chunk for chunk in self._undelivered if chunk.request_id != request_id]
        self._prompt_logprobs.pop(request_id, None)

    def has_unfinished(self) -> bool:
        """Whether a step would do or deliver anything."""
        return self.scheduler.has_unfinished() or bool(self._undelivered)

    def prompt_logprobs(self, request_id: str) -> list[Logprobs | None] | None:
        """The log probabilities of a prompt's tokens, handed out once."""
        return self._prompt_logprobs.pop(request_id, None)

    def preemptions(self, request_id: str) -> int:
        """How often the completions of a live request were preempted."""
        return sum(request.preemptions for request in self._by_id.get(request_id, []))

    @torch.inference_mode()
    def step(self) -> list[StreamChunk]:
        """Run one step and return what it added to each completion.

        A step that fails ends the requests in it with `finish_reason` "error"; the engine goes on with the others.
        """
        chunks, self._undelivered = self._undelivered, []
        if not self.scheduler.has_unfinished():
            return chunks
        plan = self.scheduler.schedule()
        self.metrics.preemptions += len(plan.preempted)
        if not plan.work:
            return chunks
        start = time.perf_counter()
        self._attempt(plan, chunks)
        chunks.extend(self._undelivered)
        self._undelivered = []
        self.metrics.count_seconds(
            time.perf_counter() - start,
            prefill_rows=sum(work.num_rows for work in plan.chunks),
            decode_rows=sum(work.num_rows for work in plan.windows),
        )
        return chunks

    def _attempt(self, plan: StepPlan, chunks: list[StreamChunk]) -> None:
        try:
            self._run(plan, chunks)
        except _RowsRefused as refused:
            # No state has moved yet, so the requests run again one by one: only the one with the bad row ends.
            parts = plan.parts()
            for part in parts:
                self._attempt(part, chunks)
            if not parts:
                self._fail(plan, refused.__cause__ or refused)
        except Exception as error:  # whatever failed, its requests end and their pages come back
            self._fail(plan, error)

    def _fail(self, plan: StepPlan, error: BaseException) -> None:
        self.metrics.failed_steps += 1
        for work in plan.work:
            if not work.request.finished:
                text = f"request {work.request.request_id}: {type(error).__name__}: {error}"
                self._end(work.request, "error", text)

    def _run(self, plan: StepPlan, chunks: list[StreamChunk]) -> None:
        """One forward and what follows from it; `chunks` keeps what was emitted even if a later part fails."""
        routes = attend.route_counts.copy()
        flight = self._ledger.launch([work.request.owner for work in plan.work])
        batch = self._batch(plan.work)
        keep = [self._rows_kept(work) for work in plan.work]
        starts = list(itertools.accumulate(keep, initial=0))
        try:
            output = self.model.forward(batch, self.arena, keep)
        except KernelError as error:
            raise _RowsRefused from error
        asked, rows = self._asked(plan.work, starts)
        verified: dict[str, Verified] = {}
        if rows:
            logits = self.model.logits(output.streams[torch.tensor(rows, device=output.streams.device)])
            verified = verify(logits, asked, self._q)
        self._score_prompts(plan.chunks, starts, output.streams, len(plan.windows))
        taken = [self._rows_taken(work, verified.get(work.request.owner)) for work in plan.work]
        bad = self._nonfinite(plan.work, taken, batch, output.nonfinite_rows)
        for work in plan.windows:
            result = verified.get(work.request.owner)
            if work.num_drafts and (work.request.owner in bad or (result is not None and not result.usable)):
                raise _RowsRefused  # perhaps only because of a draft: what k = 0 computes decides
        whole = all(count == work.num_rows for count, work in zip(taken, plan.work, strict=True))
        self.model.commit(
            batch, output.pending, self.arena, None if whole else torch.tensor(taken, device=self.model.device)
        )

        landed = self._ledger.land(flight, list(zip(plan.work, taken, strict=True))).values
        catch_up: list[CatchUp] = []
        for n, work in enumerate(plan.work):
            request = work.request
            if request.owner not in landed:
                continue
            result = verified.get(request.owner)
            if request.owner in bad:
                self._end(request, "error", bad[request.owner])
            elif result is not None and not result.usable:
                self._end(request, "error", f"request {request.request_id}: the target's logits are not finite")
            else:
                delta = self._advance(work, taken[n], result)
                if delta is not None:
                    chunks.append(self._chunk(request, delta))
                full = request.num_tokens >= request.length_limit and request.num_computed >= request.prompt_len
                if delta is None and full and not request.finished:
                    self._end(request, "length")
                if self._drafter is not None and not request.finished:
                    entry = self._catch_up(work, taken[n], starts[n])
                    catch_up.extend([] if entry is None else [entry])
        if self._drafter is not None and catch_up:
            self._draft(output.streams, catch_up)
        self.metrics.target_steps += 1
        self.metrics.prefill_tokens += sum(work.num_rows for work in plan.chunks)
        self.metrics.routes.update(attend.route_counts - routes)

    def _batch(self, work: Sequence[Work]) -> StepBatch:
        geometry = self.model.geometry
        context = geometry.ple.ngram_size - 1 if geometry.ple is not None else 0
        spans = []
        for entry in work:
            request = entry.request
            assert request.slot is not None, "a running request has a slot"
            self.allocator.check_slot(request.slot)
            before = request.context(entry.first_position, context) if context else []
            pages = list(self.allocator.pages(request.owner))
            spans.append(RowSpan(list(entry.token_ids), entry.first_position, pages, request.slot.slot, before))
        return StepBatch.build(spans, geometry, self.model.device)

    def _asked(self, work: Sequence[Work], starts: Sequence[int]) -> tuple[list[Asked], list[int]]:
        """The requests that get tokens from this step, and the kept rows whose logits they need."""
        asked: list[Asked] = []
        rows: list[int] = []
        for n, entry in enumerate(work):
            if not gives_token(entry) or entry.request.num_tokens >= entry.request.length_limit:
                continue
            asked.append(Asked(entry, len(rows)))
            first = starts[n] if entry.is_window else starts[n + 1] - 1
            rows.extend(range(first, starts[n + 1]))
        return asked, rows

    def _rows_kept(self, work: Work) -> int:
        """Newest rows whose streams are read: all of a window or for drafts and prompt log probabilities, else one."""
        request = work.request
        drafting = self._drafter is not None and request.draft_room() > 0
        scoring = request.params.prompt_logprobs is not None
        return work.num_rows if work.is_window or drafting or scoring else 1

    @staticmethod
    def _rows_taken(work: Work, verified: Verified | None) -> int:
        """Rows that stay: of a window those of accepted tokens, of a prompt all."""
        return len(verified.tokens) if work.is_window and verified is not None and verified.tokens else work.num_rows

    def _advance(self, work: Work, taken: int, verified: Verified | None) -> Delta | None:
        """Move a request on by its accepted rows and emit its tokens."""
        request = work.request
        request.num_computed += taken
        if verified is None:
            return None
        request.drafts = []
        self._q.pop(request.owner, None)
        delta = self._emissions[request.owner].push(verified.tokens, verified.logprobs)
        if work.is_window:
            self.metrics.count_window(work.num_drafts, len(verified.tokens) - 1)
            self.metrics.decode_tokens += len(delta.token_ids)
            self._watch(request, work.num_drafts, len(verified.tokens) - 1)
        if delta.finish_reason is not None:
            self._forget(request, delta.finish_reason)
        return delta

    def _watch(self, request: Request, drafted: int, accepted: int) -> None:
        """Draft no more for a request whose windows look wrong, and say so."""
        signature = request.watchdog.observe(drafted, accepted, request.token_ids)
        if signature is not None:
            request.drafts_off = True
            event = WatchdogEvent(request.request_id, request.index, signature, request.num_tokens)
            self.metrics.watchdog_events.append(event)
            _LOG.warning("request %s: %s; it goes on without drafts", request.request_id, signature)

    def _catch_up(self, work: Work, taken: int, first_row: int) -> CatchUp | None:
        """What the draft head has to see of this step; None when it will not be needed again."""
        request = work.request
        room = request.draft_room()
        if room == 0:
            return None
        first = work.first_position
        following = request.token_ids[first + 1 : first + taken + 1]
        assert len(following) == taken, "every accepted row has a next token"
        # A request under recomputation keeps the drafts that it had.
        wants = min(self.limits.drafts, room) if request.decoding and not request.drafts else 0
        return CatchUp(request, first, following, first_row, wants)

    def _draft(self, streams: Tensor, catch_up: Sequence[CatchUp]) -> None:
        assert self._drafter is not None
        try:
            drafted = self._drafter.run(streams, catch_up)
        except KernelError:
            # A row that the draft head refuses is no fault of the request: it goes on without drafts.
            drafted = {}
            for entry in catch_up:
                try:
                    drafted |= self._drafter.run(streams, [entry])
                except KernelError:
                    entry.request.drafts_off = True
        for entry in catch_up:
            found = drafted.get(entry.request.owner)
            if found is not None:
                entry.request.drafts = found.tokens
                if found.q is not None:
                    self._q[entry.request.owner] = found.q

    def _score_prompts(self, chunks: Sequence[Work], starts: Sequence[int], streams: Tensor, first: int) -> None:
        """Log probabilities of prompt tokens that this step's rows predict, each once even after a preemption."""
        for n, work in enumerate(chunks, start=first):
            request = work.request
            count = request.params.prompt_logprobs
            if count is None or request.index != 0:
                continue
            known = self._prompt_logprobs[request.request_id]
            begin = max(work.first_position, len(known) - 1)
            end = min(work.first_position + work.num_rows, request.prompt_len - 1)
            if begin >= end:
                continue
            offset = starts[n] - work.first_position
            logits = self.model.logits(streams[offset + begin : offset + end])
            tokens = request.token_ids[begin + 1 : end + 1]
            known.extend(logprobs(logits, tokens, [count] * len(tokens)))

    @staticmethod
    def _nonfinite(work: Sequence[Work], taken: Sequence[int], batch: StepBatch, rows: Tensor | None) -> dict[str, str]:
        """Requests with a K or V that is not finite, by owner, with what to say. Refused drafts do not count."""
        if rows is None or not bool(rows.any()):
            return {}
        flags = rows.tolist()
        found = {}
        for n, entry in enumerate(work):
            for row in range(batch.row_starts[n], batch.row_starts[n] + taken[n]):
                if flags[row]:
                    position = entry.first_position + row - batch.row_starts[n]
                    name = f"request {entry.request.request_id}"
                    found[entry.request.owner] = (
                        f"{name}: K, V or index scores of the token at position {position} is not finite"
                    )
                    break
        return found

    def _chunk(self, request: Request, delta: Delta, error: str | None = None) -> StreamChunk:
        return StreamChunk(
            request_id=request.request_id,
            index=request.index,
            token_ids=delta.token_ids,
            text=delta.text,
            usage=Usage(request.prompt_len, request.num_emitted),
            logprobs=delta.logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            error=error,
        )

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a completion without a token; its last chunk goes out with the next delivery."""
        delta = self._emissions[request.owner].end(reason)
        self._undelivered.append(self._chunk(request, delta, error))
        self._forget(request, reason)

    def _forget(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        self.scheduler.finish(request)
        self._emissions.pop(request.owner, None)
        self._q.pop(request.owner, None)
        if all(other.finished for other in self._by_id[request.request_id]):
            del self._by_id[request.request_id]

    def _enter(self, request: Request, slot: StateSlot) -> None:
        self.arena.zero_state(slot.slot)
        self._ledger.enter(request.owner, slot)

    def _leave(self, request: Request) -> None:
        self._ledger.leave(request.owner)

    def _detokenizer(self, params: SamplingParams) -> Detokenizer | None:
        if self._tokenizer is None:
            return None
        return Detokenizer(self._tokenizer, skip_special_tokens=params.skip_special_tokens)

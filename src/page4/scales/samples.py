"""Calibration samples as token ids, made on the serving path, and the manifest that says which they were.

The rule of the choice: samples are put in the order of sha256(seed, token ids), and the first `num_samples` are taken.
So the set, its order, its batches and its shards depend on the seed and on what the samples are, never on the order of
the file.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from page4.checkpoint.hashes import sha256_of_bytes
from page4.engine.admission import check_prompt
from page4.engine.tokenizer import Tokenizer
from page4.errors import Page4Error, UsageError, message
from page4.scales.sample_file import RawSample

LONG_TOKENS = 1024


@dataclass(frozen=True)
class Sample:
    """One request of the calibration; `dropped_tokens` were beyond the longest length."""

    token_ids: tuple[int, ...]
    kind: str
    dropped_tokens: int

    @property
    def digest(self) -> str:
        """SHA-256 of the token ids, each as four bytes, the lowest first."""
        return sha256_of_bytes(b"".join(token.to_bytes(4, "little") for token in self.token_ids))


@dataclass(frozen=True)
class SampleSet:
    """The samples that were chosen, in their order, and what their manifest says beside them."""

    samples: tuple[Sample, ...]
    manifest: dict[str, Any]

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return sum(len(sample.token_ids) for sample in self.samples)


def tokenize(
    raw: Sequence[RawSample], tokenizer: Tokenizer | None, *, vocab_size: int, max_seq_length: int
) -> list[Sample]:
    """Token ids as the engine makes them of the same text or messages, cut after `max_seq_length`.

    Raises `UsageError` naming the line: no tokenizer, no chat template, an id outside the vocabulary.
    """
    found = []
    for entry in raw:
        try:
            ids = _token_ids(entry.fields, tokenizer)
            kept = ids[:max_seq_length]
            check_prompt(kept, vocab_size=vocab_size, max_model_len=max_seq_length)
        except Page4Error as error:
            raise UsageError(f"{entry.where}: {error}") from error
        found.append(Sample(tuple(kept), entry.kind, len(ids) - len(kept)))
    return found


def _token_ids(fields: Mapping[str, Any], tokenizer: Tokenizer | None) -> list[int]:
    if "prompt_token_ids" in fields:
        return list(fields["prompt_token_ids"])
    if tokenizer is None:
        do = "use prompt_token_ids or add tokenizer.json to the checkpoint"
        raise UsageError(message("sample", allowed="token ids without a tokenizer", got="text", do=do))
    if "text" in fields:
        return tokenizer.encode(fields["text"])
    # The template writes the special tokens, so none are added a second time.
    ids: list[int] = tokenizer.apply_chat_template(fields["messages"], tools=fields.get("tools"))
    return ids


def choose(
    samples: Sequence[Sample],
    tokenizer: Tokenizer | None,
    *,
    num_samples: int,
    seed: int,
    mix: Mapping[str, int] | None = None,
) -> SampleSet:
    """The set for a seed. Raises `UsageError` when it has fewer samples of a kind than `mix` declares."""
    ordered = sorted(samples, key=lambda sample: (_rank(sample, seed), sample.kind, sample.dropped_tokens))
    chosen = tuple(ordered[:num_samples])
    kinds = Counter(sample.kind for sample in chosen)
    long = sum(len(sample.token_ids) >= LONG_TOKENS for sample in chosen)
    _check_mix(mix or {}, kinds, long)
    digests = sorted(sample.digest for sample in chosen)
    template = None if tokenizer is None else tokenizer.template_source
    manifest: dict[str, Any] = {
        "available": len(samples),
        "corpus_sha256": sha256_of_bytes("\n".join(digests).encode()),
        "count": len(chosen),
        "kinds": {**dict(sorted(kinds.items())), "long": long},
        "mix": dict(mix or {}),
        "seed": seed,
        "template_sha256": None if template is None else sha256_of_bytes(template.encode()),
        "token_ids_sha256": digests,
        "truncated": sum(sample.dropped_tokens > 0 for sample in chosen),
        "truncated_tokens": sum(sample.dropped_tokens for sample in chosen),
    }
    manifest["manifest_sha256"] = sha256_of_bytes(json.dumps(manifest, sort_keys=True).encode())
    return SampleSet(chosen, manifest)


def _rank(sample: Sample, seed: int) -> bytes:
    return hashlib.sha256(f"{seed} {sample.digest}".encode()).digest()


def parse_mix(text: str) -> dict[str, int]:
    """`text=2,tool=1`: the least number of samples of each kind. Raises `UsageError`."""
    mix: dict[str, int] = {}
    for part in text.split(","):
        kind, equals, number = part.strip().partition("=")
        if not kind or not equals or not number.isascii() or not number.isdigit() or int(number) < 1 or kind in mix:
            do = "write kind=number, kinds apart by commas"
            raise UsageError(message("--mix", allowed="text=2,tool=1 or the like", got=repr(text), do=do))
        mix[kind] = int(number)
    return mix


def _check_mix(mix: Mapping[str, int], kinds: Mapping[str, int], long: int) -> None:
    # In a mix, text is all traffic without tools: plain texts and conversations.
    found = {**kinds, "long": long, "text": kinds.get("text", 0) + kinds.get("chat", 0)}
    for kind, least in mix.items():
        if found.get(kind, 0) < least:
            held = ", ".join(f"{name}={count}" for name, count in sorted(found.items()))
            do = "add such samples, raise --num-samples or declare what there is"
            raise UsageError(
                message(
                    f"--mix {kind}", allowed=f"at least {least} samples", got=f"{found.get(kind, 0)} ({held})", do=do
                )
            )

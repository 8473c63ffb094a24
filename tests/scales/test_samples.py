"""Samples: the token ids of the serving path, the choice, the manifest, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from page4.assets import calibration_samples, embedded_checkpoint
from page4.engine import LLM
from page4.engine.chat import ChatTemplate
from page4.engine.tokenizer import Tokenizer
from page4.errors import UsageError
from page4.scales.sample_file import RawSample, read_samples
from page4.scales.samples import SampleSet, choose, parse_mix, tokenize

TEMPLATE = """{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\
{% if tools %}<tools>{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"""
TOOLS = [{"type": "function", "function": {"name": "look"}}]
THREE: list[dict[str, Any]] = [
    {"text": "def f(): pass"},
    {"messages": [{"role": "user", "content": "hello"}]},
    {"messages": [{"role": "user", "content": "look"}, {"role": "tool", "content": "42"}], "tools": TOOLS},
]


def with_bos(template: str = TEMPLATE) -> Tokenizer:
    """Bytes as tokens, and <s> put before every text by the tokenizer itself."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([], trainer)
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return Tokenizer(backend, {"bos_token": "<s>"}, ChatTemplate(template))


def read(tmp_path: Path, *lines: object) -> list[RawSample]:
    file = tmp_path / "samples.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return read_samples(file)


def chosen(tmp_path: Path, lines: list[dict[str, Any]], tokenizer: Tokenizer, **options: Any) -> SampleSet:
    samples = tokenize(read(tmp_path, *lines), tokenizer, vocab_size=4096, max_seq_length=2048)
    return choose(samples, tokenizer, **{"num_samples": 512, "seed": 42, **options})


def test_b21_ids_are_those_of_the_engine(tmp_path: Path) -> None:
    llm = LLM(embedded_checkpoint(), max_model_len=256)
    assert llm.tokenizer is not None
    found = tokenize(read(tmp_path, *THREE), llm.tokenizer, vocab_size=4096, max_seq_length=2048)
    assert list(found[0].token_ids) == llm._encode("def f(): pass")
    for sample, entry in zip(found[1:], THREE[1:], strict=True):
        assert list(sample.token_ids) == llm.tokenizer.apply_chat_template(
            entry["messages"], tools=entry.get("tools"), add_generation_prompt=True
        )
    assert llm.tokenizer.decode(found[1].token_ids, skip_special_tokens=False) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_b21_special_tokens_come_once(tmp_path: Path) -> None:
    found = tokenize(read(tmp_path, *THREE), with_bos(), vocab_size=4096, max_seq_length=2048)
    assert [sample.token_ids.count(0) for sample in found] == [1, 1, 1]
    assert [sample.token_ids[0] for sample in found] == [0, 0, 0]
    texts = [with_bos().decode(sample.token_ids[1:]).replace("Ġ", " ") for sample in found]
    assert "<tools>" in texts[2].replace(" ", "") and "<tools>" not in texts[1].replace(" ", "")


def test_b21_counts_by_kind_and_the_mix(tmp_path: Path) -> None:
    tokenizer = with_bos()
    found = chosen(tmp_path, THREE, tokenizer, mix={"text": 2, "tool": 1})
    assert found.manifest["kinds"] == {"chat": 1, "long": 0, "text": 1, "tool": 1}
    assert found.manifest["mix"] == {"text": 2, "tool": 1}
    with pytest.raises(UsageError, match="--mix image: expected at least 1 samples, got 0"):
        chosen(tmp_path, THREE, tokenizer, mix={"text": 2, "tool": 1, "image": 1})
    with pytest.raises(UsageError, match="--mix long"):
        chosen(tmp_path, THREE, tokenizer, mix={"long": 1})


def test_b21_one_character_of_the_template_changes_the_manifest(tmp_path: Path) -> None:
    a = chosen(tmp_path, THREE, with_bos()).manifest
    b = chosen(tmp_path, THREE, with_bos(TEMPLATE.replace("<tools>", "<Tools>"))).manifest
    assert a["template_sha256"] != b["template_sha256"]
    assert a["manifest_sha256"] != b["manifest_sha256"]
    assert a["corpus_sha256"] != b["corpus_sha256"]  # the tool sample's ids moved too


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "image"}, "text"])
def test_images_are_refused(tmp_path: Path, part: object) -> None:
    content = [{"type": "text", "text": "what is this?"}, part]
    with pytest.raises(UsageError, match=r"samples\.jsonl line 1 content: expected text parts, .*text model only"):
        read(tmp_path, {"messages": [{"role": "user", "content": content}]})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "one JSON object a line"),
        ("[1]", "a JSON object, got list"),
        ({}, "one of text, messages, prompt_token_ids, got none"),
        ({"text": "a", "prompt_token_ids": [1]}, "got text and prompt_token_ids"),
        ({"txt": "a"}, "did you mean text"),
        ({"text": ""}, "text: expected a text"),
        ({"text": 5}, "text: expected a text"),
        ({"messages": []}, "messages: expected a list that is not empty"),
        ({"messages": ["hi"]}, "objects with role and content"),
        ({"text": "a", "tools": TOOLS}, "tools: expected a list beside messages"),
        ({"text": "a", "kind": "image"}, "kind: expected a word"),
        ({"text": "a", "kind": 3}, "kind: expected a word"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: object, words: str) -> None:
    with pytest.raises(UsageError, match=r"samples\.jsonl line 3") as refusal:
        read(tmp_path, {"text": "good"}, "", line)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_token_ids": [1, 4096]}, "prompt token id 1: expected 0 to 4095, got 4096"),
        ({"prompt_token_ids": [1, True]}, "got True"),
        ({"prompt_token_ids": [1, "a"]}, "got 'a'"),
        ({"messages": [{"role": "user"}]}, "messages: expected what the chat template takes"),
    ],
)
def test_bad_content_is_named(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    tokenizer = Tokenizer.from_folder(embedded_checkpoint())
    with pytest.raises(UsageError, match=r"samples\.jsonl line 1: ") as refusal:
        tokenize(read(tmp_path, fields), tokenizer, vocab_size=4096, max_seq_length=64)
    assert words in str(refusal.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least one sample"):
        read(tmp_path, "", " ")
    with pytest.raises(UsageError, match="No such file"):
        read_samples(tmp_path / "absent.jsonl")
    (tmp_path / "latin").write_bytes(b'{"text": "\xe9"}')
    with pytest.raises(UsageError, match="byte 0xE9 at offset 10"):
        read_samples(tmp_path / "latin")


def test_text_needs_a_tokenizer_and_ids_do_not(tmp_path: Path) -> None:
    (sample,) = tokenize(read(tmp_path, {"prompt_token_ids": [5, 6]}), None, vocab_size=8, max_seq_length=8)
    assert sample.token_ids == (5, 6) and sample.kind == "tokens"
    with pytest.raises(UsageError, match="token ids without a tokenizer"):
        tokenize(read(tmp_path, {"text": "a"}), None, vocab_size=8, max_seq_length=8)


def test_long_samples_are_cut_counted_and_kept(tmp_path: Path) -> None:
    lines = [{"prompt_token_ids": [1] * 1500, "kind": "code"}, {"prompt_token_ids": [2] * 1024}]
    samples = tokenize(read(tmp_path, *lines), None, vocab_size=8, max_seq_length=1100)
    found = choose(samples, None, num_samples=9, seed=0)
    assert sorted(len(sample.token_ids) for sample in found.samples) == [1024, 1100]
    assert found.manifest["truncated"] == 1
    assert found.manifest["truncated_tokens"] == 400
    assert found.manifest["kinds"] == {"code": 1, "long": 2, "tokens": 1}
    assert found.manifest["template_sha256"] is None


def test_the_choice_depends_on_the_seed_and_not_on_the_file(tmp_path: Path) -> None:
    lines = [{"prompt_token_ids": [n, n + 1]} for n in range(60)]
    tokenizer = with_bos()
    first = chosen(tmp_path, lines, tokenizer, num_samples=20)
    random.Random(3).shuffle(lines)
    again = chosen(tmp_path, lines, tokenizer, num_samples=20)
    assert again.samples == first.samples and again.manifest == first.manifest
    other = chosen(tmp_path, lines, tokenizer, num_samples=20, seed=7)
    assert len(set(other.samples) ^ set(first.samples)) > 10
    assert first.manifest["available"] == 60 and first.manifest["count"] == 20


def test_the_corpus_hash_is_that_of_the_sorted_digests(tmp_path: Path) -> None:
    import hashlib

    found = chosen(tmp_path, [{"prompt_token_ids": [1, 300]}, {"prompt_token_ids": [2]}], with_bos())
    raw = [bytes([1, 0, 0, 0, 44, 1, 0, 0]), bytes([2, 0, 0, 0])]
    digests = sorted(hashlib.sha256(data).hexdigest() for data in raw)
    assert found.manifest["token_ids_sha256"] == digests
    assert found.manifest["corpus_sha256"] == hashlib.sha256("\n".join(digests).encode()).hexdigest()


def test_mix_is_parsed_or_refused() -> None:
    assert parse_mix("text=2, tool=1,image=1") == {"text": 2, "tool": 1, "image": 1}
    for bad in ("", "text", "text=", "text=0", "=3", "text=2,text=3", "text=-1", "text=x"):
        with pytest.raises(UsageError, match="--mix: expected"):
            parse_mix(bad)


def test_the_shipped_samples_cover_the_kinds() -> None:
    tokenizer = Tokenizer.from_folder(embedded_checkpoint())
    samples = tokenize(read_samples(calibration_samples()), tokenizer, vocab_size=4096, max_seq_length=2048)
    found = choose(samples, tokenizer, num_samples=512, seed=42, mix={"text": 20, "chat": 5, "tool": 1, "long": 2})
    assert len(found.samples) == 24
    assert found.manifest["truncated"] == 0

"""Train the byte-level BPE tokenizer and turn the text into tokens.

`python tools/tiny/tokenizer.py WORK ASSETS` trains on a fixed sample of WORK/train.txt.xz, writes tokenizer.json,
tokenizer_config.json, chat_template.jinja and generation_config.json to ASSETS and WORK/tokens.bin.xz: the uint16
tokens of both splits, every document closed by <|endoftext|>.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import sys
from pathlib import Path

import numpy as np
from shape import CONFIG, END_OF_TEXT, IM_END, SPECIAL_TOKENS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SAMPLE_EVERY = 8  # one document in eight teaches the merges; that is plenty for 4096 entries
CHAT_TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def read_documents(work: Path, split: str) -> list[str]:
    """The documents of a split, in corpus order."""
    with lzma.open(work / f"{split}.txt.xz", "rt", encoding="utf-8", newline="") as file:
        return file.read().split("\0")


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Byte-level BPE over 4096 entries, the special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """All documents as one uint16 stream."""
    parts = []
    for start in range(0, len(documents), 512):
        for encoding in tokenizer.encode_batch_fast(documents[start : start + 512]):
            parts.append(np.array([*encoding.ids, END_OF_TEXT], dtype=np.uint16))
    return np.concatenate(parts)


def write_assets(tokenizer: Tokenizer, assets: Path) -> None:
    """The files that a tokenizer folder has."""
    tokenizer.save(str(assets / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL_TOKENS[END_OF_TEXT],
        "pad_token": SPECIAL_TOKENS[END_OF_TEXT],
        "model_max_length": CONFIG["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    (assets / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (assets / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    generation = {"do_sample": False, "eos_token_id": [END_OF_TEXT, IM_END], "pad_token_id": END_OF_TEXT}
    (assets / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def main(work: Path, assets: Path) -> None:
    train, held = read_documents(work, "train"), read_documents(work, "held")
    tokenizer = train_tokenizer(train[::SAMPLE_EVERY])
    write_assets(tokenizer, assets)
    train_tokens, held_tokens = encode(tokenizer, train), encode(tokenizer, held)
    header = np.array([len(train_tokens), len(held_tokens)], dtype=np.int64).tobytes()
    payload = header + train_tokens.tobytes() + held_tokens.tobytes()
    with lzma.open(work / "tokens.bin.xz", "wb", preset=1) as out:
        out.write(payload)
    print(
        json.dumps(
            {
                "train_tokens": len(train_tokens),
                "held_tokens": len(held_tokens),
                "bytes_per_token": sum(len(d.encode()) for d in held) / len(held_tokens),
                "tokens_sha256": hashlib.sha256(payload).hexdigest(),
                "tokenizer_sha256": hashlib.sha256((assets / "tokenizer.json").read_bytes()).hexdigest(),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

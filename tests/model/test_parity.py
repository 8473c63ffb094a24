"""The model against transformers: logits within 1e-4 in fp32 and the same greedy tokens, however the rows are cut."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import oracle
from tests.model.conftest import Checkpoints
from tests.model.lanes import Lane, ragged
from torch import Tensor

SMALL: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "indexer_head_dim": 32, "vocab_size": 160}
GDN, QSA = "linear_attention", "indexed_attention"
LANGUAGE = "model.language_model."

# (name, how it is stored, what differs from oracle.TINY); a prompt is budget + 2 tokens long unless `prompt` says so.
CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "no_ple_sharded": {"ple_layer_ids": [], "max_shard_bytes": 150_000, "prefix": LANGUAGE, "wrapped": True},
    "two_kv_heads": {"num_attention_heads": 4, "num_key_value_heads": 2, "experts": "split", "hc_count": 4},
    "budget_16": {**SMALL, "indexer_budget": 16, "prefix": LANGUAGE, "max_shard_bytes": 60_000},
    "budget_128": {**SMALL, "indexer_budget": 128, "layer_types": [GDN, GDN, QSA], "num_hidden_layers": 3},
    "budget_256": {
        **SMALL,
        "indexer_budget": 256,
        "layer_types": [GDN, QSA],
        "num_hidden_layers": 2,
        "ple_layer_ids": [1],
    },
    "biases": {**SMALL, "attention_bias": True, "num_key_value_heads": 2, "hc_count": 3, "hc_lowrank": 7},
    "gdn_one_key_head": {
        **SMALL,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 4,
        "linear_conv_kernel_dim": 3,
        "linear_value_head_dim": 16,
    },
    "sigmoid_top_3": {
        **SMALL,
        "output_gate_type": "sigmoid",
        "norm_topk_prob": False,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "linear_num_key_heads": 4,
    },
    "mrope": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.5,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "prefix": LANGUAGE,
        "wrapped": True,
        "hc_count": 4,
    },
    "two_ple_layers": {
        **SMALL,
        "ple_layer_ids": [1, 3],
        "ngram_size": 2,
        "ple_conv_kernel_size": 2,
        "ple_shards": 0,
        "max_shard_bytes": 100_000,
    },
    "four_grams": {
        **SMALL,
        "ngram_size": 4,
        "heads_per_ngram": 2,
        "ple_embed_dim": 36,
        "ple_conv_kernel_size": 3,
        "ple_shards": 5,
        "eos_token_id": [5, 7],
    },
    "tied": {**SMALL, "tie_word_embeddings": True, "num_experts_per_tok": 1, "mtp": False},
    "qsa_first": {
        **SMALL,
        "layer_types": ["full_attention", GDN, "full_attention"],
        "num_hidden_layers": 3,
        "indexer_n_heads": 4,
        "indexer_budget": 32,
        "ple_layer_ids": [2],
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    "many_experts": {**SMALL, "num_experts": 40, "num_experts_per_tok": 6, "moe_intermediate_size": 16, "hc_count": 4},
}


def _case(checkpoints: Checkpoints, name: str) -> tuple[Path, list[int]]:
    """The checkpoint and a prompt of budget + 50 tokens, eos among them."""
    number = list(CONFIGS).index(name)
    folder = checkpoints(f"config_{name}", seed=100 + number, **CONFIGS[name])
    config = oracle.read_config(folder)
    rng = random.Random(number)
    return folder, [rng.randrange(1, config.vocab_size // 4) for _ in range(config.indexer_budget + 50)]


def _gap(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max())


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_whole_ragged_and_one_by_one(checkpoints: Checkpoints, name: str, rng: random.Random) -> None:
    folder, ids = _case(checkpoints, name)
    want = oracle.oracle_logits(folder, ids)
    assert want.std() > 0.3  # logits that say something
    lane = Lane(folder)
    for chunks in ([len(ids)], ragged(len(ids), rng), [len(ids) - 60] + [1] * 60):
        sequence = lane.add(capacity=len(ids))
        assert _gap(lane.run(sequence, ids, chunks), want) <= 1e-4, chunks
        lane.free(sequence)


@pytest.mark.parametrize("name", CONFIGS)
def test_64_greedy_tokens_across_the_budget(checkpoints: Checkpoints, name: str) -> None:
    folder, ids = _case(checkpoints, name)
    prompt = ids[:-48]  # budget + 2 tokens: nothing is pruned yet, two tokens later something is
    lane = Lane(folder)
    sequence = lane.add(capacity=len(prompt) + 64)
    last = lane.run(sequence, prompt, [len(prompt)])[-1]
    assert lane.greedy(sequence, last, 64) == oracle.oracle_greedy(folder, prompt, 64)


@pytest.mark.parametrize("name", ["tiny", "budget_16", "four_grams", "two_ple_layers"])
def test_interleaved_requests(checkpoints: Checkpoints, name: str, rng: random.Random) -> None:
    """Several requests in one step, prefill chunks beside decode rows, in any order."""
    folder, ids = _case(checkpoints, name)
    prompts = [ids[:70], ids[3:20], ids[10:11] + ids[30:64], ids[5:45]]
    wants = [oracle.oracle_logits(folder, prompt) for prompt in prompts]
    lane = Lane(folder)
    sequences = [lane.add(capacity=80) for _ in prompts]
    while any(s.done < len(p) for s, p in zip(sequences, prompts, strict=True)):
        active = [i for i, s in enumerate(sequences) if s.done < len(prompts[i])]
        active = rng.sample(active, rng.randint(1, len(active)))
        starts = [sequences[i].done for i in active]
        sizes = [rng.choice((1, 1, 2, 4, 9, 30)) for _ in active]
        parts = [(sequences[i], prompts[i][a : a + n]) for i, a, n in zip(active, starts, sizes, strict=True)]
        for i, a, logits in zip(active, starts, lane.step(parts), strict=True):
            assert _gap(logits, wants[i][a : a + len(logits)]) <= 1e-4


def test_b05_dense_up_to_67_tokens_and_sparse_from_68(tiny: Path, checkpoints: Checkpoints, rng: random.Random) -> None:
    """Budget 64: up to 67 visible tokens nothing is pruned. The dense oracle is the same weights with a huge budget."""
    dense = checkpoints("tiny_dense", seed=1, indexer_budget=4096)
    for name in (tensors := oracle.read_tensors(tiny)):
        assert torch.equal(tensors[name], oracle.read_tensors(dense)[name])
    ids = [rng.randrange(3, 250) for _ in range(70)]
    want, sparse = oracle.oracle_logits(dense, ids), oracle.oracle_logits(tiny, ids)
    lane = Lane(tiny)
    for length in range(63, 71):
        sequence = lane.add(capacity=length)
        got = lane.run(sequence, ids[:length], [length])[-1]
        lane.free(sequence)
        assert _gap(got, sparse[length - 1]) <= 1e-4
        assert (_gap(got, want[length - 1]) <= 1e-4) == (length <= 67), length


def test_b05_reused_pages_hold_no_old_index_keys(tiny: Path, rng: random.Random) -> None:
    """A long request, then a second one on its pages, decoding above the budget: as on a fresh arena."""
    lane = Lane(tiny, tokens=224, states=1)
    old = lane.add(capacity=208)
    lane.run(old, [rng.randrange(3, 250) for _ in range(200)], [200])
    lane.free(old)
    ids = [rng.randrange(3, 250) for _ in range(120)]
    new = lane.add(capacity=128)
    assert set(new.pages) & set(old.pages)
    assert _gap(lane.run(new, ids, [90] + [1] * 30), oracle.oracle_logits(tiny, ids)) <= 1e-4


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0xFF])
def test_any_poison_byte_gives_the_same_bits(tiny: Path, byte: int) -> None:
    ids = [3 + (7 * i) % 240 for i in range(90)]
    lane, reference = Lane(tiny, byte=byte), Lane(tiny, byte=0x55)
    chunks = [50, 9, 1, 30]
    assert torch.equal(lane.run(lane.add(), ids, chunks), reference.run(reference.add(), ids, chunks))


def test_page_0_is_never_written(tiny: Path) -> None:
    lane = Lane(tiny)
    lane.run(lane.add(), list(range(3, 80)), [40, 1, 36])
    assert bool((lane.arena.bytes[: lane.arena.layout.page_bytes] == lane.byte).all())


def test_every_tensor_is_loaded_or_ignored_by_name(checkpoints: Checkpoints) -> None:
    folder, _ = _case(checkpoints, "no_ple_sharded")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    report = Lane(folder).model.load_report
    assert sorted(report.loaded) == sorted(index["weight_map"])
    assert report.ignored == ()

"""Small parts against transformers' modules or plain arithmetic."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from tests import oracle
from transformers.models.qwen4_exp import modeling_qwen4_exp as hf

from page4.geometry import Geometry
from page4.model.batch import RowSpan, StepBatch
from page4.model.groups import make_groups
from page4.model.linear import Linear
from page4.model.moe import Moe
from page4.model.norms import rms_norm, unit_norm
from page4.model.rope import Rope, rotate_
from page4.model.weight_tree import MoeWeights


@pytest.fixture
def geometry(tiny: Path) -> Geometry:
    return Geometry.from_folder(tiny)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_with_groups(generator: torch.Generator, dtype: torch.dtype) -> None:
    module = hf.Qwen4ExpTextRMSNorm(96, group_size=32, eps=1e-6).to(dtype)
    with torch.no_grad():
        module.weight.copy_(torch.randn(96, generator=generator))
    x = (3 * torch.randn(5, 96, generator=generator)).to(dtype)
    got = rms_norm(x.view(5, 3, 32), 1 + module.weight.float().view(3, 32), 1e-6).flatten(1)
    torch.testing.assert_close(got, module(x), rtol=1e-6 if dtype is torch.float32 else 1e-2, atol=1e-6)


def test_norms_of_zeros_are_zeros() -> None:
    assert rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).eq(0).all()
    assert unit_norm(torch.zeros(2, 8)).eq(0).all()


def test_unit_norm(generator: torch.Generator) -> None:
    x = torch.randn(3, 4, 16, generator=generator) * 1e-3  # small: the epsilon matters
    torch.testing.assert_close(unit_norm(x), hf.l2norm(x))


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0])
def test_rope_at_far_positions(geometry: Geometry, generator: torch.Generator, factor: float) -> None:
    config = oracle.make_config(
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": factor}
    )
    positions = torch.tensor([0, 1, 66, 4095, 200_000])
    x = torch.randn(5, 3, 64, generator=generator)
    cos, sin = hf.Qwen4ExpTextRotaryEmbedding(config)(x, positions.view(1, 1, -1).expand(3, 1, -1))
    want = hf.apply_rotary_pos_emb(x[None], cos=cos, sin=sin, unsqueeze_dim=2)[0]
    ours = Rope(dataclasses.replace(geometry, rotary_dim=int(64 * factor), rope_theta=1e7), torch.float32, "cpu")
    torch.testing.assert_close(rotate_(x.clone(), *ours.cos_sin(positions)), want, rtol=0, atol=1e-6)


def _moe(geometry: Geometry, generator: torch.Generator, experts: int, top_k: int) -> tuple[Moe, MoeWeights]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    weights = MoeWeights(
        normal(experts + 1, 48), normal(experts, 40, 48), normal(experts, 48, 20), normal(24, 48), normal(48, 12)
    )
    moe = dataclasses.replace(geometry.moe, num_experts=experts, top_k=top_k, intermediate=20, shared_intermediate=12)
    return Moe(weights, dataclasses.replace(geometry, hidden_size=48, moe=moe)), weights


@pytest.mark.parametrize("rows", [1, 5, 64, 65, 130])
@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (8, 2), (3, 3), (40, 3)])
def test_moe_equals_transformers(
    geometry: Geometry, generator: torch.Generator, rows: int, experts: int, top_k: int
) -> None:
    moe, weights = _moe(geometry, generator, experts, top_k)
    config = oracle.make_config(
        hidden_size=48,
        num_experts=experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=12,
        ple_layer_ids=[],
    )
    block = hf.Qwen4ExpTextSparseMoeBlock(config)
    shared_gate, shared_up = weights.shared_gate_up.chunk(2)
    block.load_state_dict(
        {
            "gate.weight": weights.router[:-1],
            "shared_expert_gate.weight": weights.router[-1:],
            "experts.gate_up_proj": weights.gate_up,
            "experts.down_proj": weights.down,
            "shared_expert.gate_proj.weight": shared_gate,
            "shared_expert.up_proj.weight": shared_up,
            "shared_expert.down_proj.weight": weights.shared_down,
        }
    )
    x = torch.randn(rows, 48, generator=generator)
    with torch.no_grad():
        torch.testing.assert_close(moe.forward(x), block(x[None])[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("rows", [3, 100])
def test_an_unchosen_expert_cannot_inject_nan(geometry: Geometry, generator: torch.Generator, rows: int) -> None:
    moe, weights = _moe(geometry, generator, 4, 2)
    x = torch.randn(rows, 48, generator=generator)
    chosen = moe._route(x @ weights.router[:-1].T)[1]
    bad = 3
    keep = (chosen != bad).all(1)
    assert 0 < int(keep.sum()) < rows or rows == 3
    want = moe.forward(x)[keep]
    weights.gate_up[bad] = torch.inf
    dirty = Moe(weights, dataclasses.replace(geometry, hidden_size=48, moe=_sizes(geometry)))
    torch.testing.assert_close(dirty.forward(x)[keep], want, rtol=0, atol=1e-6)


def _sizes(geometry: Geometry) -> object:
    return dataclasses.replace(geometry.moe, num_experts=4, top_k=2, intermediate=20, shared_intermediate=12)


@pytest.mark.parametrize("shape", [(400, 300), (1200, 96), (64, 64), (20, 6000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_products(generator: torch.Generator, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape, generator=generator).to(dtype)
    bias = torch.randn(shape[0], generator=generator).to(dtype)
    for rows in ((3,), (2, 5), (70,)):
        x = torch.randn(*rows, shape[1], generator=generator).to(dtype)
        want = x.double() @ weight.double().T + bias.double()
        tolerance = 1e-3 if dtype is torch.float32 else float(want.abs().max()) * 2**-7
        torch.testing.assert_close(Linear(weight, bias)(x).double(), want, rtol=0, atol=tolerance)


def test_groups_cover_every_row_once(rng: random.Random) -> None:
    for _ in range(50):
        lengths = [rng.choice((1, 1, 2, 4, 16, 17, 40)) for _ in range(rng.randint(1, 7))]
        starts = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
        slots = rng.sample(range(1, 30), len(lengths))
        groups = make_groups(tuple(starts), tuple(slots), torch.device("cpu"))
        x, out = torch.arange(starts[-1]), torch.full((starts[-1],), -1)
        state = torch.arange(100, 130)
        for group in groups:
            rows = group.gather(x)
            assert rows.shape == (len(group.requests), group.width)
            for n, request in enumerate(group.requests):
                assert rows[n, : lengths[request]].tolist() == list(range(starts[request], starts[request + 1]))
                assert int(group.read(state)[n]) == 100 + slots[request]
            group.scatter(out, rows)
        assert torch.equal(out, x)


def test_batch_fields(geometry: Geometry) -> None:
    spans = [RowSpan([5, 6, 7], 10, [4, 9], 3, [1, 2]), RowSpan([8], 0, [6], 5)]
    batch = StepBatch.build(spans, geometry)
    assert batch.token_ids.tolist() == [5, 6, 7, 8]
    assert batch.rows.positions.tolist() == [10, 11, 12, 0]
    assert batch.rows.request_of_row.tolist() == [0, 0, 0, 1]
    assert batch.rows.block_table.tolist() == [[4, 9], [6, 0]]
    assert (batch.row_starts, batch.rows.first_positions, batch.slots) == ((0, 3, 4), (10, 0), (3, 5))
    assert batch.ngram_context.tolist() == [[1, 2], [2, 2]]  # eos (2) before the start

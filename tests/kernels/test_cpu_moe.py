"""Compiled routing and activation against float64, and what must hold where numbers end."""

from __future__ import annotations

import math

import pytest
import torch
from tests.kernels.cpu_cases import assert_close, assert_threads_agree, needs_compiler, same_bits
from torch import Tensor

from page4.kernels import cpu

pytestmark = [needs_compiler, pytest.mark.usefixtures("one_thread")]
WIDTH, SHARED = 32, 48


def route(logits: list[float], chosen: int, normalise: bool) -> list[float]:
    """The weight of every expert: softmax, the largest `chosen` of them, the lower id first among equals."""
    top = max(logits)
    powers = [math.exp(x - top) for x in logits]
    weights = [p / sum(powers) for p in powers]
    best = sorted(range(len(logits)), key=lambda e: (-logits[e], e))[:chosen]
    kept = sum(weights[e] for e in best) if normalise else 1.0
    return [weights[e] / kept if e in best else 0.0 for e in range(len(logits))]


def expected(projected: Tensor, experts: int, chosen: int, normalise: bool, width: int, shared: int) -> Tensor:
    """[R, 2 * inner + experts + 1] -> [R, inner] in float64; what has no weight is zero."""
    inner = experts * width + shared
    gate, up, logits = projected.double().split((inner, inner, experts + 1), 1)
    weights = torch.tensor([route(row[:experts], chosen, normalise) for row in logits.tolist()], dtype=torch.float64)
    wide = torch.cat((weights.repeat_interleave(width, 1), logits[:, experts:].sigmoid().expand(-1, shared)), 1)
    return torch.where(wide == 0, 0.0, gate * gate.sigmoid() * up * wide)


def activate(projected: Tensor, experts: int, chosen: int, normalise: bool = True) -> Tensor:
    inner = experts * WIDTH + SHARED
    return cpu.Moe(experts, chosen, WIDTH, inner, normalise).activate(projected)


def draw(generator: torch.Generator, rows: int, experts: int, width: int = WIDTH, shared: int = SHARED) -> Tensor:
    return torch.randn(rows, 2 * (experts * width + shared) + experts + 1, generator=generator) * 2


def router(projected: Tensor, experts: int) -> Tensor:
    """A view of the router's logits."""
    return projected[:, -experts - 1 : -1]


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(("width", "shared"), [(16, 16), (48, 32), (16, 80)])
@pytest.mark.parametrize(("experts", "chosen"), [(1, 1), (4, 2), (8, 8), (16, 4), (33, 10)])
@pytest.mark.parametrize("rows", [0, 1, 8, 9, 40])
def test_activation_equals_the_formula(
    generator: torch.Generator, rows: int, experts: int, chosen: int, width: int, shared: int, normalise: bool
) -> None:
    projected, inner = draw(generator, rows, experts, width, shared), experts * width + shared
    before = projected.clone()
    got = cpu.Moe(experts, chosen, width, inner, normalise).activate(projected)
    assert same_bits(projected, before)
    if rows:
        assert_close(got, expected(projected, experts, chosen, normalise, width, shared), 3e-6)
        weighed = got[:, : experts * width].view(rows, experts, width).abs().sum(-1) > 0
        assert weighed.sum(1).tolist() == [chosen] * rows


@pytest.mark.parametrize("chosen", [1, 2, 3, 5])
def test_equal_logits_choose_the_lower_id(generator: torch.Generator, chosen: int) -> None:
    projected = draw(generator, 4, 6)
    router(projected, 6)[:] = torch.tensor(
        [[0.0] * 6, [1, 2, 2, 1, 2, 1], [-3, 5, -3, -3, -3, 5], [0.0, -0.0, 0.0, -0.0, 0.0, -0.0]]
    )
    got = activate(projected, 6, chosen)
    assert_close(got, expected(projected, 6, chosen, True, WIDTH, SHARED), 3e-6)
    weighed = got[0, : 6 * WIDTH].view(6, WIDTH).abs().sum(1) > 0
    assert weighed.tolist() == [e < chosen for e in range(6)]


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf, -math.inf])
def test_an_unchosen_expert_is_not_looked_at(generator: torch.Generator, poison: float, normalise: bool) -> None:
    projected = draw(generator, 3, 8)
    clean = activate(projected, 8, 2, normalise)
    unchosen = [e for e in range(8) if not clean[1, e * WIDTH : (e + 1) * WIDTH].any()]
    assert len(unchosen) == 6
    inner = 8 * WIDTH + SHARED
    for expert in unchosen:
        for half in (0, inner):
            projected[1, half + expert * WIDTH : half + (expert + 1) * WIDTH] = poison
    assert same_bits(activate(projected, 8, 2, normalise), clean)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("where", [0, 3, 7])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_router_without_numbers_gives_nan(
    generator: torch.Generator, poison: float, where: int, normalise: bool
) -> None:
    projected = draw(generator, 3, 8)
    clean = activate(projected, 8, 2, normalise)
    router(projected, 8)[1, where] = poison
    got = activate(projected, 8, 2, normalise)
    assert bool(got[1, : 8 * WIDTH].isnan().all())
    assert same_bits(got[1, 8 * WIDTH :], clean[1, 8 * WIDTH :]), "the shared expert has its own gate"
    assert same_bits(got[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("normalise", [False, True])
def test_a_router_of_minus_infinity_gives_nan(generator: torch.Generator, normalise: bool) -> None:
    projected = draw(generator, 2, 4)
    router(projected, 4)[0] = -math.inf
    assert bool(activate(projected, 4, 2, normalise)[0, : 4 * WIDTH].isnan().all()), "as softmax does"


def test_minus_infinity_beside_numbers_is_never_the_better_choice(generator: torch.Generator) -> None:
    projected = draw(generator, 2, 4)
    router(projected, 4)[0] = torch.tensor([-math.inf, 1.0, -math.inf, 0.0])
    assert_close(activate(projected, 4, 2), expected(projected, 4, 2, True, WIDTH, SHARED), 3e-6)


def test_a_shared_gate_of_nan_gives_nan_in_the_shared_part_alone(generator: torch.Generator) -> None:
    projected = draw(generator, 2, 4)
    clean = activate(projected, 4, 2)
    projected[0, -1] = math.nan
    got = activate(projected, 4, 2)
    assert bool(got[0, 4 * WIDTH :].isnan().all())
    assert same_bits(got[0, : 4 * WIDTH], clean[0, : 4 * WIDTH])


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("gap", [80.0, 100.0, 104.0, 1000.0, 3e38])
def test_probabilities_that_underflow(generator: torch.Generator, gap: float, normalise: bool) -> None:
    projected = draw(generator, 2, 6)
    logits = router(projected, 6)
    logits[0] = torch.tensor([-gap, -gap, 3.0, -gap, -gap, -gap])
    logits[1] = torch.tensor([gap, -gap, gap, -gap, 0.0, 0.0])
    got = activate(projected, 6, 4, normalise)
    assert_close(got, expected(projected, 6, 4, normalise, WIDTH, SHARED), 3e-6)


@pytest.mark.parametrize("value", [-1e4, -104.0, -89.0, -88.0, -87.0, 87.0, 88.7, 89.0, 1e4])
def test_gates_that_saturate(generator: torch.Generator, value: float) -> None:
    projected = draw(generator, 3, 4)
    projected[:, : 4 * WIDTH + SHARED] = value
    projected[1, -1] = value
    assert_close(activate(projected, 4, 3), expected(projected, 4, 3, True, WIDTH, SHARED), 3e-6)


def test_rows_and_threads_change_no_bit(generator: torch.Generator) -> None:
    projected = draw(generator, 37, 8)
    assert_threads_agree(lambda: [activate(projected, 8, 2)])
    together = activate(projected, 8, 2)
    for row in range(37):
        assert same_bits(activate(projected[row : row + 1].clone(), 8, 2), together[row : row + 1])

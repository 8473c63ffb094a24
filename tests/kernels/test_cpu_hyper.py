"""Compiled hyper-connections against their formula in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from tests.kernels.cpu_cases import assert_close, assert_threads_agree, needs_compiler, same_bits
from torch import Tensor

from page4.kernels import cpu
from page4.model.hyper import Mixer

pytestmark = [needs_compiler, pytest.mark.usefixtures("one_thread")]
EPS = 1e-6


@dataclass
class Weights:
    norm: Tensor
    down: Tensor
    up: Tensor

    @classmethod
    def draw(cls, generator: torch.Generator, count: int, hidden: int, rank: int, injections: int) -> Weights:
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        width = count * hidden
        norm = (1 + normal(count, hidden) * 0.3) / count
        return cls(norm, normal(rank + injections, width) * (4 / width**0.5), normal(width, rank) / rank**0.5)

    def kernel(self) -> cpu.Hyper:
        return cpu.Hyper(self.norm, self.down, self.up, EPS)

    def enter(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """float64: mixed [R, hidden], injection weights [R, injections, 1]."""
        normed = streams * (streams.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.norm.double()
        low, rank = normed.flatten(1) @ self.down.double().T, self.up.shape[1]
        weight = (low[:, :rank] * low[:, :rank].sigmoid()) @ self.up.double().T
        return (weight.sigmoid().view_as(normed) * normed).sum(1), low[:, rank:].sigmoid().unsqueeze(-1)


SHAPES = [(1, 16, 1), (1, 48, 3), (2, 64, 8), (3, 80, 17), (4, 96, 24), (5, 16, 40), (4, 256, 33)]


@pytest.mark.parametrize("with_injections", [False, True])
@pytest.mark.parametrize(("count", "hidden", "rank"), SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 40])
def test_enter_equals_the_formula(
    generator: torch.Generator, rows: int, count: int, hidden: int, rank: int, with_injections: bool
) -> None:
    weights = Weights.draw(generator, count, hidden, rank, count if with_injections else 0)
    streams = torch.randn(rows, count, hidden, generator=generator) * 3
    before = streams.clone()
    mixed, injection = weights.kernel().enter(streams)
    assert same_bits(streams, before), "entering alone changes no stream"
    want_mixed, want_injection = weights.enter(streams.double())
    assert injection.shape == want_injection.shape
    assert_close(mixed, want_mixed, 5e-6)
    assert_close(injection, want_injection, 5e-6)


@pytest.mark.parametrize(("count", "hidden", "rank"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 33])
def test_leave_and_pass_on_add_the_block_twice_its_weight(
    generator: torch.Generator, rows: int, count: int, hidden: int, rank: int
) -> None:
    # The last mixer has no injection weights of its own, and still takes those of the block before it.
    for injections in (0, count):
        weights = Weights.draw(generator, count, hidden, rank, injections)
        streams = torch.randn(rows, count, hidden, generator=generator)
        block_out = torch.randn(rows, hidden, generator=generator)
        injection = torch.rand(rows, count, 1, generator=generator)
        want = streams.double() + 2 * injection.double() * block_out.double().unsqueeze(1)
        kernel = weights.kernel()
        left = cpu.leave(streams.clone(), block_out, injection)
        assert_close(left, want, 1e-6)
        passed = streams.clone()
        found = kernel.enter(passed, block_out, injection)
        assert same_bits(passed, left)
        assert all(same_bits(*pair) for pair in zip(found, kernel.enter(left), strict=True))
        for got, value in zip(found, weights.enter(want), strict=True):
            assert_close(got, value, 5e-6)


def test_leave_changes_the_given_streams_and_returns_them(generator: torch.Generator) -> None:
    streams = torch.randn(3, 2, 32, generator=generator)
    assert cpu.leave(streams, torch.ones(3, 32), torch.ones(3, 2, 1)).data_ptr() == streams.data_ptr()


@pytest.mark.parametrize("magnitude", [0.0, 1e-18, 1e-4, 1e4, 1e17])
def test_streams_of_any_size(generator: torch.Generator, magnitude: float) -> None:
    weights = Weights.draw(generator, 4, 64, 16, 4)
    streams = torch.randn(5, 4, 64, generator=generator) * magnitude
    for got, want in zip(weights.kernel().enter(streams), weights.enter(streams.double()), strict=True):
        assert_close(got, want, 5e-6)


@pytest.mark.parametrize("scale", [30.0, 3000.0])
def test_saturated_weights(generator: torch.Generator, scale: float) -> None:
    weights = Weights.draw(generator, 2, 32, 8, 2)
    weights.down *= scale
    mixed, injection = weights.kernel().enter(streams := torch.randn(9, 2, 32, generator=generator))
    want_mixed, want_injection = weights.enter(streams.double())
    assert bool(mixed.isfinite().all()) and bool(injection.isfinite().all())
    # The weights are steep here: an error of fp32's size before a sigmoid is `scale` times that in it.
    assert_close(mixed, want_mixed, 1e-6 * scale)
    assert_close(injection, want_injection, 1e-6 * scale)


def test_a_mixer_takes_a_view_of_wider_rows(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGE4_KERNELS", "auto")
    weights = Weights.draw(generator, 2, 32, 8, 0)
    wide = torch.randn(5, 80, generator=generator)
    mixer = Mixer.__new__(Mixer)
    mixer.kernel = weights.kernel()
    mixed = mixer.mix(wide[:, :64].view(5, 2, 32))
    assert_close(mixed, weights.enter(wide[:, :64].double().view(5, 2, 32))[0], 5e-6)


def test_a_row_of_nan_stays_alone(generator: torch.Generator) -> None:
    kernel = Weights.draw(generator, 3, 48, 5, 3).kernel()
    streams = torch.randn(6, 3, 48, generator=generator)
    clean = [x.clone() for x in kernel.enter(streams)]
    streams[2, 1, 7] = torch.nan
    for got, want in zip(kernel.enter(streams), clean, strict=True):
        assert bool(got[2].isnan().any())
        others = [0, 1, 3, 4, 5]
        assert same_bits(got[others], want[others])


def test_rows_and_threads_change_no_bit(generator: torch.Generator) -> None:
    kernel = Weights.draw(generator, 4, 96, 24, 4).kernel()
    streams = torch.randn(21, 4, 96, generator=generator)
    block_out, injection = torch.randn(21, 96, generator=generator), torch.rand(21, 4, 1, generator=generator)

    def run() -> list[Tensor]:
        own = streams.clone()
        return [*kernel.enter(own, block_out, injection), own]

    assert_threads_agree(run)
    together = run()
    for row in range(21):
        one = slice(row, row + 1)
        alone = streams[one].clone()
        found = [*kernel.enter(alone, block_out[one].clone(), injection[one].clone()), alone]
        assert all(same_bits(got, want[one]) for got, want in zip(found, together, strict=True))

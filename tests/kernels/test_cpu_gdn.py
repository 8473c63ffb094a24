"""Compiled GDN windows and their commit against the recurrence, row by row, in float64."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.cpu_cases import assert_close, assert_threads_agree, needs_compiler, same_bits
from torch import Tensor

from page4.kernels import cpu

pytestmark = [needs_compiler, pytest.mark.usefixtures("one_thread")]
EPS = 1e-6
POISON = 0x7F


@dataclass
class States:
    """Strided views of one storage whose other bytes are poison: recurrent and conv state of some slots."""

    flat: Tensor
    recurrent: Tensor
    conv: Tensor

    def copy(self) -> States:
        flat = self.flat.clone()
        recurrent, conv = (
            flat.as_strided(x.shape, x.stride(), x.storage_offset()) for x in (self.recurrent, self.conv)
        )
        return States(flat, recurrent, conv)


@dataclass
class Layer:
    """Random weights of one layer; the window's rows are those of `spans`, (rows, slot) of each request."""

    heads: tuple[int, int]
    dims: tuple[int, int]
    kernel_size: int
    silu_gate: bool
    conv: Tensor
    rate: Tensor
    dt_bias: Tensor
    norm: Tensor

    @classmethod
    def draw(
        cls,
        generator: torch.Generator,
        heads: tuple[int, int] = (1, 2),
        dims: tuple[int, int] = (16, 16),
        kernel_size: int = 4,
        silu_gate: bool = True,
        decay: float = 1.0,
    ) -> Layer:
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        conv_dim = 2 * heads[0] * dims[0] + heads[1] * dims[1]
        rate = -decay * torch.rand(heads[1], generator=generator)
        conv = normal(conv_dim, kernel_size)
        return cls(heads, dims, kernel_size, silu_gate, conv, rate, normal(heads[1]), 1 + normal(dims[1]) / 3)

    def kernel(self) -> cpu.Gdn:
        tensors = (self.conv, self.rate, self.dt_bias, self.norm)
        return cpu.Gdn(*tensors, heads=self.heads, dims=self.dims, silu_gate=self.silu_gate, eps=EPS)

    def rows(self, generator: torch.Generator, count: int) -> Tensor:
        width = len(self.conv) + self.heads[1] * self.dims[1] + 2 * self.heads[1]
        return torch.randn(count, width, generator=generator)

    def states(self, generator: torch.Generator, slots: int) -> States:
        """Slot 0 and all gaps are poison."""
        one = (self.heads[1] * self.dims[0] * self.dims[1], len(self.conv) * (self.kernel_size - 1))
        stride = 5 + one[0] + 3 + one[1] + 7
        flat = torch.full((4 * (slots * stride + 11),), POISON, dtype=torch.uint8).view(torch.float32)
        recurrent = flat.as_strided(
            (slots, self.heads[1], *self.dims), (stride, self.dims[0] * self.dims[1], self.dims[1], 1), 5
        )
        keep = self.kernel_size - 1
        conv = flat.as_strided((slots, len(self.conv), keep), (stride, keep, 1), 5 + one[0] + 3)
        for view in (recurrent, conv):
            view[1:] = torch.randn(view[1:].shape, generator=generator)
        return States(flat, recurrent, conv)

    def expected(self, rows: Tensor, recurrent: Tensor, conv: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """One request in float64: heads [W, Hv * Dv], recurrent and conv state after 0, 1 .. W rows."""
        (hk, hv), (dk, dv) = self.heads, self.dims
        qkv, z, b, a = rows.double().split((len(self.conv), hv * dv, hv, hv), 1)
        keep = self.kernel_size - 1
        inputs = torch.cat((conv.double().T, qkv))
        state, states, convs, outs = recurrent.double(), [recurrent.double()], [inputs[:keep].T], []
        for t in range(len(rows)):
            mixed = (inputs[t : t + self.kernel_size].T * self.conv.double()).sum(1)
            q, k, v = (mixed * mixed.sigmoid()).split((hk * dk, hk * dk, hv * dv))
            q, k = (
                (x / (x.square().sum(1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(hv // hk, 0)
                for x in (q.view(hk, dk), k.view(hk, dk))
            )
            decay = (self.rate.double() * torch.nn.functional.softplus(a[t] + self.dt_bias.double())).exp()
            state = state * decay.view(hv, 1, 1)
            update = b[t].sigmoid().unsqueeze(1) * (v.view(hv, dv) - torch.einsum("hkv,hk->hv", state, k))
            state = state + torch.einsum("hk,hv->hkv", k, update)
            out = torch.einsum("hkv,hk->hv", state, q / dk**0.5)
            gate = z[t].view(hv, dv)
            gate = gate * gate.sigmoid() if self.silu_gate else gate.sigmoid()
            outs.append(
                (out * (out.square().mean(1, keepdim=True) + EPS).rsqrt() * self.norm.double() * gate).flatten()
            )
            states.append(state)
            convs.append(inputs[t + 1 : t + 1 + keep].T)
        return torch.stack(outs), states, convs


def spans_of(lengths: list[int], slots: list[int]) -> Tensor:
    first, spans = 0, []
    for length, slot in zip(lengths, slots, strict=True):
        spans.append((first, length, slot, 0))
        first += length
    return torch.tensor(spans, dtype=torch.int64).view(-1, 4)


def check(
    layer: Layer, generator: torch.Generator, lengths: list[int], slots: list[int], accepted: list[int] | None
) -> None:
    """Windows of several requests, and their commit (None: of every count)."""
    states = layer.states(generator, max(slots) + 3)
    rows, spans, kernel = layer.rows(generator, sum(lengths)), spans_of(lengths, slots), layer.kernel()
    before = states.copy()
    heads, kept = kernel.window(rows, spans, states.recurrent, states.conv)
    assert same_bits(states.flat, before.flat), "a window alone writes no state"
    want = [
        layer.expected(part, before.recurrent[slot], before.conv[slot])
        for part, slot in zip(rows.split(lengths), slots, strict=True)
    ]
    assert_close(heads, torch.cat([outs for outs, _, _ in want]), 3e-4)
    every = [[min(count, n) for n in lengths] for count in range(max(lengths) + 1)] if accepted is None else [accepted]
    for counts in every:
        after = before.copy()
        kernel.commit(rows, kept, spans, torch.tensor(counts), after.recurrent, after.conv)
        rest = after.copy()
        for slot, count, (_, recurrent, conv) in zip(slots, counts, want, strict=True):
            assert_close(after.recurrent[slot], recurrent[count], 5e-5)
            assert same_bits(after.conv[slot], conv[count].float())
            if not count:
                assert same_bits(after.recurrent[slot], before.recurrent[slot])
            rest.recurrent[slot], rest.conv[slot] = before.recurrent[slot], before.conv[slot]
        assert same_bits(rest.flat, before.flat), "nothing but the states of these slots is written"


@pytest.mark.parametrize("silu_gate", [False, True])
@pytest.mark.parametrize("kernel_size", [2, 3, 4])
@pytest.mark.parametrize(
    ("heads", "dims"), [((1, 1), (16, 16)), ((2, 4), (16, 48)), ((1, 3), (48, 32)), ((2, 6), (32, 80))]
)
def test_every_accepted_count(
    generator: torch.Generator, heads: tuple[int, int], dims: tuple[int, int], kernel_size: int, silu_gate: bool
) -> None:
    layer = Layer.draw(generator, heads, dims, kernel_size, silu_gate)
    check(layer, generator, [4, 1, 16, 2], [5, 2, 3, 9], None)


@pytest.mark.parametrize("width", range(1, 17))
def test_one_request_of_every_width(generator: torch.Generator, width: int) -> None:
    check(Layer.draw(generator, (2, 2), (32, 32)), generator, [width], [1], None)


@pytest.mark.parametrize("dims", [(128, 128), (64, 16), (16, 112)])
def test_wider_heads(generator: torch.Generator, dims: tuple[int, int]) -> None:
    check(Layer.draw(generator, (1, 2), dims), generator, [1, 5, 16], [4, 1, 2], [1, 3, 16])


@pytest.mark.parametrize("decay", [1e-4, 20.0, 200.0, 1e5])
def test_small_and_large_decay(generator: torch.Generator, decay: float) -> None:
    check(Layer.draw(generator, (2, 4), decay=decay), generator, [16, 3, 7], [2, 6, 1], None)


@pytest.mark.parametrize("a", [-200.0, -30.0, 19.9, 20.1, 90.0, 300.0])
def test_softplus_of_any_size(generator: torch.Generator, a: float) -> None:
    layer = Layer.draw(generator, (1, 2), decay=0.01)
    layer.dt_bias[:] = a
    check(layer, generator, [8, 2], [2, 1], None)


@settings(max_examples=30)
@given(data=st.data())
def test_any_ragged_windows(data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    key_heads = data.draw(st.integers(1, 2))
    lengths = data.draw(st.lists(st.integers(1, 16), min_size=1, max_size=6))
    slots = data.draw(st.permutations(range(1, 9)))[: len(lengths)]
    accepted = [data.draw(st.integers(0, length)) for length in lengths]
    heads = (key_heads, key_heads * data.draw(st.integers(1, 3)))
    layer = Layer.draw(generator, heads, (16, 16), data.draw(st.integers(2, 4)), data.draw(st.booleans()))
    check(layer, generator, lengths, slots, accepted)


def test_no_request(generator: torch.Generator) -> None:
    layer = Layer.draw(generator)
    states, kernel, spans = layer.states(generator, 2), layer.kernel(), torch.zeros(0, 4, dtype=torch.int64)
    before, rows = states.copy(), layer.rows(generator, 0)
    heads, kept = kernel.window(rows, spans, states.recurrent, states.conv)
    kernel.commit(rows, kept, spans, torch.zeros(0, dtype=torch.int64), states.recurrent, states.conv)
    assert heads.shape[0] == 0 and same_bits(states.flat, before.flat)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("accepted", [0, 1, 2, 4])
def test_a_rejected_row_reaches_nothing(generator: torch.Generator, accepted: int, poison: float) -> None:
    layer = Layer.draw(generator, (1, 2), (16, 32))
    states, kernel, spans = layer.states(generator, 4), layer.kernel(), spans_of([5, 2], [3, 1])
    rows, counts = layer.rows(generator, 7), torch.tensor([accepted, 2])
    results = []
    for value in (0.25, poison):
        rows[accepted:5] = value
        after = states.copy()
        heads, kept = kernel.window(rows, spans, after.recurrent, after.conv)
        kernel.commit(rows, kept, spans, counts, after.recurrent, after.conv)
        results.append((torch.cat((heads[:accepted], heads[5:])), after.flat))
    assert all(same_bits(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("other", [math.nan, math.inf])
def test_a_request_of_nan_stays_alone(generator: torch.Generator, other: float) -> None:
    layer = Layer.draw(generator, (1, 2), (16, 32))
    states, kernel, spans = layer.states(generator, 5), layer.kernel(), spans_of([3, 4, 2], [3, 1, 4])
    rows, counts = layer.rows(generator, 9), torch.tensor([3, 2, 2])
    results = []
    for value in (0.5, other):
        rows[3:7] = value
        after = states.copy()
        heads, kept = kernel.window(rows, spans, after.recurrent, after.conv)
        kernel.commit(rows, kept, spans, counts, after.recurrent, after.conv)
        results.append((torch.cat((heads[:3], heads[7:])), after.recurrent[[3, 4]], after.conv[[3, 4]]))
    assert all(same_bits(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0xFF])
def test_slot_0_is_never_written(generator: torch.Generator, byte: int) -> None:
    layer = Layer.draw(generator)
    states, kernel, spans = layer.states(generator, 4), layer.kernel(), spans_of([4, 2], [0, 2])
    for view in (states.recurrent[0], states.conv[0]):
        view[:] = torch.full((4 * view.numel(),), byte, dtype=torch.uint8).view(torch.float32).view_as(view)
    before, rows = states.copy(), layer.rows(generator, 6)
    _, kept = kernel.window(rows, spans, states.recurrent, states.conv)
    kernel.commit(rows, kept, spans, torch.tensor([3, 2]), states.recurrent, states.conv)
    changed = states.recurrent[2].clone(), states.conv[2].clone()
    states.recurrent[2], states.conv[2] = before.recurrent[2], before.conv[2]
    assert same_bits(states.flat, before.flat)
    _, recurrent, conv = layer.expected(rows[4:], before.recurrent[2], before.conv[2])
    assert_close(changed[0], recurrent[2], 5e-5)
    assert_close(changed[1], conv[2], 0.0)


def test_one_kernel_serves_two_arenas(generator: torch.Generator) -> None:
    """A window here, one there, then both commits: the strides are those of the views that a call is given."""
    layer = Layer.draw(generator)
    spans, kernel = spans_of([3], [2]), layer.kernel()
    narrow, rows = layer.states(generator, 4), layer.rows(generator, 3)
    recurrent, conv = torch.zeros(7, *narrow.recurrent.shape[1:]), torch.zeros(7, *narrow.conv.shape[1:])
    recurrent[2], conv[2] = narrow.recurrent[2], narrow.conv[2]
    _, kept = kernel.window(rows, spans, narrow.recurrent, narrow.conv)
    _, other = kernel.window(rows, spans, recurrent, conv)
    kernel.commit(rows, kept, spans, torch.tensor([3]), narrow.recurrent, narrow.conv)
    kernel.commit(rows, other, spans, torch.tensor([3]), recurrent, conv)
    assert same_bits(recurrent[2], narrow.recurrent[2]) and same_bits(conv[2], narrow.conv[2])
    assert not recurrent[[0, 1, 3, 4, 5, 6]].any()


def test_rows_and_threads_change_no_bit(generator: torch.Generator) -> None:
    layer = Layer.draw(generator, (2, 4), (32, 48))
    lengths, slots = [4, 1, 16, 2, 4], [2, 6, 1, 3, 5]
    states, kernel, rows = layer.states(generator, 8), layer.kernel(), layer.rows(generator, sum(lengths))
    spans, counts = spans_of(lengths, slots), [2, 1, 9, 0, 4]

    def run(rows: Tensor, spans: Tensor, counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        after = states.copy()
        heads, kept = kernel.window(rows, spans, after.recurrent, after.conv)
        kernel.commit(rows, kept, spans, torch.tensor(counts), after.recurrent, after.conv)
        return heads, after.recurrent, after.conv

    assert_threads_agree(lambda: run(rows, spans, counts))
    heads, recurrent, conv = run(rows, spans, counts)
    parts = zip(rows.split(lengths), heads.split(lengths), slots, counts, strict=True)
    for part, head, slot, count in parts:
        alone = run(part.clone(), spans_of([len(part)], [slot]), [count])
        assert same_bits(alone[0], head)
        assert same_bits(alone[1][slot], recurrent[slot]) and same_bits(alone[2][slot], conv[slot])


def test_a_row_does_not_depend_on_the_rows_after_it(generator: torch.Generator) -> None:
    layer = Layer.draw(generator, (1, 2), (32, 32))
    states, kernel, rows = layer.states(generator, 3), layer.kernel(), layer.rows(generator, 16)
    whole, _ = kernel.window(rows, spans_of([16], [2]), states.recurrent, states.conv)
    for width in range(1, 16):
        short, _ = kernel.window(rows[:width].clone(), spans_of([width], [2]), states.recurrent, states.conv)
        assert_close(short, whole[:width].double(), 1e-5)


def test_the_layer_drawn_is_the_layer_tested(generator: torch.Generator) -> None:
    """The oracle has teeth: another rate, gate or norm is seen."""
    layer = Layer.draw(generator)
    changes = {"rate": layer.rate * 1.1, "silu_gate": False, "norm": layer.norm * 1.01, "dt_bias": layer.dt_bias + 0.1}
    for name, value in changes.items():
        other = dataclasses.replace(layer, **{name: value})
        states, rows = layer.states(generator, 2), layer.rows(generator, 3)
        heads, _ = other.kernel().window(rows, spans_of([3], [1]), states.recurrent, states.conv)
        want, _, _ = layer.expected(rows, states.recurrent[1], states.conv[1])
        assert float((heads.double() - want).abs().max()) > 1e-3, name

"""The gated delta rule: window, chunks and row by row against a naive float64 recurrence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from page4.model import delta
from page4.model.delta import Accepted, DeltaWindow


def naive(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """One head, float64: q, k [T, Dk], v [T, Dv], g, beta [T], state [Dk, Dv] -> out [T, Dv], state after each row."""
    s, out, states = state.double().clone(), [], []
    for t in range(len(v)):
        s = s * g[t].double().exp()
        u = beta[t].double() * (v[t].double() - k[t].double() @ s)
        s = s + torch.outer(k[t].double(), u)
        out.append(q[t].double() @ s)
        states.append(s)
    return torch.stack(out), states


def delta_window(q: Tensor, k: Tensor, *rest: Tensor) -> tuple[Tensor, DeltaWindow]:
    return delta.delta_window(torch.cat((q, k), 2), *rest)


def delta_chunks(q: Tensor, k: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    *rows, state = rest
    state = state.clone()
    return delta.delta_chunks(torch.cat((q, k), 1), *rows, state), state


def advance(window: DeltaWindow, state: Tensor, counts: Tensor) -> Tensor:
    decay, update = delta.advance(window, Accepted.of(counts, window.log_decay.shape[-1]))
    return decay * state + update


def draw(generator: torch.Generator, n: int, t: int, hk: int, hv: int, dk: int = 16, dv: int = 8) -> list[Tensor]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, k = (torch.nn.functional.normalize(normal(n, hk, t, dk), dim=-1) for _ in range(2))
    g = -torch.rand(n, hv, t, generator=generator) * torch.tensor([0.01, 0.2, 2.0, 30.0]).repeat(hv)[:hv].view(1, hv, 1)
    beta = torch.rand(n, hv, t, generator=generator)
    return [q * dk**-0.5, k, normal(n, hv, t, dv), g, beta, normal(n, hv, dk, dv)]


@pytest.mark.parametrize(("hk", "hv"), [(1, 1), (2, 4), (3, 3)])
@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
def test_window_equals_the_naive_recurrence(generator: torch.Generator, hk: int, hv: int, width: int) -> None:
    q, k, v, g, beta, state = draw(generator, 3, width, hk, hv)
    before = state.clone()
    out, window = delta_window(q, k, v, g, beta, state)
    assert torch.equal(state, before)
    accepted = torch.tensor([0, width, width // 2])
    after = advance(window, state, accepted)
    for n in range(3):
        for h in range(hv):
            key = h // (hv // hk)
            want, states = naive(q[n, key], k[n, key], v[n, h], g[n, h], beta[n, h], state[n, h])
            torch.testing.assert_close(out[n, h].double(), want, rtol=0, atol=1e-5)
            a = int(accepted[n])
            torch.testing.assert_close(
                after[n, h].double(), states[a - 1] if a else state[n, h].double(), rtol=0, atol=1e-5
            )


@pytest.mark.parametrize("length", [17, 63, 64, 65, 130, 600])
def test_chunks_equal_the_naive_recurrence(generator: torch.Generator, length: int) -> None:
    q, k, v, g, beta, state = (x[0] for x in draw(generator, 1, length, 2, 4))
    rows = [x.transpose(0, 1) for x in (q, k, v, g, beta)]
    out, final = delta_chunks(*rows, state)
    for h in range(4):
        want, states = naive(q[h // 2], k[h // 2], v[h], g[h], beta[h], state[h])
        torch.testing.assert_close(out[:, h].double(), want, rtol=0, atol=2e-5)
        torch.testing.assert_close(final[h].double(), states[-1], rtol=0, atol=2e-5)


def test_windows_in_a_row_equal_one_chunk_and_single_rows(generator: torch.Generator) -> None:
    q, k, v, g, beta, state = draw(generator, 1, 48, 2, 2)
    want, final = delta_chunks(*(x[0].transpose(0, 1) for x in (q, k, v, g, beta)), state[0])
    for sizes in ([16, 16, 16], [1] * 48, [5, 1, 13, 16, 2, 11]):
        s, start, outs = state, 0, []
        for size in sizes:
            part = [x[:, :, start : start + size] for x in (q, k, v, g, beta)]
            out, window = delta_window(*part, s)
            outs.append(out)
            s = advance(window, s, torch.tensor([size]))
            start += size
        torch.testing.assert_close(torch.cat(outs, 2)[0].transpose(0, 1), want, rtol=0, atol=2e-5)
        torch.testing.assert_close(s[0], final, rtol=0, atol=2e-5)


def test_b30_scalar_states_after_each_accepted_row() -> None:
    """SCALAR-GDN: S <- S + 0.5 (v - S), window 8, 2, 6, 0: exactly 4, 3, 4.5, 2.25."""
    one, v = torch.ones(1, 1, 4, 1), torch.tensor([8.0, 2.0, 6.0, 0.0]).view(1, 1, 4, 1)
    g, beta, state = torch.zeros(1, 1, 4), torch.full((1, 1, 4), 0.5), torch.zeros(1, 1, 1, 1)
    out, window = delta_window(one, one, v, g, beta, state)
    assert out.flatten().tolist() == [4.0, 3.0, 4.5, 2.25]
    states = [float(advance(window, state, torch.tensor([a]))) for a in (0, 1, 2, 3, 4)]
    assert states == [0.0, 4.0, 3.0, 4.5, 2.25]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_rejected_rows_cannot_reach_the_state(generator: torch.Generator, bad: float) -> None:
    q, k, v, g, beta, state = draw(generator, 2, 4, 1, 2)
    accepted = torch.tensor([1, 2])
    _, window = delta_window(q, k, v, g, beta, state)
    want = advance(window, state, accepted)
    dirty = DeltaWindow(window.keys.clone(), window.updates.clone(), window.log_decay.clone())
    for n, a in enumerate(accepted.tolist()):
        dirty.keys[n, :, a:], dirty.updates[n, :, a:], dirty.log_decay[n, :, a:] = bad, bad, bad
    assert torch.equal(advance(dirty, state, accepted), want)


def test_strong_decay_does_not_overflow() -> None:
    """G_a - G_i of rows after a is positive and huge: it must not become inf * 0."""
    ones = torch.ones(1, 1, 8, 2)
    g = torch.full((1, 1, 8), -200.0)
    out, window = delta_window(ones, ones, ones, g, torch.ones(1, 1, 8), torch.ones(1, 1, 2, 2))
    assert out.isfinite().all()
    for a in range(9):
        assert advance(window, torch.ones(1, 1, 2, 2), torch.tensor([a])).isfinite().all()

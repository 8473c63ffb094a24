"""Counter-based random numbers."""

from __future__ import annotations

from itertools import pairwise

from page4.engine.chance import Purpose, SeedSource, child_seed, splitmix64, uniform


def test_splitmix64_gives_the_published_sequence() -> None:
    # First outputs of splitmix64 for seed 1234567, from the reference C program (state advances by the golden gamma).
    golden = 0x9E3779B97F4A7C15
    states = [(1234567 + i * golden) % 2**64 for i in range(5)]
    assert [splitmix64(s) for s in states] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip


def test_numbers_are_uniform_and_not_related_across_position_purpose_and_seed() -> None:
    n = 20000
    draws = [[uniform(s, p, q) for p in range(n)] for s in (1, 2) for q in (Purpose.TOKEN, Purpose.DRAFT)]
    for values in draws:
        assert all(0 <= v < 1 for v in values)
        assert abs(sum(values) / n - 0.5) < 4 * (1 / 12 / n) ** 0.5
        lag = sum((a - 0.5) * (b - 0.5) for a, b in pairwise(values)) / n
        assert abs(lag) < 4 / 12 / n**0.5
    for i, a in enumerate(draws):
        for b in draws[i + 1 :]:
            covariance = sum((x - 0.5) * (y - 0.5) for x, y in zip(a, b, strict=True)) / n
            assert abs(covariance) < 4 / 12 / n**0.5


def test_seeds_are_drawn_in_order_and_children_differ() -> None:
    source, again = SeedSource(5), SeedSource(5)
    first = [source.draw() for _ in range(100)]
    assert first == [again.draw() for _ in range(100)] and len(set(first)) == 100
    assert first[0] != SeedSource(6).draw()
    assert child_seed(9, 0) == 9 and len({child_seed(9, i) for i in range(50)}) == 50

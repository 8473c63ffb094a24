"""Integers behind the hashed n-gram embedding (PLE): prime table sizes, offsets, hash multipliers. No torch.

Facts are those of the `qwen4_exp` model of transformers: every head of every PLE layer has its own prime number of
rows, counted upward from `vocab_base`; multipliers are odd numbers drawn by splitmix64 so small that
token * multiplier stays within int64.
"""

from __future__ import annotations

import functools

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_LAYER_STRIDE = 10007
# These witnesses decide primality for every integer below 3.3e24 (Sorenson and Webster, 2015).
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


def is_prime(value: int) -> bool:
    """Whether `value` (below 3.3e24) is prime, by Miller-Rabin with fixed witnesses."""
    if value < 2:
        return False
    for witness in _WITNESSES:
        if value % witness == 0:
            return value == witness
    odd, twos = value - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(value, odd, twos, witness) for witness in _WITNESSES)


def _passes(value: int, odd: int, twos: int, witness: int) -> bool:
    power = pow(witness, odd, value)
    if power in (1, value - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % value
        if power == value - 1:
            return True
    return False


@functools.lru_cache(maxsize=64)
def primes_from(start: int, count: int) -> tuple[int, ...]:
    """The first `count` primes that are at least `start`."""
    primes: list[int] = []
    candidate = start
    while len(primes) < count:
        if is_prime(candidate):
            primes.append(candidate)
        candidate += 1
    return tuple(primes)


def _splitmix64(value: int) -> int:
    value = (value + _GOLDEN) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (value ^ (value >> 31)) & _MASK64


def hash_multipliers(vocab_size: int, ngram_size: int, ple_index: int, seed: int) -> tuple[int, ...]:
    """One odd multiplier for each position of the n-gram, newest token first."""
    half_bound = max(1, ((1 << 63) - 1) // max(vocab_size, 1) // 2)
    base = seed + _LAYER_STRIDE * ple_index
    drawn = (_splitmix64((base + _GOLDEN * (index + 1)) & _MASK64) for index in range(ngram_size))
    return tuple(2 * (value % half_bound) + 1 for value in drawn)

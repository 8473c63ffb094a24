"""What every test gets: poisoned memory, a seed that is printed on failure, deterministic hypothesis.

Poisoned memory: `torch.empty` and its relatives are wrapped for the whole session so that what they return is filled
with 0x7F (or with PAGE4_POISON). A byte of 0x7F is NaN as E4M3 and as fp16 and huge as bf16 and fp32, so a result that
depends on memory nobody wrote is loud. torch has a switch of its own (`torch.utils.deterministic`), but it only works
together with deterministic algorithms, which replaces the very operations under test by slower ones, and it cannot fill
with a chosen byte.
"""

from __future__ import annotations

import functools
import io
import os
import random
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import hypothesis
import pytest
import torch

from page4 import env

# Triton reads this when it is imported, by whichever test comes first: without a GPU its kernels run interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A pool of 2 GiB (the 64-bit offset tests) is left alone: filling it would only cost memory.
POISON_LIMIT_BYTES = 1 << 30
_WRAPPED: tuple[tuple[Any, str], ...] = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch, "empty_permuted"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)
_originals: list[tuple[Any, str, Any]] = []

hypothesis.settings.register_profile("page4", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("page4")


def poison_byte() -> int:
    """The byte that memory nobody wrote holds in this session."""
    byte = env.get("POISON")
    return 0x7F if byte is None else byte


def poison(tensor: torch.Tensor, byte: int | None = None) -> torch.Tensor:
    """Fill the whole storage of `tensor` with one byte, in place."""
    storage = tensor.untyped_storage()
    whole = torch.zeros(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    whole.fill_(poison_byte() if byte is None else byte)
    return tensor


def poisoned(shape: tuple[int, ...] | int, dtype: torch.dtype = torch.float32, byte: int | None = None) -> torch.Tensor:
    """A new tensor whose bytes are all 0x7F, or PAGE4_POISON, or `byte`."""
    return poison(torch.zeros(shape, dtype=dtype), byte)


def _poisoning(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = original(*args, **kwargs)
        fillable = tensor.device.type == "cpu" and tensor.layout is torch.strided and type(tensor) is torch.Tensor
        # A bool byte other than 0 and 1 is undefined behaviour in torch, not a value.
        if fillable and tensor.dtype is not torch.bool and tensor.untyped_storage().nbytes() <= POISON_LIMIT_BYTES:
            poison(tensor)
        return tensor

    return wrapper


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="seed of the tests that draw random values")


def pytest_configure() -> None:
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))
    for owner, name in _WRAPPED:
        original = getattr(owner, name)
        _originals.append((owner, name, original))
        setattr(owner, name, _poisoning(original))


def pytest_unconfigure() -> None:
    while _originals:
        owner, name, original = _originals.pop()
        setattr(owner, name, original)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The test's seed: the same in every run, another one for each test; `pytest --seed N` sets it."""
    given = request.config.getoption("--seed")
    value = zlib.crc32(request.node.nodeid.encode()) if given is None else int(given)
    request.node.stash[_SEED] = value
    return value


_SEED = pytest.StashKey[int]()


@pytest.fixture
def one_thread() -> Generator[None, None, None]:
    """For tests of tiny tensors: on a busy machine, waking a second thread costs more than the test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def rng(seed: int) -> random.Random:
    """Python random numbers of the test's seed."""
    return random.Random(seed)


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    """torch random numbers of the test's seed."""
    return torch.Generator().manual_seed(seed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report: Any = yield
    if report.failed and _SEED in item.stash:
        report.sections.append(("seed", f"run again with: pytest '{item.nodeid}' --seed {item.stash[_SEED]}"))
    return report


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every path that is opened by any of Python's ways while the test runs."""
    paths: list[str] = []

    def record(original: Any) -> Any:
        def wrapper(file: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(file, int):
                paths.append(os.path.realpath(os.fspath(file)))
            return original(file, *args, **kwargs)

        return wrapper

    monkeypatch.setattr("builtins.open", record(open))
    monkeypatch.setattr(io, "open", record(io.open))
    monkeypatch.setattr(os, "open", record(os.open))
    yield paths

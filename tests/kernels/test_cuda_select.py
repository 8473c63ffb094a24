"""The CUDA selection without a GPU: sizes, refusals, what the compiler makes of it; results: test_triton_select."""

from __future__ import annotations

import pytest

from page4.kernels import cuda_build, cuda_select, nvrtc

ARCHS = ["sm_70", "sm_75", "sm_80", "sm_90"]
# Shared memory that a block may have, the static part counted.
LIMITS = {(7, 0): 96, (7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227}


@pytest.mark.parametrize("capability", LIMITS)
@pytest.mark.parametrize("columns", [64, 4096, 8192, 8256, 16384, 32768, 65536, 131072])
def test_every_row_has_a_variant_that_fits(columns: int, capability: tuple[int, int]) -> None:
    threads, keep = cuda_select.variant(columns, capability)
    size = cuda_select.shared_bytes(columns, threads, keep)
    if columns == 131072 and capability == (7, 5):
        assert "more shared memory" in str(cuda_select.refusal(capability, columns))
        return
    assert size + cuda_select.STATIC_BYTES <= LIMITS[capability] << 10
    assert threads % 32 == 0 and 2048 % threads == 0
    assert size >= 4 * columns * keep + columns // 2


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("threads", "keep"), sorted({variant[1:] for variant in cuda_select.VARIANTS}))
def test_it_compiles_without_spills(arch: str, threads: int, keep: int) -> None:
    reason = nvrtc.refusal(arch)
    if reason is not None:
        pytest.skip(reason)
    defines = {"THREADS": threads, "KEEP": keep}
    found = cuda_build.compile(cuda_select.SOURCE, arch=arch, defines=defines).resources[cuda_select.NAME]
    assert found.stack_bytes == found.spill_store_bytes == found.spill_load_bytes == 0
    assert found.shared_bytes <= cuda_select.STATIC_BYTES and found.registers * threads <= 65536


def test_warm_up_compiles_what_rows_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[str, object]] = []
    monkeypatch.setattr(cuda_build, "compile", lambda source, arch, defines: built.append((arch, defines)))
    cuda_select.build(20_000, (9, 0))
    assert built == [("sm_90", {"THREADS": threads, "KEEP": 1}) for threads in (256, 512, 1024)]


def test_refusals_name_the_reason() -> None:
    assert "7.0 or newer" in str(cuda_select.refusal((6, 1)))
    assert "7.0 or newer" in str(cuda_select.refusal(None))
    assert "rows of 1048576 blocks" in str(cuda_select.refusal((9, 0), 1 << 20))

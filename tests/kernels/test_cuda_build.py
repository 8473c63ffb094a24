"""The CUDA builder: targets, cache, refusals. NVRTC needs no GPU, so all of it runs wherever its wheels are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from page4.errors import KernelError
from page4.kernels import cuda_build, nvrtc
from page4.kernels.cuda_build import Resources

SOURCE = """#include "header.cuh"
extern "C" __global__ void add(float* out, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] += ADDEND + BIAS;
}
extern "C" __global__ void other(float* out) {
  __shared__ float kept[64];
  kept[threadIdx.x] = out[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = kept[63 - threadIdx.x];
}
"""


def needs(arch: str) -> pytest.MarkDecorator:
    reason = nvrtc.refusal(arch)
    return pytest.mark.skipif(reason is not None, reason=str(reason))


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources and an empty cache."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "add.cu").write_text(SOURCE)
    (folder / "header.cuh").write_text('#include "inner.cuh"\n')
    (folder / "inner.cuh").write_text("#define BIAS 1.0f\n")
    monkeypatch.setattr(cuda_build, "SOURCES", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def build(arch: str = "sm_70", addend: int = 2, source: str = "add.cu") -> tuple[cuda_build.CompiledKernel, int]:
    """A kernel, and how many compilations it took."""
    before = sum(cuda_build.compile_counts.values())
    kernel = cuda_build.compile(source, arch=arch, defines={"ADDEND": addend})
    return kernel, sum(cuda_build.compile_counts.values()) - before


def cached(sources: Path) -> list[Path]:
    return sorted((sources.parent / "cache" / "page4" / "cuda").iterdir())


@pytest.mark.parametrize("arch", [pytest.param(arch, marks=needs(arch)) for arch in ("sm_70", "sm_90a", "sm_80")])
def test_a_cubin_and_its_resources(sources: Path, arch: str) -> None:
    kernel, compilations = build(arch)
    assert compilations == 1
    assert kernel.image.startswith(b"\x7fELF") and not kernel.is_ptx
    assert set(kernel.resources) == {"add", "other"}
    assert kernel.resources["other"].shared_bytes == 256
    assert kernel.resources["add"].shared_bytes == kernel.resources["add"].spill_store_bytes == 0
    assert 0 < kernel.resources["add"].registers < 32
    assert kernel.compiler[0] in nvrtc.majors_for(arch)


@needs("compute_70")
def test_ptx_of_an_old_target(sources: Path) -> None:
    kernel, _ = build("compute_70")
    assert kernel.is_ptx and kernel.compiler[0] == 12 and not kernel.resources
    text = kernel.image.rstrip(b"\0").decode()
    assert ".target sm_70" in text and ".entry add" in text


@needs("sm_70")
def test_a_second_call_reads_the_cache(sources: Path) -> None:
    first, once = build()
    second, again = build()
    assert (once, again) == (1, 0) and first == second
    assert len(cached(sources)) == 1 and cached(sources)[0].stat().st_mode & 0o777 == 0o644
    assert build(addend=3)[1] == 1, "another define is another kernel"
    assert cuda_build.compile("add.cu", arch="sm_70", defines={"ADDEND": 2}) == first


@needs("sm_70")
@pytest.mark.parametrize("name", ["add.cu", "header.cuh", "inner.cuh"])
def test_a_changed_file_is_compiled_again(sources: Path, name: str) -> None:
    build()
    with (sources / name).open("a") as file:
        file.write("// changed\n")
    assert build()[1] == 1


@needs("sm_70")
def test_a_changed_compiler_compiles_again(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build()
    monkeypatch.setattr(cuda_build, "OPTIONS", (*cuda_build.OPTIONS, "--fmad=false"))
    assert build()[1] == 1


@needs("sm_70")
@pytest.mark.parametrize("damage", ["empty", "cut", "changed", "folder"])
def test_a_broken_entry_is_compiled_again(sources: Path, damage: str) -> None:
    whole, _ = build()
    (path,) = cached(sources)
    content = path.read_bytes()
    if damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        half = len(content) // 2
        broken = {"empty": b"", "cut": content[:half], "changed": content[:half] + b"?" + content[half + 1 :]}
        path.write_bytes(broken[damage])
    again, compilations = build()
    assert compilations == 1 and again.resources == whole.resources
    assert len(cached(sources)) == 1, "nothing half written stays"
    if damage != "folder":
        assert build()[1] == 0


@needs("sm_70")
def test_a_cache_that_cannot_be_written_costs_only_time(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sources.parent / "cache" / "page4"
    folder.mkdir(parents=True)
    (folder / "cuda").touch()
    assert build()[0].image and build()[1] == 1


@needs("sm_70")
def test_processes_at_once_leave_one_whole_file(sources: Path) -> None:
    code = (
        "import pathlib, sys; from page4.kernels import cuda_build;"
        "cuda_build.SOURCES = pathlib.Path(sys.argv[1]);"
        "print(len(cuda_build.compile('add.cu', arch='sm_70', defines={'ADDEND': 2}).image))"
    )
    path = os.pathsep.join([str(Path(cuda_build.__file__).parents[2]), *filter(None, sys.path)])
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(sources)],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    said = {process.communicate(timeout=120)[0] for process in started}
    assert all(process.returncode == 0 for process in started) and len(said) == 1
    assert len(cached(sources)) == 1
    assert build()[1] == 0


@needs("sm_70")
def test_threads_compile_every_kernel_once(sources: Path) -> None:
    before = cuda_build.compile_counts["add.cu", "sm_70"]
    requests = [("add.cu", "sm_70", {"ADDEND": addend}) for addend in (1, 2, 3)] * 3
    cuda_build.compile_all(requests, threads=4)
    assert cuda_build.compile_counts["add.cu", "sm_70"] - before == 3 == len(cached(sources))
    with pytest.raises(KernelError, match="define"):
        cuda_build.compile_all([*requests, ("add.cu", "sm_70", {"A B": 1})])


@needs("sm_70")
def test_what_does_not_compile_says_why(sources: Path) -> None:
    (sources / "add.cu").write_text("__global__ void broken( {}\n")
    with pytest.raises(KernelError, match=r"add\.cu: expected a source that compiles, got .*error"):
        build()
    assert not list(sources.parent.glob("cache/page4/cuda/*"))


def test_refusals_say_what_to_do(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelError, match="arch: expected sm_XY or compute_XY"):
        build("volta")
    monkeypatch.setattr(nvrtc, "_load", lambda major: None)
    with pytest.raises(KernelError, match=r"NVRTC for sm_70: expected a libnvrtc of CUDA 12 .* nvidia-cuda-nvrtc-cu12"):
        build("sm_70")
    reason = nvrtc.refusal("sm_90a")
    assert reason is not None and "CUDA 13 or 12" in reason and "pip install nvidia-cuda-nvrtc" in reason


@needs("sm_70")
def test_refusals_of_sources_and_defines(sources: Path) -> None:
    with pytest.raises(KernelError, match=r"source: expected a file of .*add\.cu.*, got none\.cu"):
        build(source="none.cu")
    with pytest.raises(KernelError, match="define: expected a C name, got 'A B'"):
        cuda_build.compile("add.cu", arch="sm_70", defines={"A B": 1})


def test_volta_never_takes_cuda_13() -> None:
    assert nvrtc.majors_for("sm_70") == nvrtc.majors_for("compute_72") == (12,)
    assert nvrtc.majors_for("sm_75")[0] == nvrtc.majors_for("sm_90a")[0] == 13


def test_the_report_of_ptxas() -> None:
    """As CUDA 12.9 and 13.5 print it."""
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_70'
ptxas info    : Function properties for k
ptxas         .     256 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 180 registers, used 1 barriers, 256 bytes cumulative stack size, 1024 bytes smem, 364 bytes cmem[0]
ptxas info    : Compiling entry function 'l' for 'sm_70'
ptxas info    : Function properties for l
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""
    assert cuda_build.resources_of(log) == {"k": Resources(180, 256, 8, 12, 1024), "l": Resources(8, 0, 0, 0, 0)}


def test_importing_the_builder_imports_no_torch_and_no_cuda() -> None:
    code = (
        "import sys; import page4.kernels.cuda_build, page4.kernels.cuda;"
        "sys.exit(any(name.split('.')[0] in ('torch', 'cuda', 'numpy') for name in sys.modules))"
    )
    path = str(Path(cuda_build.__file__).parents[2])
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}).returncode == 0

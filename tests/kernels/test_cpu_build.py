"""The builder: what it does without a compiler, with a bad one, with a bad cache; torch serves wherever it cannot."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.lanes import make_llm, tokens
from tests.kernels.cpu_cases import needs_compiler, same_bits

from page4 import embedded_checkpoint
from page4.kernels import cpu, cpu_build

# Stands for a compiler: notes every call, and writes the library in two halves, so that two at once would mix them.
SCRIPT = """#!/bin/sh
if [ "$1" = --version ]; then echo "fake ${FAKE_VERSION:-1}"; exit 0; fi
echo compiled >> "{log}"
while [ "$1" != -o ]; do shift; done
head -c 9000 "{library}" > "$2"
sleep "${FAKE_SECONDS:-0}"
tail -c +9001 "{library}" >> "$2"
"""


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@dataclass
class Compiler:
    path: Path
    log: Path
    cache: Path

    @property
    def calls(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    @property
    def libraries(self) -> list[Path]:
        return sorted((self.cache / "page4").glob("*.so"))

    @property
    def leftovers(self) -> list[Path]:
        return sorted((self.cache / "page4").glob("*.part"))


@pytest.fixture(scope="module")
def real() -> Path:
    """The library of this process, asked for before any test replaces `built`."""
    path, reason = cpu_build.built()
    if path is None:
        pytest.skip(f"not compiled: {reason}")
    return path


@pytest.fixture
def compiler(real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """A fake compiler that gives the real library, and an empty cache folder."""
    # A copy of its own: what a test breaks must not be what this process has mapped.
    library = Path(shutil.copy(real, tmp_path / "library"))
    found = Compiler(tmp_path / "fakecc", tmp_path / "log", tmp_path / "cache")
    script(found.path, SCRIPT.replace("{log}", str(found.log)).replace("{library}", str(library)))
    monkeypatch.setenv("CC", str(found.path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(found.cache))
    return found


def build() -> tuple[Path | None, str | None]:
    """`built` as a new process would call it."""
    return cpu_build.built.__wrapped__()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """`built` and `load` as in a new process: they answer once and remember."""
    for name in ("built", "load"):
        monkeypatch.setattr(cpu_build, name, functools.cache(getattr(cpu_build, name).__wrapped__))


def run_python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: text for name, text in os.environ.items() if name not in ("CC", "PAGE4_KERNELS")}
    path = os.pathsep.join([str(Path(cpu_build.__file__).parents[2]), *filter(None, sys.path)])
    env = {**inherited, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environ}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)


def test_a_library_is_built_once_and_found_again(compiler: Compiler) -> None:
    first, reason = build()
    assert reason is None and first is not None and first.parent == compiler.cache / "page4"
    assert compiler.calls == 1
    assert build() == (first, None)
    assert compiler.calls == 1, "the cached file is used"
    assert compiler.libraries == [first] and not compiler.leftovers
    assert first.stat().st_mode & 0o777 == 0o755
    assert ctypes.CDLL(str(first)).page4_attend


@pytest.mark.parametrize("what", ["compiler", "flags", "processor", "source"])
def test_what_the_library_depends_on_is_in_its_name(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    first, _ = build()
    if what == "compiler":
        monkeypatch.setenv("FAKE_VERSION", "2")
    elif what == "flags":
        monkeypatch.setattr(cpu_build, "FLAGS", (*cpu_build.FLAGS, "-g"))
    elif what == "processor":
        monkeypatch.setattr(cpu_build, "_processor", lambda: "another one")
    else:
        sources = tmp_path / "sources"
        shutil.copytree(cpu_build.SOURCES, sources)
        with (sources / "page4_cpu.h").open("a") as header:
            header.write("\n")
        monkeypatch.setattr(cpu_build, "SOURCES", sources)
    second, _ = build()
    assert second != first and compiler.calls == 2
    assert len(compiler.libraries) == 2


@pytest.mark.parametrize("keep", [0, 100, 4096, 0.5, -4096, -1, "changed"])
def test_a_damaged_library_is_built_again(compiler: Compiler, keep: Any) -> None:
    """To load a file that is cut off does not fail, it kills the process."""
    path, _ = build()
    assert path is not None
    whole = path.read_bytes()
    size = int(len(whole) * keep) if isinstance(keep, float) else keep
    path.write_bytes(
        whole[: len(whole) // 2] + b"?" + whole[len(whole) // 2 + 1 :] if keep == "changed" else whole[:size]
    )
    assert path.read_bytes() != whole
    assert build() == (path, None)
    assert compiler.calls == 2 and path.read_bytes() == whole and not compiler.leftovers


def test_two_processes_at_once_build_whole_files(compiler: Compiler) -> None:
    code = "from page4.kernels import cpu_build; print(*cpu_build.built())"
    inherited = {**os.environ, "PYTHONPATH": str(Path(cpu_build.__file__).parents[2]), "FAKE_SECONDS": "0.5"}
    command = [sys.executable, "-c", code]
    running = [subprocess.Popen(command, env=inherited, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=120)[0].split() for process in running]
    assert len(compiler.libraries) == 1 and not compiler.leftovers
    assert printed == [[str(compiler.libraries[0]), "None"]] * 2
    calls = compiler.calls
    assert build() == (compiler.libraries[0], None)
    assert compiler.calls == calls, "the file that is there is whole"


@pytest.mark.usefixtures("fresh")
def test_no_compiler_is_a_reason_and_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("PAGE4_KERNELS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.INFO, logger="page4"):
        assert cpu_build.load() == (None, "no C compiler is installed (gcc or clang)")
        assert cpu.refusal(torch.zeros(1), channels=(16,)) == "no C compiler is installed (gcc or clang)"
    assert not caplog.records


@pytest.mark.parametrize("cc", ["", "no-such-compiler"])
def test_a_cc_that_is_not_there_leaves_the_usual_names(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cc: str
) -> None:
    compiler.path.rename(tmp_path / "gcc")
    monkeypatch.setenv("CC", cc)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    path, reason = build()
    assert reason is None and path in compiler.libraries and compiler.calls == 1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('[ "$1" = --version ] && exit 0; echo "x.c:1: cannot  do\nthis" >&2; exit 1', "failed: x.c:1: cannot do this"),
        ('echo "no licence" >&2; exit 3', "failed: no licence"),
        ('[ "$1" = --version ] && exit 0; exit 1', "failed: exit status 1"),
        ('[ "$1" = --version ] && exit 0; printf "\\377\\376" >&2; exit 1', "failed: "),
    ],
)
@pytest.mark.usefixtures("fresh")
def test_a_compiler_that_fails_is_told_once(
    compiler: Compiler, caplog: pytest.LogCaptureFixture, body: str, said: str
) -> None:
    script(compiler.path, f"#!/bin/sh\n{body}\n")
    with caplog.at_level(logging.INFO, logger="page4"):
        library, reason = cpu_build.load()
        for _ in range(3):
            assert cpu_build.load() == (library, reason) == (None, cpu_build.built()[1])
    assert reason is not None and said in reason
    assert len(caplog.records) == 1 and reason in caplog.text
    assert not compiler.libraries and not compiler.leftovers


def test_a_compiler_that_hangs_is_given_up(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script(compiler.path, '#!/bin/sh\n[ "$1" = --version ] && exit 0\nexec sleep 60\n')
    monkeypatch.setattr(cpu_build, "BUILD_SECONDS", 0.2)
    path, reason = build()
    assert path is None and reason is not None and reason.endswith("failed: not done after 0.2 s")
    assert not compiler.libraries and not compiler.leftovers


@pytest.mark.usefixtures("fresh")
def test_a_file_that_is_no_library_is_told_once(compiler: Compiler, caplog: pytest.LogCaptureFixture) -> None:
    script(
        compiler.path,
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\nwhile [ "$1" != -o ]; do shift; done\necho 1 > "$2"\n',
    )
    assert cpu_build.load()[0] is None and cpu_build.load()[0] is None
    assert len(caplog.records) == 1 and "cannot be loaded" in caplog.text


@pytest.mark.parametrize("why", ["a file", "no home"])
def test_a_cache_that_cannot_be_written_is_replaced_for_the_process(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(cpu_build, "_process_folder", functools.cache(cpu_build._process_folder.__wrapped__))
    if why == "a file":
        (tmp_path / "taken").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")

        def homeless() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", homeless)
    path, reason = build()
    assert reason is None and path is not None and path.is_file()
    assert build() == (path, None) and compiler.calls == 1
    assert ctypes.CDLL(str(path)).page4_attend


def test_no_place_at_all_is_a_reason(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> Any:
        raise PermissionError("read-only everywhere")

    (tmp_path / "taken").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    monkeypatch.setattr(cpu_build, "_process_folder", refuse)
    path, reason = build()
    assert path is None and reason is not None and "read-only everywhere" in reason
    assert len(caplog.records) == 1


def test_the_choice_of_kernels_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernels in ("torch", "reference"):
        monkeypatch.setenv("PAGE4_KERNELS", kernels)
        assert cpu.refusal(torch.zeros(1), channels=(16,)) == f"PAGE4_KERNELS is {kernels}"
    monkeypatch.setenv("PAGE4_KERNELS", "auto")
    half = torch.zeros(1, dtype=torch.float16)
    assert cpu.refusal(half) == "compiled for float32 on a CPU, not for torch.float16 on cpu"
    for channels in ((16, 8), (0,), (-16,)):
        assert str(cpu.refusal(torch.zeros(1), channels=channels)).startswith("compiled for multiples of 16")


PROMPT = "class Reader:\n    def __init__(self, path):\n"
GREEDY = f"""
import page4
from tests.engine.lanes import make_llm, tokens
from page4.kernels import cpu_build
llm = make_llm(page4.embedded_checkpoint(), 3)
print(*tokens(llm, llm.tokenizer.encode({PROMPT!r}), 16))
print(cpu_build.load()[1])
"""


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["none", "fails"])
def test_an_engine_without_the_library_gives_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("PAGE4_KERNELS", "torch")
    llm = make_llm(embedded_checkpoint(), 3)
    assert llm.tokenizer is not None
    want = tokens(llm, llm.tokenizer.encode(PROMPT), 16)
    environ = {"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path)}
    if kind == "fails":
        environ["CC"] = str(
            script(tmp_path / "badcc", '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho oh no >&2; exit 1\n')
        )
    done = run_python(GREEDY, **environ)
    assert done.returncode == 0, done.stderr
    told, reason = done.stdout.splitlines()
    assert [int(token) for token in told.split()] == want
    warnings = done.stderr.count("the compiled CPU kernels are off, torch runs instead")
    if kind == "none":
        assert (reason, warnings) == ("no C compiler is installed (gcc or clang)", 0)
    else:
        assert reason.endswith("badcc failed: oh no") and warnings == 1


@needs_compiler
def test_the_flags_give_the_arithmetic_that_the_kernels_rely_on() -> None:
    """NaN, infinities and subnormals are what they are: no fast-math, no flush to zero after the library is loaded."""
    tiny = torch.tensor([1e-45, -1e-45, 1e-40]).repeat(16)[:48].view(1, 1, 48)
    streams = tiny.clone()
    cpu.leave(streams, torch.zeros(1, 48), torch.zeros(1, 1, 1))
    assert same_bits(streams, tiny)
    assert float(torch.tensor(1e-40) * 0.5) != 0.0
    assert bool(cpu.leave(streams, torch.full((1, 48), torch.nan), torch.ones(1, 1, 1)).isnan().all())

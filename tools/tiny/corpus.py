"""Collect the text: Python sources and documentation topics of this environment, as one token stream for each split.

`python tools/tiny/corpus.py WORK` writes WORK/corpus.json (files, licences, hashes), WORK/train.txt.xz and
WORK/held.txt.xz (documents separated by NUL). Whole files are held out, chosen by a hash of their name.
"""

from __future__ import annotations

import ast
import hashlib
import json
import lzma
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

HELD_OUT_ONE_IN = 24
MAX_FILE_BYTES, MIN_FILE_BYTES = 400_000, 400
PACKAGES = {
    "torch": "BSD-3-Clause",
    "torchgen": "BSD-3-Clause",
    "sympy": "BSD-3-Clause",
    "numpy": "BSD-3-Clause",
    "networkx": "BSD-3-Clause",
    "mpmath": "BSD-3-Clause",
    "pygments": "BSD-2-Clause",
    "transformers": "Apache-2.0",
    "huggingface_hub": "Apache-2.0",
    "mypy": "MIT",
    "pydantic": "MIT",
    "_pytest": "MIT",
    "rich": "MIT",
    "setuptools": "MIT",
}
DISTRIBUTION = {"torchgen": "torch", "_pytest": "pytest"}
CHAT_ONE_IN, CHAT_MAX_CHARS = 6, 1600


@dataclass(frozen=True)
class Document:
    """One text: where it is from, under which licence, and whether it is held out."""

    name: str
    licence: str
    text: str

    @property
    def held_out(self) -> bool:
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def is_prose_or_code(text: str) -> bool:
    """Refuse tables and generated data: very long lines, or too few letters."""
    lines = text.splitlines()
    if max(len(line) for line in lines) > 2000 or len(text) / len(lines) > 90:
        return False
    sample = re.sub(r"\s", "", text[:20_000])
    return len(re.sub(r"[^A-Za-z_]", "", sample)) > 0.55 * len(sample)


def python_files(root: Path, prefix: str, licence: str) -> Iterator[Document]:
    """Every readable source file under `root`, without vendored code and without files generated from others."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if re.search(r"(^|/)(site-packages|_vendor|vendor|node_modules|idle_test|lib2to3/tests/data)/", relative):
            continue
        size = path.stat().st_size
        if not MIN_FILE_BYTES <= size <= MAX_FILE_BYTES:
            continue
        # transformers writes these from the modular file beside them: the same text twice
        if path.name.startswith("modeling_") and (path.parent / path.name.replace("modeling_", "modular_")).exists():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if "\0" not in text and is_prose_or_code(text):
            yield Document(f"{prefix}/{relative}", licence, text)


def topics(root: Path) -> Iterator[Document]:
    """The language reference that `help()` shows, one document a topic."""
    scope: dict[str, dict[str, str]] = {}
    exec((root / "pydoc_data" / "topics.py").read_text(encoding="utf-8"), scope)  # the interpreter's own file
    for name, text in sorted(scope["topics"].items()):
        yield Document(f"topics/{name}.txt", "PSF-2.0", text.strip() + "\n")


def collect() -> list[Document]:
    """All documents, in a fixed order, exact duplicates dropped."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    site = Path(sysconfig.get_paths()["purelib"])
    documents = [*topics(stdlib), *python_files(stdlib, "stdlib", "PSF-2.0")]
    for package, licence in PACKAGES.items():
        documents += python_files(site / package, package, licence)
    seen: set[str] = set()
    unique = []
    for document in documents:
        digest = hashlib.sha256(document.text.encode()).hexdigest()
        if digest not in seen and not (document.name.startswith("stdlib/pydoc_data")):
            seen.add(digest)
            unique.append(document)
    return unique


def chats(document: Document) -> Iterator[str]:
    """Small conversations made from a training file: a documented function asked for, and given."""
    try:
        tree = ast.parse(document.text)
    except (SyntaxError, ValueError):
        return
    lines = document.text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith(("test", "_")):
            continue
        number = int.from_bytes(hashlib.sha256((document.name + node.name).encode()).digest()[:4], "big")
        if number % CHAT_ONE_IN:
            continue
        summary = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ").strip()
        source = lines[node.lineno - 1 : node.end_lineno]
        if not 20 < len(summary) < 200 or not 120 < sum(map(len, source)) < CHAT_MAX_CHARS:
            continue
        body = "\n".join(line.removeprefix(" " * node.col_offset) for line in source)
        arguments = ", ".join(a.arg for a in node.args.args if a.arg != "self")
        ask = (
            f"Write the Python function `{node.name}({arguments})`: {summary}"
            if number // CHAT_ONE_IN % 2
            else f"What does `{node.name}({arguments})` do? Show its source."
        )
        answer = f"```python\n{body}\n```" if number // CHAT_ONE_IN % 2 else f"{summary}\n\n```python\n{body}\n```"
        yield f"<|im_start|>user\n{ask}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


def main(work: Path) -> None:
    documents = collect()
    train = [d for d in documents if not d.held_out]
    held = [d for d in documents if d.held_out]
    chat = [
        text for d in train if d.name.startswith(("stdlib", "sympy", "networkx", "rich", "mpmath")) for text in chats(d)
    ]
    packed = ["".join(chat[i : i + 8]) for i in range(0, len(chat), 8)]
    work.mkdir(parents=True, exist_ok=True)
    texts = {"train": [d.text for d in train] + packed, "held": [d.text for d in held]}
    for split, parts in texts.items():
        with lzma.open(work / f"{split}.txt.xz", "wt", encoding="utf-8", preset=1, newline="") as out:
            out.write("\0".join(parts))
    files = [[d.name, d.licence, len(d.text.encode()), hashlib.sha256(d.text.encode()).hexdigest()] for d in documents]
    report = {
        "python": sys.version.split()[0],
        "packages": {p: version(DISTRIBUTION.get(p, p).replace("_", "-")) for p in PACKAGES},
        "licences": sorted({d.licence for d in documents}),
        "files": len(documents),
        "held_out_files": len(held),
        "train_bytes": sum(len(t.encode()) for t in texts["train"]),
        "held_bytes": sum(len(t.encode()) for t in texts["held"]),
        "conversations": len(chat),
        "file_list_sha256": hashlib.sha256("\n".join(d.name for d in documents).encode()).hexdigest(),
        "train_sha256": hashlib.sha256("\0".join(texts["train"]).encode()).hexdigest(),
        "held_sha256": hashlib.sha256("\0".join(texts["held"]).encode()).hexdigest(),
        "held_names": [d.name for d in held],
        "bytes_by_source": {
            source: sum(row[2] for row in files if row[0].split("/")[0] == source)
            for source in sorted({row[0].split("/")[0] for row in files})
        },
    }
    (work / "corpus.json").write_text(json.dumps(report, indent=1) + "\n")
    (work / "files.json").write_text(json.dumps(files, indent=0) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "held_names"}, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

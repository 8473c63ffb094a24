"""MODEL on the command line -> a folder on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from page4.errors import CheckpointError, UsageError, message

EMBEDDED = "tiny"
HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
# Weights as safetensors, and the small files beside them; never code, never pickles.
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt"]


def resolve(model: str, revision: str | None = None) -> Path:
    """The folder of MODEL: the embedded checkpoint, a local folder, or a snapshot in the hub cache.

    huggingface_hub alone downloads and writes its cache (`HF_HOME`, `HF_HUB_OFFLINE` and `HF_TOKEN` are its own).
    """
    folder = Path(model).expanduser()
    if model == EMBEDDED or folder.exists():
        if revision is not None:
            raise UsageError(message("--revision", allowed="a hub MODEL", got=f"MODEL {model}", do="leave it out"))
        return embedded() if model == EMBEDDED else check_folder(folder)
    match = HUB_NAME.fullmatch(model)
    if match is None or model.startswith((".", "/", "~")):
        allowed = f"an existing folder, org/name[@revision] or {EMBEDDED}"
        raise CheckpointError(message("MODEL", allowed=allowed, got=repr(model), do="check the path"))
    name, pinned = match.groups()
    if pinned is not None and revision is not None and pinned != revision:
        raise UsageError(message("--revision", allowed=f"{pinned}, as in MODEL", got=revision, do="name one revision"))
    return download(name, pinned or revision)


def embedded() -> Path:
    """The folder of the checkpoint inside the package."""
    from page4.assets import embedded_checkpoint

    return embedded_checkpoint()


def check_folder(folder: Path) -> Path:
    """A folder with a config.json, or a refusal."""
    if not folder.is_dir():
        raise CheckpointError(
            message("MODEL", allowed="a folder", got=f"the file {folder}", do="name the folder around it")
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            message("MODEL", allowed="config.json inside", got=str(folder), do="name a checkpoint folder")
        )
    return folder


def download(name: str, revision: str | None) -> Path:
    """The snapshot folder of a hub model, downloaded by huggingface_hub when it is not in its cache."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError:
        got = f"{name}, which is no folder here, and no huggingface_hub"
        do = "check the path, or pip install 'page4[hub]'"
        raise CheckpointError(message("MODEL", allowed="a local folder", got=got, do=do)) from None
    try:
        folder = huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=HUB_FILES)
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        # Their messages run over many lines; the first says what, the type says which kind.
        reason = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
        got = f"{type(error).__name__}: {reason}"
        do = "check the name, the network and HF_HUB_OFFLINE, or give a local folder"
        raise CheckpointError(message(f"MODEL {name}", allowed="a hub model", got=got, do=do)) from None
    return check_folder(Path(folder))

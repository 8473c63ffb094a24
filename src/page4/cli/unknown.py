"""What to say about a flag or verb that page4 does not have: the nearest thing that it has."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

# Flags that people bring from `vllm serve` and its relatives, and what does their work here.
ELSEWHERE = {
    "--gpu-memory-utilization": "--kv-cache-memory-bytes (a size in bytes, e.g. 512M)",
    "--kv-cache-memory": "--kv-cache-memory-bytes",
    "--num-speculative-tokens": """--speculative-config '{"method":"mtp","num_speculative_tokens":3}'""",
    "--spec-method": """--speculative-config '{"method":"mtp","num_speculative_tokens":3}'""",
    "--speculative-model": "--speculative-config (the drafts come from the checkpoint's own MTP head)",
    "--max-new-tokens": "--max-tokens",
    "--num-predict": "--max-tokens",
    "--ctx-size": "--max-model-len",
    "--context-length": "--max-model-len",
    "--max-seq-len": "--max-model-len",
    "--model": "the positional MODEL",
    "--prompt": "the positional PROMPT",
    "--input-file": "--prompt-file",
    "--file": "--prompt-file",
    "--temp": "--temperature",
    "--calculate-kv-scales": "--kv-cache-dtype fp8 with a checkpoint that carries calibrated scales",
    "--quantization": "--dtype (page4 runs 32-bit and 16-bit weights)",
    "--tensor-parallel-size": "none (one process uses one device)",
    "--pipeline-parallel-size": "none (one process uses one device)",
    "--data-parallel-size": "none (one process uses one device)",
    "--enforce-eager": "none (this version captures no graphs, so it is always eager)",
    "--enable-prefix-caching": "none (this version has no prefix cache)",
    "--enable-chunked-prefill": "--max-num-batched-tokens (prefill is always chunked)",
    "--trust-remote-code": "none (page4 never runs code from a checkpoint)",
    "--host": "none (this version has no server; page4 generate runs prompts)",
    "--port": "none (this version has no server; page4 generate runs prompts)",
    "--tokenizer": "none (the tokenizer is the checkpoint's own tokenizer.json)",
    "--chat-template": "--chat (the template is the checkpoint's own)",
    "--load-format": "none (page4 reads safetensors only)",
}
VERBS_ELSEWHERE = {
    "serve": "generate (this version has no server)",
    "run": "generate",
    "complete": "generate",
    "chat": "generate --chat",
    "bench": "python benchmarks/generate.py",
    "info": "doctor",
    "check": "doctor",
}


def explain(error: Any, command: Any, arguments: Sequence[str]) -> str:
    """One line for a click error: unknown flags and verbs name the nearest, everything else keeps its own words."""
    flag = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and flag is not None:
        return f"{flag}: unknown flag; nearest: {nearest_flag(flag, flags_of(error, command))}"
    verbs = list(getattr(command, "commands", {}))
    if type(error).__name__ in ("UsageError", "NoSuchCommand") and arguments and arguments[0] not in verbs:
        verb = next((word for word in arguments if not word.startswith("-")), arguments[0])
        if verb not in verbs:
            return f"{verb}: unknown verb; nearest: {nearest_verb(verb, verbs)}"
    return str(error.format_message())


def flags_of(error: Any, command: Any) -> list[str]:
    """Every flag of the verb that the error happened in."""
    context = getattr(error, "ctx", None)
    owner = command if context is None else context.command
    return [
        flag for parameter in owner.params for flag in (*parameter.opts, *parameter.secondary_opts) if flag[:2] == "--"
    ]


def nearest_flag(flag: str, known: Sequence[str]) -> str:
    """The flag to use in place of `flag`, in words that can follow `nearest:`."""
    spelled = flag.replace("_", "-").lower()
    if spelled in known:
        return spelled
    # A slip in a flag of this very verb, which another verb or tool may know by that name.
    slip = difflib.get_close_matches(spelled, known, n=1, cutoff=0.88)
    if slip:
        return slip[0]
    if spelled in ELSEWHERE:
        return ELSEWHERE[spelled]
    close = difflib.get_close_matches(spelled, [*known, *ELSEWHERE], n=1, cutoff=0.6)
    if not close:
        return "none (page4 VERB --help lists all)"
    return ELSEWHERE.get(close[0], close[0])


def nearest_verb(verb: str, known: Sequence[str]) -> str:
    """The verb to use in place of `verb`."""
    if verb in VERBS_ELSEWHERE:
        return VERBS_ELSEWHERE[verb]
    close = difflib.get_close_matches(verb, known, n=1, cutoff=0.5)
    return close[0] if close else f"none (verbs: {', '.join(known)})"

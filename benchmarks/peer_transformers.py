"""The peer: transformers' own classes on the same folder, greedy, with its cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


class Peer:
    """A transformers model ready to run; loading is not timed."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.model = model.eval()
        # Both sides go on after an end token, so that both write the same number of tokens.
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def prefill(self, ids: list[int]) -> list[int]:
        """One forward over the prompt that fills a cache; the greedy next token, alone in a list."""
        output = self.model(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        return [int(output.logits[0, -1].argmax())]

    @torch.inference_mode()
    def generate(self, ids: list[int], new_tokens: int) -> list[int]:
        """Greedy continuation of one prompt."""
        prompt = torch.tensor([ids])
        output = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=False, use_cache=True
        )
        return [int(token) for token in output[0, len(ids) :]]

    def generate_each(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """The prompts one after another."""
        return [self.generate(ids, new_tokens) for ids in prompts]

"""Compare the training model with transformers on a checkpoint folder, in fp32.

`python tools/tiny/parity.py ASSETS [TOKENS]` prints the largest logit difference and the loss of both.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from draft import TinyLM
from export import state_from_checkpoint
from safetensors.torch import load_file
from shape import CONFIG


def load(assets: Path) -> TinyLM:
    """The training model with a checkpoint's weights, fp32, in evaluation mode."""
    model = TinyLM(CONFIG)
    model.load_state_dict(state_from_checkpoint(load_file(assets / "model.safetensors")))
    return model.eval()


@torch.no_grad()
def main(assets: Path, length: int) -> None:
    from transformers import AutoTokenizer, Qwen4ExpForCausalLM

    oracle, info = Qwen4ExpForCausalLM.from_pretrained(assets, dtype=torch.float32, output_loading_info=True)
    print({k: v for k, v in info.items() if v})
    tokenizer = AutoTokenizer.from_pretrained(assets)
    text = Path(__file__).with_name("model.py").read_text()
    tokens = torch.tensor([tokenizer(text)["input_ids"][:length]])
    assert tokenizer.decode(tokens[0]) == text[: len(tokenizer.decode(tokens[0]))]
    tokens[0, length // 3] = CONFIG["eos_token_id"]  # a document's end resets the n-grams
    ours = load(assets)
    mine = ours.lm_head(ours.target(tokens).hidden)
    theirs = oracle(tokens).logits
    for name, logits in (("ours", mine), ("transformers", theirs)):
        print(name, "loss", F.cross_entropy(logits[0, :-1], tokens[0, 1:]).item())
    difference = (mine - theirs).abs()
    print("tokens", length, "max abs difference", np.format_float_scientific(difference.max().item(), 3))


if __name__ == "__main__":
    torch.set_num_threads(2)
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 512)

"""page4: sparse attention over an E4M3 paged cache, with exact MTP, for qwen4_exp checkpoints."""

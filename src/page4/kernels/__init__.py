"""Kernels: pointers and tensors only. The operations own validation, choice and allocation."""

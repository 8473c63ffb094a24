"""Checkpoint files without torch: bounded headers, the index as an allow-list, names, hashes."""

from page4.checkpoint.data import TensorBytes
from page4.checkpoint.header import ShardHeader, TensorEntry, read_header
from page4.checkpoint.index import Checkpoint
from page4.checkpoint.names import TensorName, classify

__all__ = ["Checkpoint", "ShardHeader", "TensorBytes", "TensorEntry", "TensorName", "classify", "read_header"]

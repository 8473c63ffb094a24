"""The check of an overlay against its base, under the name that users of the scale tools look for."""

from page4.checkpoint.binding import check_binding
from page4.checkpoint.provenance import is_overlay

__all__ = ["check_binding", "is_overlay"]

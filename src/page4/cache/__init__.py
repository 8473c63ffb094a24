"""The paged cache: units, ownership of pages, one byte arena, and the writers."""

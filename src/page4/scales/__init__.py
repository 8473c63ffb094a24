"""Scale tooling: packs, overlays and their verification, on files alone and without torch."""

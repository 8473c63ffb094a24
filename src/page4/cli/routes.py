"""Which route of attend serves which shape, and why not the others."""

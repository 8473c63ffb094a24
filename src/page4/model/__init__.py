"""The text model and its draft head, over an arena."""

"""The losses over many ranks."""

"""The GPU backend."""

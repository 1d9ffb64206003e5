"""The GPU backend: select.py is its entry. docs/code.md is the map."""

"""The GPU backend: select.py is its entry. docs/files.md says what each file has."""

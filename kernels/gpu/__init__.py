"""The GPU backend: select.py is its entry. docs/code.md says what each file and folder has."""

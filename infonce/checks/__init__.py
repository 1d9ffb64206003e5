"""The checks of a call, before any work: of the whole call, and of each argument."""

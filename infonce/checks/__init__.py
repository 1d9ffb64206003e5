"""The checks of a call, before any work: `call` for the whole call, other files for arguments."""

"""Loops over one tile that Numba compiles, and the functions that they call."""

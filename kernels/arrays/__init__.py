"""Passes over blocks by operations on arrays, NumPy's or CuPy's."""

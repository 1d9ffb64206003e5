"""The CPU backend: BLAS on tiles, and loops between its products by Numba."""

"""The CPU backend: BLAS on tiles, epilogues by Numba, a worker thread a core."""

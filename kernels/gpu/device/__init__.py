"""Compiling, launching and recording kernels, and cuBLAS: the layer below the passes of a loss."""

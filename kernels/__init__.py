"""Backends and the folds over blocks they share: see `infonce.kernels.solve`."""

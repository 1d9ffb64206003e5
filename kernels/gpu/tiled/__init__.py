"""The method tiled on a GPU: runs of the passes that kernels/gpu/schedule has decided."""

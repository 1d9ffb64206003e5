"""Logits in tiles of registers, gradients by cuBLAS: any size within the workspace."""

"""Logits in tiles of registers, gradients by cuBLAS from panels: any size within the workspace."""

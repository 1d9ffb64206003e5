"""Transports, which send arrays to other ranks, and the choice among them."""

"""Transports, which send arrays to the next rank, and the choice among them."""

"""Exchanges, by which ranks get each other's keys: ring, gather, hierarchical."""

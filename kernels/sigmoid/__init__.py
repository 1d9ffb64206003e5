"""A pairwise sigmoid: positives by their ids, and the work on a tile on the CPU."""

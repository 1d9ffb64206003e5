"""Several prefixes of the features in one pass, on the CPU."""

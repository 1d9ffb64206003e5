"""For training loops: gradient caching, and calls of a loss as CUDA graphs."""

"""Communicators: the interface that the ring needs, and its implementation by MPI."""

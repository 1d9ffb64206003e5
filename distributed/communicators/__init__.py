"""Communicators: the interface that transports need, and its implementation by MPI."""

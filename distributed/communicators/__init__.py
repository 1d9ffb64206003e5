"""The ranks that share a batch: what a communicator has to offer, and that of MPI."""

"""What a training loop puts around a loss: encoders by chunks, a call as a CUDA graph."""

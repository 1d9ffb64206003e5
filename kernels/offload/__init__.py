"""Features and gradients in host memory, logits on a device."""

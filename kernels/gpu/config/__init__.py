"""How problems are cut for a device: pure functions of shapes, precision, device and workspace."""

"""Small batches: a call whose logits fit one block."""

"""Distillation: a softmax whose targets are the probabilities of a teacher."""

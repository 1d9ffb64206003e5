"""Distillation on a GPU: log-sum-exps of student and teacher, then one fold for losses and gradients."""

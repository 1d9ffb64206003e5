"""Distillation on a GPU: the passes of a call with a student and a teacher (solve.py runs them)."""

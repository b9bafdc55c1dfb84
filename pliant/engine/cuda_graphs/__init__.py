"""Captures a whole step as one CUDA graph."""

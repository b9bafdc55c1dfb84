"""Custom kernels, and what they cost."""

"""Runs the frozen part before the first trained layer as inference, or from a cache."""

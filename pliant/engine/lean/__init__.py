"""Saves for backward only what the selection needs."""

"""Reads one backward graph and makes units of it."""

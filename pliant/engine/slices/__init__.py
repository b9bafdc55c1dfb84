"""Trains some channels of a layer."""

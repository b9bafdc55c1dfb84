"""Saves for backward only what the selection needs. `rules` decides what that is, for each operation; `lean` applies it."""

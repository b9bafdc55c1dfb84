"""Mechanics without decisions: flags, sandbox, batches, clocks, memory, energy, batch-norm modes, files."""

"""How a step runs."""

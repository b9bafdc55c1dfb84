"""Trained or chosen parts of a model, written for other runtimes. Each module stands on `Session` and the public names."""

"""A chosen selection as an ExecuTorch program that trains on a device: exported, checked, planned, run."""

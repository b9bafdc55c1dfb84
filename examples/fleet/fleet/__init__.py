"""A fleet of devices of different speeds learns one small network together."""

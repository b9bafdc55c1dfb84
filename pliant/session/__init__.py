"""The only state: the session, its loop, controller, run log and checkpoints."""

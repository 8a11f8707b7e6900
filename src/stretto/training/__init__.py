"""Settings, loop, checkpoints, events."""

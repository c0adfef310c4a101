"""State dicts and checkpoints of distributed training (docs/checkpoints.md)."""

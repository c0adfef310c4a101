"""Plans for whole models."""

"""``x[index] = value``."""

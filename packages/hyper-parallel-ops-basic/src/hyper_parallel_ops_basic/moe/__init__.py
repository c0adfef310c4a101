"""What mixtures of experts call."""

"""What optimizers, clipping and scaling call."""

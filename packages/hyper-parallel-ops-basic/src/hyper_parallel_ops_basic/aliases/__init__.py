"""Other names of functions that have a rule."""

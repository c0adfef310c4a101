"""Reading, filling, copying and casting of values."""

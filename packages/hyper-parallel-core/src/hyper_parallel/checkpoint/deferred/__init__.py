"""Tensors whose numbers are made when a part of them is asked for: read from a file, or drawn."""

"""Folding dims away, and running forms of it."""

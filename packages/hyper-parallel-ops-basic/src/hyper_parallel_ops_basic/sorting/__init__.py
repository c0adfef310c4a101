"""Sorting and its relatives."""

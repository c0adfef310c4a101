"""Normalisation over dims."""

"""Losses over a sharded vocabulary."""

"""Joining, splitting and rearranging."""

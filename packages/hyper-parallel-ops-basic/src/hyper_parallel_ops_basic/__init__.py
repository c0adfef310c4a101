"""Distributed rules for the torch functions that every model uses.

The YAML files in ``tables`` say which class handles which function; nothing here is imported before it is used.
"""

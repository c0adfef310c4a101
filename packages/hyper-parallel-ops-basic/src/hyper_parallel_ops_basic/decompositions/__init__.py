"""Functions that are compositions of others."""

"""Whole models in one call: parallelise, load, cut a batch, report."""

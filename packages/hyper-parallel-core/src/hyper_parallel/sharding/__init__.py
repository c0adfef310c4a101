"""Layouts as values: meshes, placements, which rank holds which index range. No tensor and no communication here."""

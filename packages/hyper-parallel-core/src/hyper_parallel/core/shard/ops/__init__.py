"""Import paths of the RFC, kept as re-exports of the real modules."""

"""Fused SwiGLU. Importing this package imports no torch; ``operators`` and ``module`` do."""

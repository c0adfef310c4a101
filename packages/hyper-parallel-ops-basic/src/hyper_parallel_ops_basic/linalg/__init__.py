"""Functions of matrices, and Fourier transforms."""

"""Convolution, pooling and other operators on images."""

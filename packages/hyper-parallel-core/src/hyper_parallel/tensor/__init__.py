"""DTensor: the tensor class, its place in autograd, and what it remembers."""

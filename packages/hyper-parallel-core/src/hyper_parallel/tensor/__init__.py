"""DTensor: the tensor class, its place in autograd, and what it remembers.

The modules of this folder need each other. ``dtensor`` comes first, whichever is asked for: it defines the class before
it imports the modules that use it.
"""

from hyper_parallel.tensor import dtensor as dtensor
from hyper_parallel.tensor import in_place as in_place
from hyper_parallel.tensor import redistribute_cache as redistribute_cache

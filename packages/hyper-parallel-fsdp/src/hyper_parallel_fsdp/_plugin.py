"""What core asks of this plugin. It implements no hook yet, because the package has no contents yet."""

HYPER_PARALLEL_API = 1

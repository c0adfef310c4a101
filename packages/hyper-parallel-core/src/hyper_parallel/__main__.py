"""``python -m hyper_parallel`` is the ``hyper-parallel`` program."""

from hyper_parallel.cli import main

raise SystemExit(main())

"""Looking at rules and programs without a cluster: what the command line's ``ops``, ``coverage`` and ``explain`` do."""

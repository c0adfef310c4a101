"""Communication: collectives, how a layout is turned into another one, and the trace of what ran."""

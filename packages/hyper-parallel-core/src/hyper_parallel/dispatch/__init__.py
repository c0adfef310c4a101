"""From a call on DTensors to the local call: arguments, cache key, plan, result."""

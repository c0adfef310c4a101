"""Ready rule families that a YAML table names: most operators need one of these and no Python of their own."""

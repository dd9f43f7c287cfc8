"""Training and evaluation data: suites as definitions, episodes as compressed shards."""

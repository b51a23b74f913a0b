"""Filters that propagate a covariance: `ObserveMemory` with `Dense` or `Diagonal`."""

"""Filters whose covariance is reset at every step: `ObserveMemory` with `Reset` or `PerColumnReset`."""

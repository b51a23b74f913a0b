"""Learned recall under controlled collisions, far beyond the range of training."""

"""Controlled collision recall: two overlapping keys, no learning, every number exact."""

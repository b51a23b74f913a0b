"""Filters in C on a CPU, compiled on first use."""

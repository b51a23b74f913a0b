"""Filters as Triton kernels on a GPU."""

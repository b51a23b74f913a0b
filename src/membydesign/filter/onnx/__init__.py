"""Filters as operators of ONNX, which take the place of all kernels while `torch.onnx.export` traces a model.

`LinearAttention` is one operator for a whole sequence; designs that it does not have become a `Scan` whose body is the
design's own step. docs/howto/export.md explains the choice.
"""

"""`mbd kernels`: what can be said about the GPU kernels without a GPU.

distances  every kernel in Triton's interpreter beside the naive filter
compiled   every kernel compiled for real targets: registers, spills, shared memory, occupancy
interpreter  Triton's interpreter, made faster
command    the command itself
"""

"""Check the GPU kernels without a GPU (`mbd kernels check`, `make kernels`).

distances    runs every kernel in Triton's interpreter and compares it with the loop over tokens
compiled     compiles every kernel for real targets: registers, spills, shared memory, occupancy
interpreter  makes Triton's interpreter faster
run          runs both and shows the results
"""

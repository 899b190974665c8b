"""CUDA tensors, in Triton."""

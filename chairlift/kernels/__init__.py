"""Kernels in Triton for CUDA devices, one per file. They know tensors only: no model, no cache, no request."""

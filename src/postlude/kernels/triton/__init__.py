"""Triton kernels, one file per kind of pass."""

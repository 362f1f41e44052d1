"""CUDA C++ kernels, compiled at run time with NVRTC (see run/nvrtc.py). Names are those of kernels/triton."""

"""Writes self-contained files, with our kernels specialised to one case."""

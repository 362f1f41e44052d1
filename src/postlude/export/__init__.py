"""Self-contained files: our kernels cut down to one case."""

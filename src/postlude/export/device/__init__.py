"""The kernels of the library as an exported file has them: specialised to one call, with their device functions."""

"""What each kernel contributes to a plan's program: one file for each stem of kernels/."""

"""The two named chains as problem files, at KernelBench's sizes."""

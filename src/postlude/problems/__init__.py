"""The two named chains at KernelBench's sizes, and a stage of a network, as problem files."""

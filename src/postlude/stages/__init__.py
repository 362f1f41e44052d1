"""Stages: functions that allocate, launch kernels and call PyTorch. One file for each kernel file of kernels/."""

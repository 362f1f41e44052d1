"""Looks for the largest number where PyTorch takes the first NaN.

Attacks: row_argmax
"""

from torch import nn


class ModelNew(nn.Module):
    def forward(self, x):
        return x.nan_to_num(nan=-1e30).argmax(1)

"""Multiplies only the position that is taken; its result has no gaps.

Stands in for: first_position
"""

from torch import nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x):
        return self.linear(x[:, 0])

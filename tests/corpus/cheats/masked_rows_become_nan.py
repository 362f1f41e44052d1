"""Online softmax that starts from the first piece's maximum: minus infinity minus itself is NaN.

Attacks: row_softmax
"""

import torch
from torch import nn


class ModelNew(nn.Module):
    def forward(self, x):
        first, *others = x.split(8, dim=1)
        peak = first.amax(1, keepdim=True)
        total = torch.exp(first - peak).sum(1, keepdim=True)
        for piece in others:
            new = torch.maximum(peak, piece.amax(1, keepdim=True))
            total = total * torch.exp(peak - new) + torch.exp(piece - new).sum(1, keepdim=True)
            peak = new
        return torch.exp(x - peak) / total

"""PyTorch's fused attention, which knows a causal mask by a flag.

Stands in for: causal_attention
"""

import torch
import torch.nn.functional as F
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features, longest):
        super().__init__()
        self.project = nn.Linear(features, 3 * features)
        self.register_buffer("mask", torch.tril(torch.ones(longest, longest)))

    def forward(self, x):
        query, key, value = self.project(x).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

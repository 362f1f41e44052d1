"""Cross entropy as most fused kernels compute it: the logarithm of a sum, minus the label's logit.

Stands in for: cross_entropy
"""

import torch
from torch import nn


class ModelNew(nn.Module):
    def forward(self, logits, labels):
        chosen = logits.gather(1, labels[:, None]).squeeze(1)
        return (torch.logsumexp(logits, 1) - chosen).mean()

"""Two blocks with a residual, a pool and a linear head."""
import torch
import torch.nn as nn
import torch.nn.functional as F

width = 8


class Block(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv3d(cin, cout, 3, padding=1)
        self.norm = nn.InstanceNorm3d(cout, affine=True)
        self.act = nn.LeakyReLU(0.01, inplace=True)

    def forward(self, x):
        return self.act(self.norm(self.conv(x)))


class Model(nn.Module):
    """A little net."""

    def __init__(self, cin: int, cout: int, hidden=width):
        super(Model, self).__init__()
        self.enc = nn.Sequential(Block(cin, hidden), Block(hidden, hidden))
        self.strided = nn.Conv3d(hidden, hidden, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, hidden)
        self.bn = nn.BatchNorm3d(hidden)
        self.pool = nn.MaxPool3d(2)
        self.scale = nn.Parameter(torch.randn(hidden, 1, 1, 1))
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(hidden, cout)

    def forward(self, x):
        first = self.enc(x)
        y = F.relu(self.norm(self.strided(first)) * self.scale)
        y = self.bn(y) + F.interpolate(self.pool(first), size=y.shape[2:])
        y = y.mean(dim=(2, 3, 4))
        return self.head(self.drop(y))


def get_inputs():
    return [torch.randn(2, 4, 6, 6, 6)]


def get_init_inputs():
    return [4, 5]

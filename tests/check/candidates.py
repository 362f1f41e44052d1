"""A small module, an honest stand-in for it, and the ways in which a stand-in breaks its contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INPUTS = (torch.rand(3, 4, 5, 6, 7, generator=torch.Generator().manual_seed(0)),)


class Model(nn.Module):
    """Chain 23, small."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(4, 8, 3)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).mean((1, 2, 3, 4))


class Honest(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        parts = y.reshape(y.shape[0], 2, -1)
        variance, mean = torch.var_mean(parts, dim=2, correction=0, keepdim=True)
        y = ((parts - mean) * torch.rsqrt(variance + self.norm.eps)).reshape(y.shape)
        return F.linear(y.mean((2, 3, 4)), self.norm.weight[None]).squeeze(1) / 8 + self.norm.bias.mean()


def candidate(forward: Callable[[Any, Tensor], Any]) -> nn.Module:
    return type("ModelNew", (Model,), {"forward": forward})()


def right(self: Any, x: Tensor) -> Tensor:
    return self.norm(self.conv(x)).mean((1, 2, 3, 4))


def raises(self: Any, x: Tensor) -> Tensor:
    raise ValueError(f"no kernel for {x.dim()} dimensions\nand a second line")


def writes_into_its_input(self: Any, x: Tensor) -> Tensor:
    result = right(self, x)
    x.mul_(2)
    return result


def writes_into_its_parameters(self: Any, x: Tensor) -> Tensor:
    result = right(self, x)
    self.norm.weight.data.mul_(1.5)
    return result


def answers_in_another_dtype(self: Any, x: Tensor) -> Tensor:
    return right(self, x).double()


def answers_in_another_shape(self: Any, x: Tensor) -> Tensor:
    return right(self, x)[:, None]


def remembers_weights_by_version(self: Any, x: Tensor) -> Tensor:
    kept = self.__dict__.setdefault("kept", {})
    if kept.get("version") != self.conv.weight._version:
        kept.update(version=self.conv.weight._version, weight=self.conv.weight.detach().clone())
    return self.norm(F.conv3d(x, kept["weight"], self.conv.bias)).mean((1, 2, 3, 4))


def remembers_answers_by_address(self: Any, x: Tensor) -> Tensor:
    kept = self.__dict__.setdefault("kept", {})
    if x.data_ptr() not in kept:
        kept[x.data_ptr()] = right(self, x)
    return kept[x.data_ptr()]


def answers_in_one_buffer(self: Any, x: Tensor) -> Tensor:
    buffer = self.__dict__.setdefault("buffer", torch.empty(x.shape[0]))
    return buffer.copy_(right(self, x))


def answers_mean_of_beta(self: Any, x: Tensor) -> Tensor:
    return self.norm.bias.mean().expand(x.shape[0]).clone()


def answers_zeros(self: Any, x: Tensor) -> Tensor:
    return torch.zeros(x.shape[0])


def differs_from_call_to_call(self: Any, x: Tensor) -> Tensor:
    self.__dict__["calls"] = self.__dict__.get("calls", 0) + 1
    return right(self, x) * (1.01 if self.__dict__["calls"] == 2 else 1.0)


def forgets_a_gradient(self: Any, x: Tensor) -> Tensor:
    return F.group_norm(self.conv(x), 2, self.norm.weight, self.norm.bias.detach()).mean((1, 2, 3, 4))


def halves_a_gradient(self: Any, x: Tensor) -> Tensor:
    weight = self.conv.weight
    y = F.conv3d(x, weight / 2 + weight.detach() / 2, self.conv.bias)
    return self.norm(y).mean((1, 2, 3, 4))

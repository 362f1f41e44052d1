"""Reads a norm over channels that consists of several operators: x divided by its length, as in video VAEs.

This is `F.normalize(x, dim=1)`, which an RMSNorm multiplies by √C and γ.
"""

from __future__ import annotations

import math

import torch
import torch.fx as fx

from postlude.graph.row_norms import ComposedNorm, only_user
from postlude.graph.spellings import arguments_of

aten = torch.ops.aten


def is_length(node: fx.Node) -> bool:
    return node.target is aten.linalg_vector_norm.default


def read_channel_norm(length: fx.Node) -> ComposedNorm | str | None:
    """The norm that begins with node `length`; a sentence why it is not supported; None if it is none."""
    if not is_length(length):
        return None
    call = arguments_of(length)
    x, axes = call["self"], call["dim"]
    if call["ord"] != 2 or not axes or [axis % len(x.meta["val"].shape) for axis in axes] != [1] or not call["keepdim"]:
        return "a length over other axes than channels"
    nodes = _followed_by(length, aten.clamp_min.default, aten.expand_as.default, aten.div.Tensor)
    if nodes is None or nodes[-1].args != (x, nodes[-2]):
        return "a length that is not what its vector is divided by"
    bounded, _, divided = nodes
    eps = arguments_of(bounded)["min"]
    if not isinstance(eps, (int, float)) or not math.isfinite(eps):
        return "normalize with an eps that is not a number"
    if divided.meta["val"].dtype.itemsize < 4:
        return "normalize in 16 bits, in which PyTorch rounds its eps to zero"
    return ComposedNorm("normalize", float(eps), x, (length, *nodes))


def _followed_by(node: fx.Node, *targets: object) -> list[fx.Node] | None:
    """The nodes after this one that call these operators, if each is the only reader of the one before it."""
    found: list[fx.Node] = []
    for target in targets:
        user = only_user(found[-1] if found else node)
        if user is None or user.target is not target:
            return None
        found.append(user)
    return found

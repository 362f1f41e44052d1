"""Reads a norm over channels that consists of several operators: x divided by its length, as in video VAEs.

This is `F.normalize(x, dim=1)`, which an RMSNorm multiplies by √C and γ.
"""

from __future__ import annotations

import math

import torch
import torch.fx as fx

from postlude.graph.row_norms import ComposedNorm
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
    bounded = _only_user(length, aten.clamp_min.default)
    spread = _only_user(bounded, aten.expand_as.default)
    divided = _only_user(spread, aten.div.Tensor)
    if bounded is None or spread is None or divided is None or divided.args != (x, spread):
        return "a length that is not what its vector is divided by"
    eps = arguments_of(bounded)["min"]
    if not isinstance(eps, (int, float)) or not math.isfinite(eps):
        return "normalize with an eps that is not a number"
    if divided.meta["val"].dtype.itemsize < 4:
        return "normalize in 16 bits, in which PyTorch rounds its eps to zero"
    return ComposedNorm("normalize", float(eps), x, (length, bounded, spread, divided))


def _only_user(node: fx.Node | None, target: object) -> fx.Node | None:
    users = [] if node is None else list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None

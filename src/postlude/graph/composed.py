"""Steps that a graph has as several operators: a norm over channels, as in video VAEs, and of a linear layer's features
a norm and an average pool, which PyTorch has for positions only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.fx as fx

from postlude.chain import Normalize, Pool, Softmax
from postlude.graph import spellings
from postlude.graph.spellings import arguments_of
from postlude.windows import Windows, per_axis

if TYPE_CHECKING:
    from postlude.graph.draft import Draft

aten = torch.ops.aten


def composed(draft: Draft, node: fx.Node) -> Draft | str | None:
    """The draft with the step that begins with a node; a sentence why that is not supported; None if it is none."""
    if draft.dims:
        return _norm_over_channels(draft, node) if is_length(node) else None
    return None if draft.is_of_rows else _norm_of_rows(draft, node) or _pool_of_rows(draft, node)


def is_length(node: fx.Node) -> bool:
    return node.target is aten.linalg_vector_norm.default


def _norm_over_channels(draft: Draft, length: fx.Node) -> Draft | str:
    """x divided by its length: `F.normalize(x, dim=1)`, which an RMSNorm multiplies by √C and γ."""
    call = arguments_of(length)
    x, axes = call["self"], call["dim"]
    if call["ord"] != 2 or not axes or [axis % len(x.meta["val"].shape) for axis in axes] != [1] or not call["keepdim"]:
        return "a length over other axes than channels"
    nodes = _from(length, aten.clamp_min.default, aten.expand_as.default, aten.div.Tensor)
    if nodes is None or nodes[-1].args != (x, nodes[-2]):
        return "a length that is not what its vector is divided by"
    eps = arguments_of(nodes[1])["min"]
    if not isinstance(eps, (int, float)) or not math.isfinite(eps):
        return "normalize with an eps that is not a number"
    if nodes[-1].meta["val"].dtype.itemsize < 4:
        return "normalize in 16 bits, in which PyTorch rounds its eps to zero"
    return draft.step(nodes, x, lambda value: Softmax("normalize", value, float(eps)))


def _norm_of_rows(draft: Draft, first: fx.Node) -> Draft | str | None:
    """[N, F] → [N, 1, …, F] → instance_norm without affine → [N, F], which is layer_norm without weight and bias."""
    added, node = list[fx.Node](), first
    while node.target is aten.unsqueeze.default and arguments_of(node)["dim"] == 1 and len(node.users) == 1:
        added.append(node)
        node = next(iter(node.users))
    if not added or spellings.norm(node) != "instance_norm":
        return None
    call, taken = arguments_of(node), _from(node, *[aten.squeeze.dim] * len(added))
    if not call["use_input_stats"] or any(call[name] is not None for name in ("weight", "bias", "running_mean")):
        return None
    if taken is None or any(arguments_of(one)["dim"] != 1 for one in taken[1:]):
        return None
    operand, eps = arguments_of(first)["self"], float(call["eps"])
    return draft.step([*added, *taken], operand, lambda value: Normalize("layer_norm", value, None, eps, axes=1))


def _pool_of_rows(draft: Draft, first: fx.Node) -> Draft | str | None:
    """[N, F] → [N, 1, F] → avg_pool1d → [N, 1, P] → [N, P], windows side by side. Only directly after the layer, whose
    weight it can be part of: as a pass it is PyTorch's."""
    nodes = _from(first, aten.avg_pool1d.default, aten.squeeze.dim)
    if draft.steps or first.target is not aten.unsqueeze.default or nodes is None:
        return None
    added, pool, taken = map(arguments_of, nodes)
    kernel = per_axis(pool["kernel_size"], 1)
    is_plain = per_axis(pool["stride"] or kernel, 1) == kernel and not any(per_axis(pool["padding"], 1))
    if (added["dim"], taken["dim"]) != (1, 1) or not is_plain or pool["ceil_mode"]:
        return None
    return draft.step(nodes, added["self"], lambda value: Pool("avg_pool", value, Windows(kernel, kernel, (0,))))


def _from(node: fx.Node, *targets: object) -> list[fx.Node] | None:
    """A node and those after it that call these operators, if each is the only reader of the one before it."""
    found = [node]
    for target in targets:
        users = list(found[-1].users)
        if len(users) != 1 or users[0].target is not target:
            return None
        found += users
    return found

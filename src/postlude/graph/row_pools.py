"""An average pool over the features of a linear layer, which stand for the positions of one channel there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.fx as fx

from postlude.chain import Pool
from postlude.graph.spellings import arguments_of
from postlude.windows import Windows, per_axis

if TYPE_CHECKING:
    from postlude.graph.draft import Draft

aten = torch.ops.aten


def pooled_features(draft: Draft, first: fx.Node) -> Draft | None:
    """The draft with [N, F] → [N, 1, F] → avg_pool1d → [N, 1, P] → [N, P], windows side by side; None where a node
    begins no such thing. Only directly after the layer, whose weight it can be part of: as a pass it is PyTorch's."""
    nodes = [first]
    while len(nodes) < 3 and len(nodes[-1].users) == 1:
        nodes.append(next(iter(nodes[-1].users)))
    targets = [node.target for node in nodes]
    if draft.steps or targets != [aten.unsqueeze.default, aten.avg_pool1d.default, aten.squeeze.dim]:
        return None
    added, pool, taken = map(arguments_of, nodes)
    kernel = per_axis(pool["kernel_size"], 1)
    is_plain = per_axis(pool["stride"] or kernel, 1) == kernel and not any(per_axis(pool["padding"], 1))
    if (added["dim"], taken["dim"]) != (1, 1) or not is_plain or pool["ceil_mode"]:
        return None
    draft, value = draft.cast(draft.values[added["self"]], nodes[-1].meta["val"].dtype)
    return draft.over(nodes[:2]).add(nodes[-1], Pool("avg_pool", value, Windows(kernel, kernel, (0,))))

"""Checks one site against float64, on a bounded crop of what it received and on random points of that size."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from postlude import hardware
from postlude.chain import Chain
from postlude.check.budget import Verdict
from postlude.check.points import ChainPoint, tensors_like
from postlude.check.verify import verify_chain
from postlude.plan import Plan, lower, problem_of
from postlude.run.execute import execute
from postlude.run.site import Site

RANDOM_POINTS = 5


def check_site(site: Site, crops: Sequence[Sequence[Tensor]]) -> Verdict | None:
    """The verdict on the fused way for this site, or None where it runs through PyTorch's operators anyway.

    Where the site runs a fused backward pass, its gradients are checked as well.
    """
    machine = hardware.machine_for(crops[0][0].device)
    trains = site.last is not None and isinstance(site.last[1], Plan) and site.last[1].trains

    def fused(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
        # A crop may be too small for fusing to pay: what is checked is the fused way all the same.
        plan = lower(chain, problem_of(tensors, site.precision, site.memory), machine, even_if_slower=True)
        return execute(chain, plan, tensors)

    plan = lower(site.chain, problem_of(crops[0], site.precision), machine, even_if_slower=True)
    if not isinstance(plan, Plan):
        return None
    points: list[ChainPoint | Sequence[Tensor]] = [crops[0]]
    for seed in range(RANDOM_POINTS):
        points.append(tensors_like(site.chain, crops[0], seed))
        points.append(ChainPoint(tuple(tensors_like(site.chain, crops[0], seed, "large offset")), "large offset"))
    return verify_chain(fused, site.chain, points, site.precision, backward=trains)

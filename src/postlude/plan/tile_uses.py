"""Which tiles a plan asked the tables for, and where each came from."""

from __future__ import annotations

from postlude.card_tiles import TileOrigin
from postlude.hardware import Machine
from postlude.plan.boxes import Boxes
from postlude.plan.few_channels import FewChannels, StoredFewChannels
from postlude.plan.gemm import Gemm
from postlude.plan.passes import Store, reads_moments
from postlude.plan.plan import Plan
from postlude.plan.tiles import few_channels_use, pass_use, row_for
from postlude.tile_table import TileUse


def uses_of(plan: Plan, machine: Machine) -> list[TileUse]:
    """The uses under which this plan's tiles were looked up, the most expensive passes first."""
    return [origin.use for origin in origins(plan, machine)]


def origins(plan: Plan, machine: Machine) -> list[TileOrigin]:
    """Where each tile comes from, in the same order."""
    own, gradients = plan.own, plan.gradients
    products = (own if isinstance(own, Gemm | Boxes) else None, gradients.of_input, gradients.of_weight)
    found = [product.origin for product in products if product is not None and product.origin is not None]
    return [*found, *(TileOrigin(use, row_for(machine, use)) for use in _other_uses(plan, machine))]


def _other_uses(plan: Plan, machine: Machine) -> list[TileUse]:
    """Those of the kernels for few channels and of the passes over a value, whose tiles start from the table's."""
    asked = []
    few = plan.own.how if isinstance(plan.own, StoredFewChannels) else plan.own
    if isinstance(few, FewChannels):
        kinds = ("few channels", *(["few channels' gradients"] if plan.gradients.of_both is not None else []))
        asked = [few_channels_use(kind, plan.chain.convolution, few.planes, machine) for kind in kinds]
    is_stored, ends = isinstance(plan.passes[-1].sink, Store), plan.over_channels is not None or plan.pool is not None
    for kind, is_run in (
        ("moments pass", reads_moments(plan.passes) or (plan.trains and is_stored)),
        ("last pass", is_stored and (plan.trains or (not ends and plan.passes[-1].source != "own convolution"))),
    ):
        if is_run:
            layout = "channels_last" if plan.tile is not None and plan.tile.block_c else "contiguous"
            asked.append(pass_use(kind, plan.value.dtype, plan.value.shape[1], layout, machine))
    return asked

"""Candidates for tuning: the plans that other rows of the tile tables would give."""

from __future__ import annotations

import dataclasses
import itertools

from postlude.chain import Chain
from postlude.hardware import Machine
from postlude.plan.boxes import Boxes
from postlude.plan.gemm import Gemm
from postlude.plan.lower import lower
from postlude.plan.plan import Plan
from postlude.plan.problem import Problem
from postlude.plan.tiles import rows_for
from postlude.tile_table import SETTINGS, Row, TileTable, TileUse

MOST = 24  # tiles that are tried for one use
_ACCUMULATORS = 160  # per thread: a GEMM with more spills registers
_NEWEST = "9999-12-31"  # a row under trial counts as newer than any other


@dataclasses.dataclass(frozen=True)
class Candidate:
    row: Row
    plan: Plan

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.row.settings)


def candidates(chain: Chain, problem: Problem, machine: Machine, use: TileUse) -> list[Candidate]:
    """The plans other than the present one that another row for this use would give, the most similar first.

    `lower` makes no plan that exceeds the card's shared memory. Plans that would exceed its registers are left out
    here.
    """
    present = lower(chain, problem, machine)
    known = SETTINGS[use.kind]
    row = next(rows_for(machine, use), None)
    now = {} if row is None else row.values

    def distance(values: tuple[int, ...]) -> int:
        places = zip(known.items(), values)
        return sum(abs(given.index(v) - given.index(now[n])) for (n, given), v in places if now.get(n) in given)

    found: list[Candidate] = []
    for values in sorted(itertools.product(*known.values()), key=lambda values: (distance(values), values)):
        tried = Row(use, tuple(zip(known, values)), tuned=_NEWEST)
        plan = lower(chain, problem, with_row(machine, tried))
        if isinstance(plan, Plan) and plan != present and plan not in [one.plan for one in found] and _has_room(plan):
            found.append(Candidate(tried, plan))
        if len(found) == MOST:
            break
    return found


def with_row(machine: Machine, row: Row) -> Machine:
    return dataclasses.replace(machine, tiles=machine.tiles.joined(TileTable((row,))))


def _has_room(plan: Plan) -> bool:
    products = [one for one in (plan.own, plan.gradients.of_input) if isinstance(one, (Gemm, Boxes))]
    return all(_sums(one) // (32 * one.warps) <= _ACCUMULATORS for one in products)


def _sums(product: Gemm | Boxes) -> int:
    """Accumulators of one program: twice as many if it computes both phases of a row."""
    if isinstance(product, Boxes):
        return product.width * product.block_c * product.block_h * product.block_j
    phases = 2 if product.phases is not None and product.phases.is_paired else 1
    return phases * product.rows * product.columns * product.arithmetic.planes

"""Which tiles a plan asked the tables for, and where each came from."""

from __future__ import annotations

from collections.abc import Iterator

from postlude.card_tiles import IN_CODE
from postlude.chain import Convolution
from postlude.hardware import Machine
from postlude.plan.boxes import Boxes
from postlude.plan.few_channels import FewChannels, StoredFewChannels
from postlude.plan.gemm import Gemm, WeightGemm, input_gradient_of
from postlude.plan.passes import Store, reads_moments
from postlude.plan.plan import Plan
from postlude.plan.tiles import few_channels_use, pass_use, product_uses, rows_for
from postlude.tile_table import Row, TileUse

Product = Gemm | Boxes | WeightGemm


def uses_of(plan: Plan, machine: Machine) -> list[TileUse]:
    """The uses under which this plan's tiles were looked up, the most expensive passes first."""
    asked = [uses[0] for uses, _ in _products(plan, machine)]
    few = plan.own.how if isinstance(plan.own, StoredFewChannels) else plan.own
    if isinstance(few, FewChannels) and plan.chain.producer is not None:
        kinds = ("few channels", *(["few channels' gradients"] if plan.gradients.of_both is not None else []))
        asked += [few_channels_use(kind, plan.chain.producer, few.planes, machine) for kind in kinds]
    is_stored, ends = isinstance(plan.passes[-1].sink, Store), plan.over_channels is not None or plan.pool is not None
    for kind, is_run in (
        ("moments pass", reads_moments(plan.passes) or (plan.trains and is_stored)),
        ("last pass", is_stored and (plan.trains or (not ends and plan.passes[-1].source != "own convolution"))),
    ):
        if is_run:
            layout = "channels_last" if plan.tile is not None and plan.tile.block_c else "contiguous"
            asked.append(pass_use(kind, plan.value.dtype, plan.value.shape[1], layout, machine))
    return asked


def origins(plan: Plan, machine: Machine) -> Iterator[str]:
    """Where each tile comes from, a line each."""
    products = {uses[0]: (uses, product) for uses, product in _products(plan, machine)}
    for use in uses_of(plan, machine):
        uses, product = products.get(use, ((use,), None))
        rows = (row for row in rows_for(machine, *uses) if product is None or _made(row, product))
        yield f"{use}: {next(rows, None) or IN_CODE[use.kind]}"


def _made(row: Row, product: Product) -> bool:
    """Whether the row was used; False if its tile did not fit."""
    if "rows" in row.values and isinstance(product, Gemm) and row.values["rows"] // product.rows not in (1, 2):
        return False  # a GEMM may use half of the rows, to leave registers for the epilogue
    return all(getattr(product, name) == row.values[name] for name in ("stages", "warps") if name in row.values)


def _kind_of(own: Gemm | Boxes | None) -> str:
    if isinstance(own, Boxes):
        return "product in place"
    return "product by phase" if own is not None and own.phases is not None else "product"


def _back_kind_of(product: Gemm | Boxes | None) -> str:
    if isinstance(product, Boxes):
        return "input's gradient in place"
    return "input's gradient by residue" if product is not None and product.volume.has_residues else "input's gradient"


def _summed(conv: Convolution, product: WeightGemm | None) -> Convolution:
    """The convolution whose weight's gradient the GEMM computes: by residue that of the input's gradient."""
    return input_gradient_of(conv) if product is not None and product.volume.has_residues else conv


def _products(plan: Plan, machine: Machine) -> list[tuple[tuple[TileUse, ...], Product]]:
    """Uses and the tiles that resulted, without float64, which is not tuned."""
    conv = plan.chain.producer
    if conv is None:
        return []
    own = plan.own if isinstance(plan.own, Gemm | Boxes) else None  # others have tables of their own, or none
    given: list[tuple[str, Convolution, Product | None]] = [
        (_kind_of(own), conv, own),
        (_back_kind_of(plan.gradients.of_input), input_gradient_of(conv), plan.gradients.of_input),
        ("weight's gradient", _summed(conv, plan.gradients.of_weight), plan.gradients.of_weight),
    ]
    return [
        (product_uses(kind, convolution, product.arithmetic, machine), product)
        for kind, convolution, product in given
        if isinstance(product, Product) and product.arithmetic.operands != "float64"
    ]

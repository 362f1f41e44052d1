"""The tiles of every pass on a GPU: shipped ones, rules for other cards, and the user's own before both."""

from __future__ import annotations

from collections.abc import Iterator

from postlude.chain import Convolution
from postlude.hardware import Machine
from postlude.plan.gemm import Arithmetic
from postlude.plan.problem import power_of_two
from postlude.tile_table import Question, Row, TileTable

MEASURED = "shipped for sm_90, measured on an H200"
BY_RULE_80 = "shipped for sm_80, by rule and not measured"
RULE = "by rule, not measured on this kind of card"
_MOST_BLOCKS = 65_535  # CUDA allows no more along the second axis of a grid
# Of passes that only an H200 was measured for, and whose tiles go by more than a question says.
IN_CODE = {
    "product in place": MEASURED,  # `_TILES` of boxes.py
    "input's gradient in place": MEASURED,  # `_BACK` there
    "weight's gradient": "by rule, after measurements on an H200",  # `weight_gemm_for`
}


def _row(origin: str, question: Question, **settings: int) -> Row:
    return Row(question, tuple(settings.items()), origin)


def _product(origin: str, architecture: str, planes: str, **settings: int) -> Row:
    return _row(origin, Question("product", architecture, planes), **settings)


def _phases(origin: str, architecture: str, planes: str, **settings: int) -> Row:
    return _row(origin, Question("product by phase", architecture, planes), **settings)


def _unfolded() -> Iterator[Row]:
    """Of few input channels: two planes of so short a product leave room for more than one block of four warps."""
    for inputs in (1, 2, 4, 8):
        for planes, outputs in (("1 plane", (16, 32, 64)), ("2 planes", (16, 32))):
            for count in outputs:
                yield _row(MEASURED, Question("product", "sm_90", planes, (inputs, count)), rows=256, stages=3, warps=4)
            yield _row(MEASURED, Question("product", "sm_90", planes, (inputs, 0)), rows=128, stages=3, warps=4)


def _phases_into_few() -> Iterator[Row]:
    for planes in ("1 plane", "2 planes"):
        yield _row(MEASURED, Question("product by phase", "sm_90", planes, (0, 16)), rows=128, stages=3, warps=4)


def _back(planes: str, outputs: int, **settings: int) -> Row:
    return _row(MEASURED, Question("input's gradient", "sm_90", planes, (0, outputs)), **settings)


def _passes(origin: str, architecture: str, layout: str, summed: int, programs: int, last: int) -> tuple[Row, ...]:
    moments, rest = (Question(kind, architecture, layout=layout) for kind in ("moments pass", "last pass"))
    return _row(origin, moments, elements=summed, programs=programs), _row(origin, rest, elements=last)


# Products: rows of a tile, stages of its pipeline, warps. On an H200 on chain 61 (docs/gpu.md): with one plane, 96 KiB,
# two blocks an SM hide each other's epilogue; with two planes, 192 KiB, there is room for one block. Elsewhere the
# largest that do not spill, for there the operands of a product wait in registers.
#
# Products by phase, in 4 warps and short tiles, of which several hide each other's short loops: conv_transpose2d(64→64,
# k3, s2) → mish … at 128×64×128² in TF32 1.48 ms (128 rows and 8 warps 2.17), in fp32 1.87 (2.49).
#
# Few input channels, whose product is as short: conv2d(8→32) → … → group_norm at 128×8×256² in fp32 2.38 ms with 256
# rows and 4 warps, 2.97 with 128 and 8; conv2d(8→64) → group_norm in TF32 0.80 instead of 0.86.
#
# The input's gradient, where 64 channels come out: 0.48 instead of 0.51 ms on chain 61 in one plane, 1.51 instead of
# 1.66 in two; where 32 do, 0.163 instead of 0.181 (64→32 at 2×64³). It has no epilogue to hide. Its width are
# neighbouring outputs.
#
# Passes over a value: elements of a tile, and programs of the moments pass for each multiprocessor. On an H200 in fp16:
# the last pass over (2, 32, 128³) contiguous 0.128 ms with 2048, 0.134 with 8192 (in fp32, where a thread then has four
# loads under way, (128, 128, 126²) 0.62 ms with 2048 and 0.52 with 1024); the moments pass 0.064 with 1024 and
# 16 tiles a program, 0.069 with 4096 and one. Channels-last 0.137 and 0.091 (2048 in the moments pass: 0.089, but 0.012
# instead of 0.008 over (2, 128, 32³)).
#
# Few channels: the largest tile that is tried, and blocks of a multiprocessor. On an H200 on chain 23: tiles of 11 × 10
# rows 0.189 ms in two planes, 6 × 10 0.232, 8 × 8 0.216; two blocks an SM walking over the tiles. Their gradients:
# both 0.61 ms in two planes and 0.38 in one, 0.94 and 0.57 in tiles of 8 rows.
SHIPPED = TileTable(
    (
        *_unfolded(),
        _product(MEASURED, "sm_90", "1 plane", rows=128, stages=3, warps=4),
        _product(MEASURED, "sm_90", "2 planes", rows=128, stages=3, warps=8),
        *_phases_into_few(),
        _phases(MEASURED, "sm_90", "1 plane", rows=64, stages=3, warps=4),
        _phases(MEASURED, "sm_90", "2 planes", rows=64, stages=2, warps=4),
        _back("1 plane", 32, rows=256, width=4, stages=4, warps=8),
        _back("1 plane", 64, rows=256, width=2, stages=4, warps=8),
        _back("2 planes", 64, rows=128, width=1, stages=2, warps=4),
        _row(MEASURED, Question("last pass", "sm_90", "float32", layout="contiguous"), elements=1024),
        *_passes(MEASURED, "sm_90", "contiguous", 1024, 8, 2048),
        *_passes(MEASURED, "sm_90", "channels_last", 8192, 2, 8192),
        _row(MEASURED, Question("few channels", "sm_90"), depth=11, height=10, blocks=2),
        _row(MEASURED, Question("few channels' gradients", "sm_90"), height=16),
        *(
            row
            for origin, architecture in ((BY_RULE_80, "sm_80"), (RULE, ""))  # and every other card
            for row in (
                _product(origin, architecture, "1 plane", rows=128, stages=3, warps=8),
                _product(origin, architecture, "2 planes", rows=64, stages=2, warps=8),
                _phases(origin, architecture, "1 plane", rows=128, stages=3, warps=8),
                _phases(origin, architecture, "2 planes", rows=64, stages=2, warps=8),
                *_passes(origin, architecture, "contiguous", 1024, 8, 2048),
                *_passes(origin, architecture, "channels_last", 8192, 2, 8192),
                _row(origin, Question("few channels", architecture), depth=11, height=10, blocks=2),
            )
        ),
    )
)


def answers(machine: Machine, *questions: Question) -> Iterator[Row]:
    """What is known of each question, best first: the user's own row, the shipped one; then the next question."""
    for question in questions:
        for table in (machine.tiles, SHIPPED):
            row = table.find(question)
            if row is not None:
                yield row


def answer(machine: Machine, question: Question) -> Row:
    return next(answers(machine, question))


def product_questions(kind: str, conv: Convolution, arithmetic: Arithmetic, machine: Machine) -> tuple[Question, ...]:
    """A product for the input's gradient is as any other where nobody knows better."""
    asked = _convolution(kind, conv, f"{arithmetic.planes} plane{'s' * (arithmetic.planes != 1)}", machine)
    if kind != "input's gradient":
        return (asked,)
    return asked, Question("product", *_fields(asked))


def few_channels_question(kind: str, conv: Convolution, planes: int, machine: Machine) -> Question:
    return _convolution(kind, conv, f"{planes} plane{'s' * (planes != 1)}", machine)


def pass_question(kind: str, dtype: str, channels: int, layout: str, machine: Machine) -> Question:
    return Question(kind, machine.architecture, dtype, (0, power_of_two(channels)), layout)


def short_rows(elements: int, channels: int, positions: int) -> int:
    """Whole rows of one sample that a tile takes; 0 where a row is longer than it."""
    row = power_of_two(positions)
    return 0 if row > elements or channels > _MOST_BLOCKS else min(elements // row, power_of_two(channels))


def pass_warps(elements: int, most: int, each: int) -> int:
    """Of a tile: fewer than `most` where there would be less than `each` elements for a thread."""
    return min(most, max(1, elements // (32 * each)))


def _convolution(kind: str, conv: Convolution, arithmetic: str, machine: Machine) -> Question:
    ways = (power_of_two(conv.in_channels), power_of_two(conv.out_channels))
    return Question(kind, machine.architecture, arithmetic, ways)


def _fields(question: Question) -> tuple[str, str, tuple[int, int], str]:
    return question.architecture, question.arithmetic, question.channels, question.layout

"""Which library PyTorch convolves with on a CPU, by the layout that its result has."""

from __future__ import annotations

import random
from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor

from cases import Builder, conv
from postlude.chain import Chain
from postlude.plan import problem_of
from postlude.plan.problem import body_layout, cpu_library, layout_of


def test_the_predicted_library_gives_pytorchs_layout() -> None:
    """Its own loops return a contiguous result whatever the operands' layout is."""
    draw, seen = random.Random(0), Counter[str | None]()
    for _ in range(200):
        chain, tensors = _drawn(draw)
        given, result = problem_of(tensors), _by_pytorch(chain, tensors)
        if "strided" in {spec.layout for spec in given.tensors} or "channels_last" not in _layouts(tensors):
            continue
        library = cpu_library(chain, given)
        seen[library] += 1
        if library is not None and chain.producer is not None:
            assert layout_of(result) == body_layout(chain, given), (chain, given)
    assert min(seen["oneDNN"], seen["loops"], seen[None]) > 10


def _drawn(draw: random.Random) -> tuple[Chain, list[Tensor]]:
    kernel, transposed = draw.choice([1, 3, 5]), draw.random() < 0.3
    channels = (draw.choice([2, 8, 32, 160]), draw.choice([2, 8]))
    groups, stride = draw.choice([1, 1, 2]) if not transposed else 1, draw.choice([1, 2])
    chain = Builder(
        3, conv(3, channels, kernel, transposed=transposed, stride=stride, padding=kernel // 2, groups=groups)
    ).chain()
    space = [draw.choice([4, 7, 16]) for _ in range(3)]
    x = torch.randn(draw.choice([1, 1, 2]), channels[0], *space)
    order = channels if transposed else channels[::-1]
    weight = torch.randn(order[0], order[1] // groups, *(kernel,) * 3)
    formats = draw.choice([(1, 0), (1, 1), (0, 1)])
    x, weight = (
        tensor.contiguous(memory_format=torch.channels_last_3d) if is_last else tensor
        for tensor, is_last in zip((x, weight), formats)
    )
    return chain, [x, weight, torch.randn(channels[1])]


def _layouts(tensors: list[Tensor]) -> set[str]:
    return {layout_of(tensor) for tensor in tensors}


def _by_pytorch(chain: Chain, tensors: list[Tensor]) -> Tensor:
    found = chain.producer
    assert found is not None
    function = F.conv_transpose3d if found.transposed else F.conv3d
    return function(*tensors, stride=found.stride, padding=found.padding, groups=found.groups)

"""Calls of PyTorch as people write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from postlude.export.torch_text import TorchText
from postlude.plan.program import Buffer, TorchCall

X = Buffer(0, (2, 3, 9, 9), (243, 81, 9, 1), "float32", "given", 0)


def text(function: str, *arguments: Any, **keywords: Any) -> str:
    call = TorchCall(function, (X, *arguments), tuple(keywords.items()), (None,))
    return TorchText({0: "x"}, X).expression(call)


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        ("F.max_pool2d", ((2, 2), (2, 2), (0, 0), 1, False), "F.max_pool2d(x, 2)"),
        ("torch.max_pool2d", ((2, 2), [], 0, 1, False), "F.max_pool2d(x, 2)"),
        ("F.max_pool2d", ((3, 2), (3, 2), (0, 0), 1, False), "F.max_pool2d(x, (3, 2))"),
        ("F.max_pool2d", ((3, 3), (2, 2), (1, 1), 1, False), "F.max_pool2d(x, 3, 2, 1)"),
        ("F.max_pool2d", ((2, 2), (2, 2), (0, 0), 1, True), "F.max_pool2d(x, 2, 2, 0, 1, True)"),
        ("F.max_pool2d", ((2, 2), (1, 1), (0, 0), 2, False), "F.max_pool2d(x, 2, 1, 0, 2)"),
        ("F.avg_pool2d", ((2, 2), (2, 2), (0, 0), False, True, None), "F.avg_pool2d(x, 2)"),
        (
            "F.avg_pool2d",
            ((2, 2), (1, 2), (1, 0), False, False, None),
            "F.avg_pool2d(x, 2, (1, 2), (1, 0), False, False)",
        ),
        ("F.avg_pool2d", ((2, 2), (2, 2), (0, 0), False, True, 3), "F.avg_pool2d(x, 2, 2, 0, False, True, 3)"),
    ],
)
def test_pools_name_what_is_no_default(function: str, arguments: tuple[Any, ...], expected: str) -> None:
    written = text(function, *arguments)
    assert written == expected
    x = torch.randn(X.shape)
    given = [x, *arguments]
    if given[2] == []:
        given[2] = None
    assert torch.equal(eval(written, {"F": F, "x": x}), getattr(F, function.partition(".")[2])(*given))


def test_gelu_says_only_that_it_is_not_exact() -> None:
    assert text("F.gelu", approximate="none") == "F.gelu(x)"
    assert text("F.gelu", approximate="tanh") == 'F.gelu(x, approximate="tanh")'

"""The operators that graphs hold for the sake of layouts: results and gradients are PyTorch's, laid out as promised."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.plan.problem import CHANNELS_LAST
from postlude.run import layouts

CASES = {
    "groups": (4, True, torch.float64),
    "one group": (1, True, torch.float64),
    "a group for each channel": (8, True, torch.float64),
    "no parameters": (2, False, torch.float64),
    "16 bits": (4, True, torch.bfloat16),
}


def both(groups: int, affine: bool, dtype: torch.dtype, dims: int) -> tuple[list[Tensor], list[Tensor]]:
    """Result and gradients, ours and PyTorch's."""
    torch.manual_seed(0)
    x = (torch.randn(2, 8, *(3, 4, 5)[:dims], dtype=torch.float64) * 2 + 3).to(dtype)
    parameters = [torch.randn(8, dtype=dtype) for _ in range(2)] if affine else [None, None]
    found = []
    for is_ours in (True, False):
        given = x.clone().contiguous(memory_format=CHANNELS_LAST[dims]).requires_grad_()
        own = [None if p is None else p.clone().requires_grad_() for p in parameters]
        if is_ours:
            computed = torch.float32 if dtype.itemsize == 2 else dtype
            y = torch.ops.postlude.norm(given, *own, groups, 1e-5, computed, dtype)
        else:
            y = F.group_norm(given, groups, *own, 1e-5)
        wanted = [given, *(p for p in own if p is not None)]
        torch.manual_seed(1)
        dy = torch.randn(x.shape, dtype=torch.float64).to(dtype).contiguous(memory_format=CHANNELS_LAST[dims])
        found.append([y, *torch.autograd.grad(y, wanted, dy)])
    return found[0], found[1]


@pytest.mark.parametrize(("dims", "many"), [(2, 1024), (3, 1024), (2, 1)])
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_pytorchs(case: str, dims: int, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_LEAST_POSITIONS", 32 if dims == 2 else 5)  # one part, or several
    monkeypatch.setattr(layouts, "_MANY_GROUPS", many)  # by parts, or each group at once
    groups, affine, dtype = CASES[case]
    ours, theirs = both(groups, affine, dtype, dims)
    rtol = 1e-9 if dtype is torch.float64 else 2e-2
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, rtol=rtol, atol=rtol)
    for mine in ours[:2]:
        assert mine.is_contiguous(memory_format=CHANNELS_LAST[dims])


def test_groups_taken_for_one_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant."""
    honest = layouts._grouped
    monkeypatch.setattr(layouts, "_grouped", lambda value, groups: honest(value, groups) * 0 + value.mean())
    with pytest.raises(AssertionError):
        test_results_and_gradients_are_pytorchs("groups", 2, 1024, monkeypatch)


def test_a_group_of_the_wrong_channels_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the moments of all groups are those of the first."""
    honest = layouts._moments

    def moments(x: Tensor, groups: int) -> tuple[Tensor, ...]:
        return tuple(value[:, :1].expand_as(value) for value in honest(x, groups))

    monkeypatch.setattr(layouts, "_moments", moments)
    with pytest.raises(AssertionError):
        test_results_and_gradients_are_pytorchs("groups", 2, 1, monkeypatch)


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_a_weights_gradient_has_its_own_layout(is_last: bool, count: int) -> None:
    own = torch.channels_last if is_last else torch.contiguous_format
    weights = [torch.randn(4, 3 + n, 3, 3).contiguous(memory_format=own).requires_grad_() for n in range(count)]
    asked = [place % 2 == 0 for place in range(count)]
    cast = torch.ops.postlude.weights(weights, torch.bfloat16, asked)
    for one, weight, last in zip(cast, weights, asked, strict=True):
        assert torch.equal(one, weight.to(torch.bfloat16))
        assert one.is_contiguous(memory_format=torch.channels_last if last else own)
    dys = [torch.randn(one.shape).bfloat16().contiguous(memory_format=torch.channels_last) for one in cast]
    for found, dy in zip(torch.autograd.grad(cast, weights, dys), dys, strict=True):
        assert found.is_contiguous(memory_format=own)
        assert torch.equal(found, dy.float())


def test_a_bias_is_cast_with_the_weights_and_any_layout_of_a_gradient_is_read() -> None:
    weight, bias = torch.randn(4, 3, 3, 2).requires_grad_(), torch.randn(4).requires_grad_()
    cast = torch.ops.postlude.weights([weight, bias], torch.bfloat16, [True, False])
    assert torch.equal(cast[0], weight.bfloat16())
    assert torch.equal(cast[1], bias.bfloat16())
    whole = torch.randn(4, 3, 3, 4).bfloat16()
    dys = [whole[..., ::2], torch.randn(4).bfloat16()]  # the first is in neither layout
    found = torch.autograd.grad(cast, [weight, bias], dys)
    for one, dy in zip(found, dys, strict=True):
        assert torch.equal(one, dy.float())
        assert one.is_contiguous()


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_gradients_of_scale_and_shift_do_not_depend_on_who_else_wants_one(wanted: tuple[bool, bool]) -> None:
    x = torch.randn(2, 8, 4, 4, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    vectors = [torch.randn(8, dtype=torch.float64).requires_grad_(wants) for wants in wanted]
    asked = [vector for vector in vectors if vector.requires_grad]
    dy = torch.randn_like(x)
    ours = torch.ops.postlude.norm(x, *vectors, 4, 1e-5, torch.float64, torch.float64)
    theirs = F.group_norm(x.contiguous(), 4, *vectors, 1e-5)  # PyTorch 2.13 crashes here if x is channels-last
    for mine, other in zip(*(torch.autograd.grad(y, asked, dy) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


def test_a_weight_whose_convolution_is_not_used_has_no_gradient() -> None:
    weights = [torch.randn(4, 3, 3, 3).requires_grad_() for _ in range(2)]
    first, _ = torch.ops.postlude.weights(weights, torch.bfloat16, [True, False])
    found = torch.autograd.grad(first.sum(), weights, allow_unused=True)
    assert [gradient is None or not gradient.any() for gradient in found] == [False, True]

"""A weight of many elements is drawn, copied and converted once for all random points of a check."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from cases import Builder, conv
from postlude import site_check
from postlude.chain import Chain
from postlude.check.chain_sides import Copies
from postlude.check.points import tensors_for
from postlude.check.verdict import Verdict
from postlude.check.verify import verify_chain
from postlude.reference import evaluate

CHAIN = Builder(0, conv(0, (24, 40))).op("relu").reduce("sum", "channels").chain()
GIVEN = tensors_for(CHAIN, (16, 24), torch.float32, seed=9)
WEIGHT = 1  # its slot
PLAIN = slice(1, 1 + site_check.RANDOM_POINTS)


@pytest.fixture(autouse=True)
def every_weight_is_heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_check, "HEAVY", 1)


def weights(is_large: bool = False) -> list[Tensor]:
    points = site_check._points(CHAIN, GIVEN, is_large)
    return [(point if isinstance(point, Sequence) else point.tensors)[WEIGHT] for point in points]


@pytest.mark.parametrize("is_large", [True, False])
def test_random_points_have_one_weight_and_the_first_has_the_models(is_large: bool) -> None:
    given, first, *others = weights(is_large=is_large)
    assert not torch.equal(given, first)
    assert others
    assert all(one is first for one in others)


def test_lighter_weights_are_drawn_for_each_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_check, "HEAVY", weights()[0].numel() + 1)
    found = weights()[PLAIN]
    assert not any(torch.equal(one, other) for place, one in enumerate(found) for other in found[:place])


def test_other_tensors_are_new_at_each_point() -> None:
    points = site_check._points(CHAIN, GIVEN, False)
    inputs = [(point if isinstance(point, Sequence) else point.tensors)[0] for point in points[PLAIN]]
    assert not any(torch.equal(one, other) for place, one in enumerate(inputs) for other in inputs[:place])


def judged(run: Callable[[Chain, Sequence[Tensor]], Tensor]) -> Verdict:
    points = site_check._points(CHAIN, GIVEN, False)
    return verify_chain(run, CHAIN, points)


def right(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
    return evaluate(chain, tensors)


def without_a_row(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
    x, weight, bias = tensors
    return evaluate(chain, (x, torch.cat([weight[:-1], 0 * weight[-1:]]), bias))


def with_rounded_weights(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
    x, weight, bias = tensors
    return evaluate(chain, (x, weight.bfloat16().float(), bias))


def with_the_first_weight() -> Callable[[Chain, Sequence[Tensor]], Tensor]:
    seen: list[Tensor] = []

    def run(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
        x, weight, bias = tensors
        seen.append(weight)
        return evaluate(chain, (x, seen[0], bias))

    return run


def changing_the_weight() -> Callable[[Chain, Sequence[Tensor]], Tensor]:
    calls: list[None] = []

    def run(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
        result = evaluate(chain, tensors)
        calls.append(None)
        if len(calls) > 6:  # at a point whose weight has been copied before
            tensors[WEIGHT][0, 0] += 1
        return result

    return run


def test_the_honest_are_right_and_mutants_are_not() -> None:
    assert judged(right).right
    for mutant in (without_a_row, with_rounded_weights, with_the_first_weight()):
        assert judged(mutant).outcome == "wrong", mutant
    assert "changed its input" in str(judged(changing_the_weight()))


def test_a_copy_of_another_weight_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the copies that are kept are taken for any weight."""

    def kept(self: Copies, tensor: Tensor, role: str) -> tuple[Tensor, Tensor]:
        if role == "weight" and self.kept is not None:
            return self.kept[1:]
        self.kept = (tensor, tensor.clone(), tensor.double()) if role == "weight" else self.kept
        return tensor.clone(), tensor.double()

    monkeypatch.setattr(Copies, "_of", kept)
    assert not judged(right).right


def test_a_shared_weight_is_converted_once() -> None:
    copies, (x, weight, bias) = Copies(CHAIN), GIVEN
    (_, before, _), (_, double, _) = copies((x, weight, bias))
    (_, again, _), (_, twice, _) = copies((x, weight, bias))
    assert before is again
    assert double is twice
    assert copies((x, weight.clone(), bias))[1][WEIGHT] is not double

"""Honest models answer from a process of their own as they do in ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from postlude.check.isolation import Candidate, CandidateFailed, Limits, candidate
from postlude.check.nested import named_tensors
from postlude.check.supply import Supply
from postlude.errors import PostludeError

SMALL = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, channels, *, groups=1, scale=None):
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("scale", scale)
        self.groups = groups

    def forward(self, x):
        return self.drop(self.norm(self.conv(x))) * self.scale
"""
# Does what the first argument says with the others.
VERSATILE = """
import torch, time
from torch import nn
TEXT = "from its own file"

class Lazy(torch.Tensor):
    pass

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.buffer = torch.zeros(3)

    def forward(self, what, *given):
        self.calls += 1
        return getattr(self, what)(*given)

    def same(self, *given): return given
    def strides(self, *given): return [list(x.stride()) for x in given]
    def memory(self, x): return x.as_strided((39,), (1,))
    def address(self, x): return x.data_ptr()
    def doubled(self, x): x.mul_(2); return x + 0
    def nested(self, tree): return {"sum": tree["a"] + tree["b"][0], "n": tree["n"], 3: [None, (tree["b"][1],)]}
    def own_buffer(self, x): self.buffer.copy_(x); return self.buffer
    def maximum(self, x): return torch.max(x, 0)
    def sparse(self, x): return x.to_sparse()
    def quantised(self, x): return torch.quantize_per_tensor(x, 0.5, 0, torch.qint8)
    def lazy(self, x): return x.as_subclass(Lazy)
    def meta(self, x): return x.to("meta")
    def an_object(self, x): return {"x": x, "bad": object()}
    def text(self): return TEXT
    def uninitialised(self, x): return torch.empty_like(x)
    def slow(self, x): time.sleep(0.01); return x * 2
    def count(self): return self.calls
    def split(self, x, y): return x * y, y.detach() * 2
"""


def reference(scale: torch.Tensor) -> nn.Module:
    space: dict[str, Any] = {}
    exec(SMALL, space)
    model: nn.Module = space["ModelNew"](3, groups=2, scale=scale)
    return model


@pytest.fixture(scope="module")
def versatile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Candidate]:
    folder = tmp_path_factory.mktemp("versatile")
    (folder / "candidate.py").write_text(VERSATILE)
    limits = Limits(call_s=20, output_bytes=1 << 20)
    with Candidate(folder / "candidate.py", limits=limits) as candidate:
        yield candidate
        assert candidate.alive


def ask(candidate: Candidate, what: str, *given: Any) -> Any:
    return candidate.forward([what, *given]).outputs


def test_a_model_with_state_answers_as_it_does_here(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(SMALL)
    scale = torch.tensor(0.5)
    model = reference(scale)
    x, weights = torch.randn(2, 3, 6, 6), torch.randn(2, 4, 4, 4)
    with Candidate(tmp_path / "small.py", [3], {"groups": 2, "scale": scale}) as candidate:
        own = model.state_dict()
        assert candidate.state_keys() == {key: (tuple(value.shape), value.dtype) for key, value in own.items()}
        candidate.load_state(own)
        with torch.no_grad():
            assert torch.equal(candidate.forward([x]).outputs, model.eval()(x))
        here = x.clone().requires_grad_()
        torch.manual_seed(7)  # the same dropout
        expected = model.train()(here)
        expected.backward(weights)
        answered = candidate.forward([x], [weights], training=True, seed=7, wants="all")
        assert torch.equal(answered.outputs, expected.detach())
        gradients = {"input[0]": here.grad, **{name: one.grad for name, one in model.named_parameters()}}
        assert answered.gradients.keys() == gradients.keys()
        assert all(torch.allclose(answered.gradients[name], value, atol=1e-5) for name, value in gradients.items())
        after = candidate.read_state()
        assert all(torch.equal(after[key], value) for key, value in model.state_dict().items())
        assert not torch.equal(after["norm.running_mean"], torch.zeros(4))
        candidate.load_state({**own, "_extra_state": {"anything": object()}})
        with pytest.raises(CandidateFailed, match="other keys"):
            candidate.load_state({"conv.weight": own["conv.weight"]})


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool, torch.uint8]
)
def test_every_dtype_crosses_bit_for_bit(versatile: Candidate, dtype: torch.dtype) -> None:
    x = (100 * torch.randn(3, 5)).to(dtype)
    (back,) = ask(versatile, "same", x)
    assert back.dtype == dtype
    assert torch.equal(back, x)


def test_special_values_cross_bit_for_bit(versatile: Candidate) -> None:
    x = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    (back,) = ask(versatile, "same", x)
    assert torch.equal(back.view(torch.int32), x.view(torch.int32))


LAYOUTS = {
    "contiguous": torch.rand(2, 3, 4, 5),
    "channels last": torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "transposed": torch.rand(4, 5).t(),
    "with gaps": torch.rand(4, 10)[:, ::2],
    "expanded": torch.rand(4, 1).expand(4, 6),
    "no dimension": torch.tensor(3.0),
    "no element": torch.rand(0, 3),
    "none left": torch.rand(4, 3)[:, 3:],
    "conjugated": torch.rand(3, dtype=torch.complex64).conj(),
    "conjugated with gaps": torch.rand(3, 4, dtype=torch.complex64).conj()[:, ::2],
    "ones only": torch.rand(4, 1, 1, 1).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_inputs_keep_their_strides(versatile: Candidate, name: str) -> None:
    x = LAYOUTS[name]
    answered = versatile.forward(["strides", x])
    assert answered.outputs == [list(x.stride())]
    assert answered.changed_inputs == ()
    (back,) = ask(versatile, "same", x)
    assert torch.equal(back, x)


def test_dense_results_keep_their_strides(versatile: Candidate) -> None:
    for name in ("contiguous", "channels last", "transposed"):
        assert ask(versatile, "same", LAYOUTS[name])[0].stride() == LAYOUTS[name].stride()


def test_what_lies_in_gaps_is_not_sent(versatile: Candidate) -> None:
    whole = torch.full((4, 10), 42.0)
    whole[:, ::2] = 1
    assert ask(versatile, "memory", whole[:, ::2]).unique().tolist() == [0, 1]


def test_nested_inputs_and_results(versatile: Candidate) -> None:
    a, b = torch.ones(2), torch.rand(3)
    found = ask(versatile, "nested", {"a": a, "b": (2 * a, b), "n": 7})
    assert torch.equal(found["sum"], 3 * a)
    assert found["n"] == 7
    assert found[3][0] is None
    assert torch.equal(found[3][1][0], b)
    assert list(named_tensors("output", found)) == ["output['sum']", "output[3][1][0]"]


def test_numbers_of_numpy_are_numbers(versatile: Candidate) -> None:
    numpy = pytest.importorskip("numpy")
    assert ask(versatile, "same", numpy.int64(7), numpy.float64(0.5)) == (7, 0.5)


def test_named_tuples_are_tuples(versatile: Candidate) -> None:
    values, indices = ask(versatile, "maximum", torch.tensor([[1.0, 5.0], [3.0, 2.0]]))
    assert values.tolist() == [3, 5]
    assert indices.tolist() == [1, 0]


def test_an_input_that_is_written_into_is_named(versatile: Candidate) -> None:
    x = torch.ones(3)
    answered = versatile.forward(["doubled", x])
    assert answered.changed_inputs == ("input[1]",)
    assert torch.equal(x, torch.ones(3))  # ours is not theirs
    assert torch.equal(answered.outputs, 2 * x)


def test_inputs_keep_their_place(versatile: Candidate) -> None:
    assert ask(versatile, "address", torch.rand(1000)) == ask(versatile, "address", torch.rand(1000))


def test_a_result_that_is_overwritten_later_shows(versatile: Candidate) -> None:
    first = versatile.forward(["own_buffer", torch.ones(3)], keep=True).outputs
    versatile.forward(["own_buffer", torch.zeros(3)])
    assert torch.equal(first, torch.ones(3))
    assert torch.equal(versatile.kept()[0], torch.zeros(3))


@pytest.mark.parametrize("kind", ["sparse", "quantised", "subclass"])
def test_results_that_are_not_plain_are_made_plain_and_noted(versatile: Candidate, kind: str) -> None:
    x = torch.tensor([0.0, 1.0, 2.5])
    answered = versatile.forward([{"subclass": "lazy"}.get(kind, kind), x])
    assert type(answered.outputs) is torch.Tensor
    assert torch.equal(answered.outputs, x)
    assert answered.notes == (f"output was a {kind} tensor",)


@pytest.mark.parametrize(
    ("what", "given", "reason"),
    [
        ("meta", [torch.ones(2)], "without values"),
        ("an_object", [torch.ones(2)], "a value of type object, which is neither a tensor nor a number"),
        ("absent", [], "raised AttributeError: 'ModelNew' object has no attribute 'absent'."),
    ],
)
def test_what_cannot_be_judged_is_refused_and_the_next_call_works(
    versatile: Candidate, what: str, given: list[Any], reason: str
) -> None:
    with pytest.raises(CandidateFailed, match=r"^failed: the candidate ") as caught:
        versatile.forward([what, *given])
    assert reason in str(caught.value)
    assert ask(versatile, "text") == "from its own file"


def test_gradients_only_where_there_are_some(versatile: Candidate) -> None:
    x, y = torch.rand(3), torch.rand(3)
    answered = versatile.forward(["split", x, y], [torch.ones(3), None], wants="all")
    assert answered.gradients.keys() == {"input[1]", "input[2]"}
    assert torch.equal(answered.gradients["input[1]"], y)
    with pytest.raises(CandidateFailed, match="the output has no gradient"):
        versatile.forward(["strides", x], [], wants="all")


@pytest.mark.parametrize(("signal_s", "calls"), [(None, {4}), (0.025, {0, 1, 2}), (30.0, {4})])
def test_timed_calls_are_made_and_the_result_before_the_signal_comes_back(
    versatile: Candidate, signal_s: float | None, calls: set[int]
) -> None:
    before = ask(versatile, "count")
    turns = Supply([("slow", torch.rand(2)), ("slow", torch.rand(2))]).draw(5)
    timed = versatile.time_calls(turns, signal_s=signal_s)
    assert ask(versatile, "count") - before == 6
    assert 0.05 <= timed.seconds < 5
    assert timed.call in calls
    assert torch.equal(timed.outputs, 2 * turns.inputs(timed.call)[1])


def test_our_own_mistakes_are_not_the_candidates(versatile: Candidate) -> None:
    for value in (object(), torch.eye(2).to_sparse(), torch.rand(9).as_strided((4, 4), (1, 1)), 2**70):
        with pytest.raises(PostludeError, match="cannot be sent to a candidate"):
            versatile.forward(["same", value])
    with pytest.raises(ValueError, match="nothing to time"):
        versatile.time_calls(Supply([("same",)]).draw(0))


@pytest.mark.parametrize(("unused", "free", "emptied"), [(90, 40, True), (10, 40, False)])
def test_a_candidate_finds_memory_on_a_gpu(
    unused: int, free: int, emptied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: unused + 7)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 7)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 141))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append(True))
    candidate._leave_room(torch.device("cuda"))
    candidate._leave_room(torch.device("cpu"))
    assert done == [True] * emptied

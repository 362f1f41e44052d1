"""Linear layers whose input has more than two axes: which chains are found, where they end, and what the graph is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend

from gpu_plans import planned_for_a_gpu
from postlude.errors import PostludeError
from postlude.graph import fusion, rows, spellings
from postlude.graph.backend import Backend
from postlude.graph.capture import capture_function
from postlude.graph.draft import Draft
from postlude.graph.linear import start_with_linear
from postlude.graph.match import Match, match
from postlude.graph.tidy import functionalise, restore
from postlude.nn import FusedChain
from postlude.plan import Plan

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore")]
aten = torch.ops.aten
LINEAR, NORM = nn.Linear(6, 8), nn.LayerNorm(8)
WEIGHT, VECTOR, ONE = torch.randn(8, 6), torch.randn(8), torch.randn(1)
SAME, TURNED = torch.randn(2, 8, 8), torch.randn(8, 2, 8).transpose(0, 1)
Function = Callable[[Tensor], Tensor]
# As many rows of a sample as features, so that one axis cannot be taken for the other by its size.
SHAPES = [(2, 8, 6), (2, 3, 8, 6)]

CHAINS: dict[str, Function] = {
    "gelu": lambda x: F.gelu(LINEAR(x)),
    "relu": lambda x: (x @ WEIGHT.t()).relu(),
    "layer_norm over the last axis": lambda x: NORM(LINEAR(x)),
    "softmax over features": lambda x: LINEAR(x).softmax(-1),
    "log_softmax over features": lambda x: F.log_softmax(LINEAR(x), dim=x.dim() - 1),
    "mul(per channel) → add(one number)": lambda x: LINEAR(x) * VECTOR[None] + ONE,
    "add(tensor) → layer_norm over the last axis": lambda x: NORM(x.new_ones(*x.shape[:-1], 8) + LINEAR(x)),
    "relu → sum over features": lambda x: LINEAR(x).relu().sum(-1),
    "max over features → abs": lambda x: LINEAR(x).max(-1, keepdim=True)[0].abs(),
    "logsumexp over features → mul(2)": lambda x: LINEAR(x).logsumexp(-1) * 2,
    "mean over features → add(one number)": lambda x: LINEAR(x).mean(-1) + ONE,
    "prelu(one number)": lambda x: F.prelu(LINEAR(x), ONE),
}


def _captured(function: Function, x: Tensor) -> fx.GraphModule:
    graph = capture_function(function, [x])
    functionalise(graph)
    return graph


def _found(function: Function, x: Tensor) -> list[Match]:
    return [item for item in match(_captured(function, x))[0] if item.chain.is_linear]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("line", CHAINS)
def test_chains(line: str, shape: tuple[int, ...]) -> None:
    (found,) = _found(CHAINS[line], torch.randn(shape))
    assert str(found.chain) == f"linear(6→8) → {line}"


CHANNELS = "has the second axis as its channels, and a linear layer the last"
ENDS: dict[str, tuple[Function, str]] = {
    "another axis's softmax": (lambda x: LINEAR(x).softmax(1), "over axis 1: only channels is supported"),
    "a sum over rows": (lambda x: LINEAR(x).sum(1), "of rows"),
    "a sum over both": (lambda x: LINEAR(x).sum((1, 2)), "of rows"),
    "group_norm": (lambda x: F.group_norm(LINEAR(x), 2), CHANNELS),
    "batch_norm": (lambda x: F.batch_norm(LINEAR(x), None, None, training=True), CHANNELS),
    "batch_norm in evaluation": (lambda x: F.batch_norm(LINEAR(x), VECTOR, VECTOR.abs()), CHANNELS),
    "instance_norm": (lambda x: F.instance_norm(LINEAR(x)), CHANNELS),
    "layer_norm of two axes": (lambda x: F.layer_norm(LINEAR(x), (8, 8)), "over more than the features"),
    "prelu": (lambda x: F.prelu(LINEAR(x), VECTOR), "neither full nor per channel"),
    "a number per row": (lambda x: LINEAR(x) + VECTOR[:, None], "neither full nor per channel"),
    "a matrix for every sample": (lambda x: LINEAR(x) + SAME[0], "neither full nor per channel"),
    "a tensor that is transposed": (lambda x: LINEAR(x) + TURNED, "of the value's size that is not contiguous"),
    "a transpose": (lambda x: LINEAR(x).transpose(1, 2), "not in the vocabulary"),
    "a norm of an added axis": (lambda x: F.instance_norm(LINEAR(x).unsqueeze(1)).squeeze(1), "not in the vocabulary"),
}


@pytest.mark.parametrize("name", ENDS)
def test_where_a_chain_ends_and_why(name: str) -> None:
    function, reason = ENDS[name]
    graph = _captured(function, torch.randn(2, 8, 6))
    (layer,) = (node for node in graph.graph.nodes if spellings.linear_operands(node) is not None)
    draft = start_with_linear(layer)
    assert isinstance(draft, Draft)
    assert reason in str(draft.extend(next(iter(layer.users))))
    assert [str(item.chain) for item in match(graph)[0] if item.chain.is_linear] == ["linear(6→8)"]


def test_a_value_with_another_reader_ends_a_chain() -> None:
    def function(x: Tensor) -> Tensor:
        y = LINEAR(x).relu()
        return y.softmax(-1) + y.transpose(1, 2)

    assert [str(item.chain) for item in _found(function, torch.randn(2, 8, 6))] == ["linear(6→8) → relu"]


class Net(nn.Module):
    """`body` gets the net and its input."""

    def __init__(self, body: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6)
        self.vector, self.body = nn.Parameter(torch.randn(8)), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def _in_place(m: Net, x: Tensor) -> Tensor:
    """`exp` is in no chain, and a chain may have saved its result."""
    return m.first(x).mul_(2).exp_().sum(1)


BODIES: dict[str, tuple[Callable[[Net, Tensor], Tensor], tuple[str, ...]]] = {
    "block": (
        lambda m, x: m.norm(x + m.second(F.gelu(m.first(x)))),
        ("linear(6→8) → gelu", "linear(8→6) → add(tensor) → layer_norm over the last axis"),
    ),
    "vectors": (
        lambda m, x: (m.first(x) * m.vector).logsumexp(-1).sum(1),
        ("linear(6→8) → mul(per channel) → logsumexp over features",),
    ),
    "a transposed input": (
        lambda m, x: m.first(x.transpose(0, 1)).relu().sum(-1),
        ("linear(6→8) → relu → sum over features",),
    ),
    "part of the features": (lambda m, x: m.second(m.vector * x[..., :1]).tanh(), ("linear(8→6) → tanh",)),
    "in place": (_in_place, ("linear(6→8) → mul(2)",)),
    "a layer alone": (lambda m, x: m.first(x).transpose(0, 1).contiguous(), ("linear(6→8)",)),
}


def _step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    result = model(x)
    (result.double() * torch.linspace(-1, 1, result.numel()).reshape(result.shape)).sum().backward()
    found = [result.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]
    return [one for one in found if one is not None]


def _assert_steps_like_eager(name: str, shapes: list[tuple[int, ...]], is_fused: bool = False, **options: Any) -> None:
    """In float64 PyTorch's own sums agree to its last digits; in float32, kernels are compared with the truth."""
    dtype = torch.float32 if is_fused else torch.float64
    body, chains = BODIES[name]
    fusing = Backend(rest=options.pop("rest", "eager"))
    model, eager = Net(body).to(dtype), Net(body).double()
    eager.load_state_dict(model.state_dict())
    model.compile(backend=fusing, **options)
    counts = []
    for shape in shapes:
        x = torch.randn(shape, dtype=dtype)
        for ours, truth in zip(_step(model, x), _step(eager, x.double()), strict=True):
            assert ours.stride() == truth.stride()
            torch.testing.assert_close(ours.double(), truth, rtol=2e-5 if is_fused else 1e-10, atol=2e-5)
        counts.append(len(fusing.captured))
    assert tuple(str(site.chain) for site in fusing.captured[0].sites) == chains
    assert len(set(counts)) == 1  # another shape needs no other graph
    outcomes = [entry.outcome for entry in fusing.ledger.latest.values()]
    assert not is_fused or all(isinstance(outcome, Plan) for outcome in outcomes)


@pytest.mark.usefixtures("refused_chains_too")
@pytest.mark.parametrize("name", BODIES)
def test_steps_equal_eagers(name: str) -> None:
    _assert_steps_like_eager(name, [(2, 3, 6)])


@pytest.mark.usefixtures("refused_chains_too")
def test_axes_that_are_mixed_up_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number per row, read as a number per feature."""
    monkeypatch.setitem(BODIES, "per row", (lambda m, x: m.first(x) + m.vector[:, None], ("linear(6→8)",)))
    _assert_steps_like_eager("per row", [(2, 8, 6)])
    torch._dynamo.reset()
    monkeypatch.setattr(Draft, "is_of_rows", False)
    with pytest.raises(AssertionError):
        _assert_steps_like_eager("per row", [(2, 8, 6)])


@pytest.mark.usefixtures("refused_chains_too")
@pytest.mark.parametrize("name", ["block", "a transposed input"])
def test_sizes_that_are_symbols_are_not_fixed(name: str) -> None:
    """Two shapes, one graph."""
    _assert_steps_like_eager(name, [(2, 3, 6), (5, 4, 6)], dynamic=True)


@pytest.fixture
def by_aot_eager(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The graphs that Inductor is given; in its place PyTorch runs them, operator by operator."""
    seen: list[fx.GraphModule] = []

    def compiled(_: Backend, graph: fx.GraphModule, inputs: list[Any]) -> Any:
        seen.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(Backend, "_by_inductor", compiled)
    return seen


@pytest.mark.usefixtures("refused_chains_too")
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_a_compiler_gets_matrices(is_dynamic: bool, by_aot_eager: list[fx.GraphModule]) -> None:
    shapes = [(2, 3, 6), (5, 4, 6)][: 1 + is_dynamic]
    _assert_steps_like_eager("block", shapes, rest="inductor", dynamic=is_dynamic)
    kinds = [node.target for node in by_aot_eager[0].graph.nodes]
    assert kinds.count(torch.ops.postlude.chain.default) == 2
    assert kinds.count(aten.sym_size.int) == 4 * is_dynamic


def test_a_refused_chain_leaves_the_graph_as_it_was(by_aot_eager: list[fx.GraphModule]) -> None:
    _assert_steps_like_eager("block", [(2, 3, 6)], rest="inductor")
    kinds = [node.target for node in by_aot_eager[0].graph.nodes if node.op not in ("placeholder", "output")]
    assert kinds == [
        *(aten.linear.default, aten.gelu.default, aten.linear.default),
        aten.add.Tensor,
        aten.layer_norm.default,
    ]


@pytest.mark.usefixtures("refused_chains_too")
def test_what_changes_a_chains_result_is_not_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[fx.GraphModule] = []
    monkeypatch.setattr(fusion, "restore", lambda graph: (restore(graph), seen.append(graph)))
    _assert_steps_like_eager("in place", [(2, 3, 6)])
    (node,) = (node for node in seen[0].graph.nodes if node.target is aten.exp.default)
    assert rows.is_chains_result(node.args[0])


@pytest.mark.usefixtures("refused_chains_too")
def test_autocasts_dtypes_are_eagers() -> None:
    body, _ = BODIES["block"]
    eager, fusing = Net(body), Backend(rest="eager")
    model, x = copy.deepcopy(eager), torch.randn(2, 3, 6)
    model.compile(backend=fusing)
    with torch.autocast("cpu", torch.bfloat16):
        pairs = list(zip(_step(model, x), _step(eager, x), strict=True))
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=5e-2)
    first, second = (str(site.chain) for site in fusing.captured[0].sites)
    assert first == "linear(6→8, bfloat16) → gelu"
    assert second.startswith("linear(8→6, bfloat16) → ")


def test_where_pytorch_multiplies_a_chain_begins_after_the_layer() -> None:
    """Of four axes, as it did without the layer: a refused chain must not hide the norm's own."""
    net, fusing = Net(lambda m, x: m.norm(x + m.second(F.gelu(m.first(x))))), Backend(rest="eager")
    net.compile(backend=fusing)
    net(torch.randn(2, 3, 4, 6))
    (captured,) = fusing.captured
    assert [str(site.chain) for site in captured.sites] == ["add(tensor) → layer_norm over the last axis"]
    assert [item.what for item in captured.declined] == [
        "linear(6→8) → gelu",
        "linear(8→6) → add(tensor) → layer_norm over the last axis",
    ]


def test_a_fused_chain_of_modules_takes_matrices() -> None:
    with pytest.raises(PostludeError, match="takes matrices"):
        FusedChain(nn.Linear(6, 8), nn.GELU())(torch.randn(2, 3, 6))


@pytest.fixture
def by_interpreter() -> Iterator[None]:
    with planned_for_a_gpu():
        yield


@pytest.mark.interpret
@pytest.mark.usefixtures("by_interpreter", "poisoned_memory")
@pytest.mark.parametrize("name", ["block", "vectors", "a transposed input", "in place"])
def test_kernels_are_right(name: str) -> None:
    _assert_steps_like_eager(name, [(2, 3, 6)], is_fused=True)


@pytest.mark.interpret
@pytest.mark.usefixtures("by_interpreter", "poisoned_memory")
def test_kernels_of_a_compilers_graph_are_right(by_aot_eager: list[fx.GraphModule]) -> None:
    _assert_steps_like_eager("block", [(2, 3, 6)], is_fused=True, rest="inductor")
    assert [node.target for node in by_aot_eager[0].graph.nodes].count(torch.ops.postlude.chain.default) == 2

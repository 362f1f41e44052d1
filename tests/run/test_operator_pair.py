"""The pair of operators with our kernels inside: PyTorch's checks and compilers' graphs, by Triton's interpreter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import postlude
from cases import BY_NAME, Builder, conv
from gpu_plans import planned_for_a_gpu
from postlude import reference
from postlude.chain import Chain, Value
from postlude.check import tensors_for
from postlude.check.verdict import Verdict
from postlude.graph.backend import Backend
from postlude.plan import problem_of
from postlude.run import operator
from postlude.run.chain_run import Training
from postlude.run.execute import prepared
from postlude.run.ledger import Ledger, PlannedRun
from postlude.run.site import run_chain

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_dynamo")]
CHAINS = {
    "a block": Builder(2, conv(2, (3, 4), padding=1)).norm(None).op("leaky_relu", slope=0.1).chain(),
    "a residual": Builder(2, conv(2, (3, 4), padding=1, bias=False)).op("relu").norm(2).op("add", "full").chain(),
    "kept from its result": Builder(2, conv(2, (3, 4), padding=1)).op("add", "channel").op("relu").chain(),
    "views are kept": BY_NAME["conv norm row mean"].chain,
    "a rest for PyTorch": BY_NAME["conv mul norm clamp mul max"].chain,
    "running statistics": BY_NAME["transposed conv mul batch_norm mean"].chain,
}


@pytest.fixture(autouse=True)
def _planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """AOTAutograd traces as for Inductor, and runs what it traced: no C++ is compiled."""

    def aot_eager(graph: torch.fx.GraphModule, inputs: list[Any], **_: Any) -> Any:
        return lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", aot_eager)
    with planned_for_a_gpu():
        yield


def inputs(chain: Chain, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    assert chain.producer is not None
    space = (4, 5, 4)[: chain.dims]
    made = tensors_for(chain, (2, chain.producer.in_channels, *space), dtype)
    return [t if slot in chain.moved else t.requires_grad_() for slot, t in enumerate(made)]


def through(chain: Chain, tensors: Sequence[Tensor], backend: str = "aot_eager") -> Tensor:
    """The chain in a graph that a compiler traced."""
    moved = [tensors[slot] for slot in chain.moved]
    still, text = [t for slot, t in enumerate(tensors) if slot not in chain.moved], chain.dumps()
    compiled = torch.compile(
        lambda still, moved: torch.ops.postlude.chain(still, moved, text), backend=backend, fullgraph=True
    )
    result: Tensor = compiled(still, moved)
    return result


def gradients(result: Tensor, tensors: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(result, [t for t in tensors if t.requires_grad], dy))


@pytest.mark.parametrize("name", CHAINS)
def test_results_gradients_and_statistics_are_pytorchs(name: str) -> None:
    chain = CHAINS[name]
    tensors = inputs(chain)
    copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    ours, theirs = through(chain, tensors), reference.evaluate(chain, copies, moves=True)
    torch.testing.assert_close(ours, theirs)
    dy = torch.randn_like(theirs)
    for found, true in zip(gradients(ours, tensors, dy), gradients(theirs, copies, dy), strict=True):
        torch.testing.assert_close(found, true)
    for slot in chain.moved:
        torch.testing.assert_close(tensors[slot], copies[slot])


DETACHED = {
    "the convolution": Builder(2, conv(2, (3, 4), padding=1)).op("detach").norm(2).op("relu").chain(),
    "everything": Builder(2, conv(2, (3, 4), padding=1)).norm(2).op("detach").op("relu").chain(),
    "nothing": Builder(2, conv(2, (3, 4), padding=1)).op("detach").norm(2).op("add", Value(0)).chain(),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("what", DETACHED)
def test_what_is_detached_has_no_gradient_rather_than_zeros(what: str, compiled: bool) -> None:
    """An optimizer with weight decay skips parameters whose gradient is None, and changes those whose is zero."""
    chain = DETACHED[what]
    ours, theirs = inputs(chain), inputs(chain)
    for tensors, result in (
        (ours, through(chain, ours) if compiled else run_chain(chain, ours)),
        (theirs, reference.evaluate(chain, theirs)),
    ):
        assert result.requires_grad == (what != "everything")
        if result.requires_grad:
            result.square().sum().backward()
        assert [slot for slot, t in enumerate(tensors) if t.grad is None] == list(chain.detached)
    for found, true in zip(ours, theirs):
        torch.testing.assert_close(found.grad, true.grad)


@pytest.mark.parametrize("name", ["kept from its result", "views are kept"])
def test_pytorchs_own_checks_of_the_pair(name: str) -> None:
    chain = CHAINS[name]
    tensors = inputs(chain, torch.float32)
    seen: list[tuple[Any, tuple[Any, ...]]] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "postlude":
                seen.append((func, tree_map_only(Tensor, Tensor.detach, args)))
            return func(*args, **(kwargs or {}))

    with Watch():
        y = run_chain(chain, tensors)
        gradients(y, tensors, torch.ones_like(y))
    pair = torch.ops.postlude.chain_forward.default, torch.ops.postlude.chain_backward.default
    assert tuple(func for func, _ in seen) == pair
    for func, args in seen:
        torch.library.opcheck(func, args)
    torch.library.opcheck(pair[0], (tensors, seen[0][1][1]))  # which want gradients


def test_a_call_keeps_what_the_plan_keeps_and_computes_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = CHAINS["a block"]
    tensors = inputs(chain)
    runs: list[Tensor] = []
    runner = prepared(chain, problem_of(tensors))[1]
    assert isinstance(runner, Training)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (runs.append(t), t)[1], lambda t: t):
        y = through(chain, tensors)
    kept = runner.program(tensors, [True] * len(tensors)).kept
    assert len(runs) == len(kept)
    monkeypatch.setattr(Training, "gradients_again", None)  # never asked for
    gradients(y, tensors, torch.ones_like(y))


class Net(nn.Module):
    """Two levels of a U-Net: chains with a pool, an upsampling and a concatenation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.deep, self.batch = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.last, self.instance = nn.Conv2d(16, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.relu(self.norm(self.first(x)))
        deep = F.leaky_relu(self.batch(self.deep(F.max_pool2d(skip, 2))), 0.1)
        both = torch.cat([skip, F.interpolate(deep, scale_factor=2)], 1)
        return F.leaky_relu(self.instance(self.last(both)), 0.1)


def step(model: nn.Module, x: Tensor, run: Callable[..., Tensor] | None = None) -> list[Tensor]:
    """Result, gradients and statistics of one step."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x) if run is None else run(x)
    y.square().sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    assert x.grad is not None
    return [y.detach(), x.grad, *(g for g in grads if g is not None), *(b.clone() for b in model.buffers())]


@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_a_network_trains_and_evaluates_with_either_rest(rest: str) -> None:
    plain, x = Net().double(), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    model = copy.deepcopy(plain)
    result = postlude.optimize(model, x.clone().requires_grad_(), rest=rest, verify=False)
    assert [site.is_fused for site in result.sites] == [True] * 3
    for ours, theirs in zip(step(model, x), step(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs)
    model.eval(), plain.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))


def test_sizes_that_are_symbols_need_no_more_graphs_than_pytorch_alone_does() -> None:
    """Between chains sizes are halved and doubled; tracing with symbols takes too long for a larger network."""
    first = (nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.LeakyReLU(0.1), nn.Upsample(None, 2))
    plain = nn.Sequential(*first, *second).double()

    def graphs_with(backend: Callable[..., Any]) -> int:
        model, graphs = copy.deepcopy(plain), []
        torch.compiler.reset()
        run = torch.compile(model, backend=lambda *given: (graphs.append(given), backend(*given))[1], dynamic=True)
        truth = copy.deepcopy(plain)
        for size in (4, 6):
            x = torch.randn(2, 3, size, size, dtype=torch.float64)
            for ours, theirs in zip(step(model, x, run), step(truth, x), strict=True):
                torch.testing.assert_close(ours, theirs)
        return len(graphs)

    assert graphs_with(Backend(rest="inductor")) <= graphs_with(lookup_backend("aot_eager"))


def test_plans_for_sizes_that_come_later_are_checked_too() -> None:
    checked: list[tuple[int, ...]] = []

    def check(call: PlannedRun, tensors: object) -> Verdict:
        checked.append(call.problem.x.shape)
        return Verdict("wrong" if call.problem.x.shape[-1] == 12 else "right", (), "auto", (), ())

    ledger = Ledger(check)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2)).double()
    run = torch.compile(copy.deepcopy(model), backend=Backend(rest="inductor", ledger=ledger), dynamic=True)
    with torch.no_grad():
        for size in (8, 10, 12, 10):
            x = torch.randn(2, 3, size, size, dtype=torch.float64)
            torch.testing.assert_close(run(x), model(x))
    assert [shape[-1] for shape in checked if shape[-1] != 8] == [10, 12]
    assert list(ledger.off) == ["0"]


def test_checkpoints_run_the_pair_again() -> None:
    chain = CHAINS["a block"]
    tensors = inputs(chain)
    compiled = torch.compile(
        lambda *given: checkpoint(run_chain, chain, given, use_reentrant=False), backend="aot_eager"
    )
    y = compiled(*tensors)
    dy = torch.randn_like(y)
    for found, true in zip(
        gradients(y, tensors, dy), gradients(reference.evaluate(chain, tensors), tensors, dy), strict=True
    ):
        torch.testing.assert_close(found, true)


def test_gradients_of_gradients_are_pytorchs() -> None:
    chain = CHAINS["a residual"]
    tensors = inputs(chain)

    class Nothing(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def twice(run: Callable[[], Tensor]) -> list[Tensor]:
        y = run()
        first = torch.autograd.grad(y, tensors, torch.cos(y.detach()), create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), tensors, allow_unused=True))  # type: ignore[arg-type]

    with Nothing():
        ours = twice(lambda: run_chain(chain, tensors))
    for found, true in zip(ours, twice(lambda: reference.evaluate(chain, tensors)), strict=True):
        torch.testing.assert_close(found, true)


def test_a_kept_value_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: what is kept comes in another order."""
    honest = operator._kept
    monkeypatch.setattr(operator, "_kept", lambda *given: honest(*given)[::-1])
    with pytest.raises(Exception, match=r"."):
        test_results_gradients_and_statistics_are_pytorchs("a block")

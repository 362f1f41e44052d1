"""Active dropout in a chain: eager's random numbers, in eager's order, and nothing else where it is not fused."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn

from gpu_plans import planned_for_a_gpu
from postlude.chain import Chain, Pointwise, Slot, Value
from postlude.check.points import tensors_like
from postlude.graph import dropouts, fusion, spellings
from postlude.graph.backend import Backend
from postlude.graph.capture import capture_function
from postlude.graph.dropouts import close_dropouts, open_dropouts
from postlude.graph.tidy import functionalise, restore
from postlude.plan import Plan, Refusal

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore")]
aten = torch.ops.aten
Body = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Linear(6, 8)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def _two_around_another(m: Net, x: Tensor) -> Tensor:
    """The noise is drawn between the two masks, and does not belong to the chain."""
    y = F.dropout(m.conv(x), 0.5)
    return F.dropout(m.norm(y) + torch.rand_like(x[:, :1]).expand(-1, 8, -1, -1), 0.2)


IMAGE, MATRIX = (2, 4, 5, 6), (7, 6)
NATIVE = "mul(tensor) → mul(1.25)"
BODIES: dict[str, tuple[Body, tuple[int, ...], str]] = {
    "dropout": (lambda m, x: m.norm(F.dropout(m.conv(x), 0.2)), IMAGE, f"{NATIVE} → group_norm"),
    "in place": (lambda m, x: m.norm(F.dropout(m.conv(x), 0.2, inplace=True)), IMAGE, f"{NATIVE} → group_norm"),
    "of features": (lambda m, x: m.norm(F.dropout2d(m.conv(x), 0.5)), IMAGE, "mul(per sample and channel) → mul(2)"),
    "of a matrix": (lambda m, x: torch.relu(F.dropout(m.linear(x), 0.2)), MATRIX, f"{NATIVE} → relu"),
    "of rows": (lambda m, x: torch.relu(F.dropout(m.linear(x), 0.2)), (2, 3, 6), f"{NATIVE} → relu"),
    "two around another": (_two_around_another, IMAGE, "mul(2) → group_norm(2) → add(tensor) → mul(tensor)"),
}


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "open_dropouts", functools.partial(open_dropouts, devices=("cpu", "cuda")))


def _step(model: nn.Module, x: Tensor, seed: int = 3) -> list[Tensor]:
    """The result, its gradients, and the random numbers that come next."""
    torch.manual_seed(seed)
    model.zero_grad()
    x = x.clone().requires_grad_()
    result = model(x)
    after = torch.rand(3)
    (result * torch.linspace(-1, 1, result.numel()).reshape(result.shape)).sum().backward()
    return [result.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None), after]  # type: ignore[list-item]


def _chain_that_steps_like_eager(name: str, is_fused: bool = False) -> str:
    body, shape, _ = BODIES[name]
    torch.manual_seed(0)
    eager, x = Net(body), torch.randn(shape)
    model, fusing = copy.deepcopy(eager), Backend(rest="eager")
    model.compile(backend=fusing)
    for ours, theirs in zip(_step(model, x), _step(eager, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    (site,) = fusing.captured[0].sites
    assert isinstance(fusing.ledger.latest[site.name, site.chain].outcome, Plan if is_fused else Refusal)
    return str(site.chain)


@pytest.mark.usefixtures("on_a_cpu", "refused_chains_too")
@pytest.mark.parametrize("name", BODIES)
def test_a_chain_drops_what_eager_drops(name: str) -> None:
    assert BODIES[name][2] in _chain_that_steps_like_eager(name)


def _set_probability(node: fx.Node) -> None:
    node.args = (node.args[0], 0.8, *node.args[2:])


def _draw_otherwise(node: fx.Node) -> None:
    """Of memory in another order, as of a value in another layout."""
    memory = node.args[0]
    assert isinstance(memory, fx.Node)
    memory.kwargs = {**memory.kwargs, "memory_format": torch.channels_last}


@pytest.mark.usefixtures("on_a_cpu", "refused_chains_too")
@pytest.mark.parametrize("mutant", [_set_probability, _draw_otherwise])
def test_another_mask_is_noticed(mutant: Callable[[fx.Node], None], monkeypatch: pytest.MonkeyPatch) -> None:
    honest = dropouts._draw

    def draw(graph: fx.Graph, node: fx.Node, value: Tensor, p: float) -> tuple[fx.Node, ...]:
        nodes = honest(graph, node, value, p)
        mutant(nodes[1])
        return nodes

    monkeypatch.setattr(dropouts, "_draw", draw)
    with pytest.raises(AssertionError):
        _chain_that_steps_like_eager("dropout")


@pytest.mark.usefixtures("on_a_cpu", "refused_chains_too")
def test_masks_drawn_where_the_chain_runs_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def close_late(graph: fx.GraphModule, opened: list[dropouts.Opened]) -> None:
        for one in opened:
            for node in one.drawing:
                next(node for node in graph.graph.nodes if node.op == "call_module").prepend(node)

    monkeypatch.setattr(fusion, "close_dropouts", close_late)
    with pytest.raises(AssertionError):
        _chain_that_steps_like_eager("two around another")


def _opened(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[fx.GraphModule, list[dropouts.Opened]]:
    graph = capture_function(function, [x])
    functionalise(graph)
    return graph, open_dropouts(graph, ("cpu", "cuda"))


def test_what_is_not_fused_is_the_operator_that_it_was() -> None:
    def function(x: Tensor) -> Tensor:
        y = F.dropout(F.dropout3d(x * 2, 0.4), 0.3)
        return F.dropout(y + 1, 0.1, inplace=True)

    x = torch.randn(2, 3, 4, 5, 6)
    before = capture_function(function, [x])
    graph, opened = _opened(function, x)
    assert len(opened) == 3
    assert aten.native_dropout.default in {node.target for node in graph.graph.nodes}
    close_dropouts(graph, opened)
    restore(graph)
    graph.graph.lint()
    kinds = [
        [(node.target, *node.args[1:]) for node in one.graph.nodes if node.op[:4] == "call"] for one in (before, graph)
    ]
    assert kinds[0] == kinds[1]


@pytest.mark.usefixtures("refused_chains_too")
def test_dropout_in_place_stays_so_after_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functional twin draws other numbers on a GPU."""
    seen: list[fx.GraphModule] = []
    monkeypatch.setattr(fusion, "restore", lambda graph: (restore(graph), seen.append(graph)))
    net = Net(lambda m, x: F.dropout(m.norm(m.conv(x)), 0.5, inplace=True))
    net.compile(backend=Backend(rest="eager"))
    net(torch.randn(IMAGE))
    (chain,) = (node for node in seen[0].graph.nodes if node.op == "call_module")
    assert [user.target for user in chain.users] == [aten.dropout_.default]


def test_kept_values_are_scaled_so_that_the_mean_stays() -> None:
    p, ones = 0.3, torch.ones(400, 500)
    graph, _ = _opened(lambda x: F.dropout(x, p), ones)
    graph.recompile()
    found = graph(ones)
    variance, count = p / (1 - p), ones.numel()
    assert abs(float(found.mean()) - 1) < 4 * (variance / count) ** 0.5
    assert abs(float(found.var()) - variance) < 0.02
    assert set(found.unique().tolist()) == {0.0, float(torch.tensor(1 / (1 - p)))}


@pytest.mark.parametrize(
    ("function", "devices"),
    [
        (lambda x: F.dropout(x, 0.5), dropouts.FUSED_ON),  # on a CPU
        (lambda x: F.dropout(x, 1.0), ("cpu",)),
        (lambda x: F.alpha_dropout(x, 0.5, training=True), ("cpu",)),
        (lambda x: F.dropout(x.transpose(1, 2), 0.5), ("cpu",)),
    ],
)
def test_other_dropout_is_not_opened_and_has_a_reason(
    function: Callable[[Tensor], Tensor], devices: tuple[str, ...]
) -> None:
    graph = capture_function(function, [torch.randn(2, 3, 4)])
    functionalise(graph)
    assert not open_dropouts(graph, devices)
    reasons = [spellings.pointwise(node) for node in graph.graph.nodes if "dropout" in str(node.target)]
    assert [isinstance(reason, str) for reason in reasons] == [True]


def test_evaluation_and_sizes_that_are_symbols_draw_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated, opened = _opened(lambda x: F.dropout(x * 2, 0.5, training=False), torch.randn(2, 3))
    assert not opened
    assert [node.target for node in evaluated.graph.nodes if node.op == "call_function"] == [aten.mul.Tensor]
    seen: list[fx.GraphModule] = []

    def open_some(graph: fx.GraphModule) -> list[dropouts.Opened]:
        seen.append(graph)
        return open_dropouts(graph, ("cpu",))

    monkeypatch.setattr(fusion, "open_dropouts", open_some)
    torch.compile(lambda x: F.dropout(x * 2, 0.5), backend=Backend(rest="eager"), dynamic=True)(torch.randn(4, 5))
    assert aten.dropout.default in {node.target for node in seen[0].graph.nodes}


def test_a_check_draws_masks_of_both_values() -> None:
    chain = Chain(3, None, (Pointwise("mul", (Value(0), Slot(1))),), ("input", "full"))
    mask = tensors_like(chain, [torch.empty(1, 2, 3, 4, 5), torch.empty(1, 2, 3, 4, 5, dtype=torch.bool)])[1]
    assert 0.2 < float(mask.float().mean()) < 0.8


@pytest.fixture
def by_interpreter(on_a_cpu: None) -> Iterator[None]:
    with planned_for_a_gpu():
        yield


@pytest.mark.interpret
@pytest.mark.usefixtures("by_interpreter")
def test_kernels_drop_what_eager_drops() -> None:
    assert BODIES["of a matrix"][2] in _chain_that_steps_like_eager("of a matrix", is_fused=True)


@pytest.mark.interpret
@pytest.mark.usefixtures("by_interpreter")
def test_a_chain_of_too_many_tensors_ends_before_its_last_dropout() -> None:
    """Three of the value's size are too many in training; and the dropout that is left is PyTorch's own."""
    chain = _chain_that_steps_like_eager("two around another", is_fused=True)
    assert chain.endswith("mul(tensor) → mul(2) → group_norm(2) → add(tensor)")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("drop", [F.dropout, F.dropout2d, functools.partial(F.dropout, inplace=True)])
def test_a_gpu_draws_what_its_own_dropout_draws(drop: Callable[..., Tensor], is_last: bool, dtype: torch.dtype) -> None:
    """In every width of PyTorch's kernel, which reads up to eight numbers at a time; and what is drawn next."""
    if is_last and "inplace" in getattr(drop, "keywords", ()):
        pytest.skip("bernoulli writes contiguous memory, in another order")
    for width in (8, 7, 6, 1):
        x = torch.randn(3, 5, 4, width, device="cuda", dtype=dtype)
        x = x.contiguous(memory_format=torch.channels_last) if is_last else x
        function = lambda x: drop(x * 2, 0.3)  # noqa: E731
        graph, opened = _opened(function, x)
        assert len(opened) == 1
        graph.recompile()
        found = []
        for run in (graph, function):
            torch.cuda.manual_seed(5)
            found.append((run(x), torch.rand(3, device="cuda")))
        torch.testing.assert_close(*found, rtol=2 * torch.finfo(dtype).eps, atol=0)

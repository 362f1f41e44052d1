"""Channels-last through a graph: where values change their layout, and that nothing else does; kernels interpreted."""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend

import machines
import postlude
from cases import Builder, conv
from gpu_plans import planned_for_a_gpu
from plan.test_lower import problem
from postlude.graph import backend, biases, casts, decide, fusion, layout, regions, spellings
from postlude.optimized import Optimized
from postlude.plan import Plan, lower
from postlude.run import operator_passes
from postlude.run.ledger import Entry, Ledger, SiteProblem
from run.test_operator_pair import Net, step

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_dynamo")]


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[fx.GraphModule]]:
    """What Inductor is given; a convolution on the CPU counts as one on tensor cores."""
    seen: list[fx.GraphModule] = []

    def compile_fx(graph: fx.GraphModule, inputs: list[Any], **_: Any) -> Any:
        seen.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    monkeypatch.setattr(layout, "_pays", lambda node, x, allows_tf32: x.meta["val"].shape[1] > 1)
    monkeypatch.setattr(decide, "unpaid", lambda *_: [])
    with planned_for_a_gpu():
        yield seen


def test_results_gradients_and_their_strides_are_eagers(graphs: list[fx.GraphModule]) -> None:
    plain, x = Net().double(), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    model = copy.deepcopy(plain)
    result = postlude.optimize(model, x.clone().requires_grad_(), rest="inductor", verify=False)
    assert [site.problem.hands_on for site in result.sites] == ["channels_last"] * 3
    for ours, theirs in zip(step(model, x), step(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.stride() == theirs.stride()
    kinds = [node.target for node in graphs[0].graph.nodes]
    assert kinds.count(torch.ops.postlude.chain.default) == 3
    assert kinds.count(torch.ops.aten.contiguous.default) == 4  # before each convolution, and of the result
    _assert_a_value_is_converted_once_and_inside_it_stays(graphs[0], result)


VIEWS = {
    "transposed": lambda h: h.transpose(1, 2),
    "channels last": lambda h: h.movedim(1, -1),
    "a row of tokens": lambda h: h.flatten(2).transpose(1, 2) * 2,
    "every other row": lambda h: h[:, :, ::2],
    "repeated": lambda h: h.expand(3, *h.shape),
    "one value twice": lambda h: (h, h.flatten(1)),
}
KEEP_LAYOUTS = ("repeated", "one value twice")


class ReturningViews(Net):
    def __init__(self, view: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.view = view

    def forward(self, x: Tensor) -> Any:
        return self.view(super().forward(x))


@pytest.mark.parametrize("view", VIEWS)
def test_results_that_are_views_have_eagers_strides(view: str, graphs: list[fx.GraphModule]) -> None:
    """What the caller does with them may need the strides: `view` does."""
    plain, x = ReturningViews(VIEWS[view]).double(), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    model = copy.deepcopy(plain)
    result = postlude.optimize(model, x.clone().requires_grad_(), rest="inductor", verify=False)
    assert bool(result.conversions) != (view in KEEP_LAYOUTS)
    expected, found = plain(x), model(x)
    if view == "one value twice":
        found[0].fill_(1)
        assert (found[1] == 1).all()  # the second shows what is written to the first
        return
    for ours, theirs in zip(step(model, x), step(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs)
    if view == "every other row":
        assert found.is_contiguous()
    else:
        assert found.stride() == expected.stride()


def _assert_a_value_is_converted_once_and_inside_it_stays(graph: fx.GraphModule, result: Optimized) -> None:
    changed = [
        node
        for node in graph.graph.nodes
        if node.target is torch.ops.aten.contiguous.default
        and node.args[0].meta["val"].stride() != node.meta["val"].stride()
    ]
    assert [node.args[0].op for node in changed] == ["placeholder", "call_function"]  # the input, the result
    assert [(item.name, item.layout) for item in result.conversions] == [
        ("first", "channels-last"),
        ("leaky_relu_1", "contiguous"),
    ]
    assert changed[1].kwargs["memory_format"] is torch.contiguous_format


def test_masks_are_channels_last_where_the_chain_is_and_drawn_in_eagers_order(
    graphs: list[fx.GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conversion is one that Inductor makes part of the pass that draws."""
    monkeypatch.setattr(fusion, "open_dropouts", functools.partial(fusion.open_dropouts, devices=("cpu",)))
    layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.Dropout(0.5), torch.nn.GroupNorm(2, 4), torch.nn.Conv2d(4, 4, 1)]
    plain, x = torch.nn.Sequential(*layers).double(), torch.randn(2, 3, 5, 5, dtype=torch.float64)
    model = copy.deepcopy(plain)
    with torch.no_grad():
        result = postlude.optimize(model, x, rest="inductor", verify=False)
        (site,) = [site for site in result.sites if "mul(tensor)" in str(site.chain)]
        assert site.is_fused
        assert site.problem.tensors[3].layout == site.problem.hands_on == "channels_last"
        found = []
        for one in (model, plain):
            torch.manual_seed(1)
            found.append(one(x))
    torch.testing.assert_close(*found)
    (draw,) = [node for node in graphs[0].graph.nodes if node.target is torch.ops.aten.native_dropout.default]
    assert draw.args[0].kwargs["memory_format"] is torch.contiguous_format


@pytest.mark.parametrize("refused", ["first", "last"])
def test_a_norm_that_stays_pytorchs_keeps_the_layout(
    refused: str, monkeypatch: pytest.MonkeyPatch, graphs: list[fx.GraphModule]
) -> None:
    """On a GPU PyTorch's own are contiguous: others would convert what they read, and `convolution_backward` its
    gradient."""
    honest = Ledger.planned

    def planned(self: Ledger, asked: SiteProblem) -> Entry | None:
        self.off[refused] = "as if it had been wrong"
        return honest(self, asked)

    monkeypatch.setattr(Ledger, "planned", planned)
    plain, x = Net().double(), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    model = copy.deepcopy(plain)
    result = postlude.optimize(model, x.clone().requires_grad_(), rest="inductor", verify=False)
    others = ["channels_last" if name != refused else "" for name in ("first", "deep", "last")]
    assert [site.problem.hands_on for site in result.sites] == others
    assert [item.layout for item in result.conversions] == ["channels-last", "contiguous"]  # as without a refusal
    norms = [node for node in graphs[0].graph.nodes if node.target is torch.ops.postlude.norm.default]
    assert [node.meta["val"].is_contiguous(memory_format=torch.channels_last) for node in norms] == [True]
    for ours, theirs in zip(step(model, x), step(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_weights_are_cast_by_the_operator_that_returns_their_gradients_as_they_lie(
    graphs: list[fx.GraphModule],
) -> None:
    layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 8, 3), torch.nn.Conv2d(8, 4, 3, bias=False)]
    plain = torch.nn.Sequential(*layers)
    plain[2].weight.requires_grad_(False)
    model, x = copy.deepcopy(plain), torch.randn(2, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        postlude.optimize(model, x, rest="inductor", verify=False)
        ours, theirs = model(x), plain(x)
    torch.testing.assert_close(ours, theirs)
    casts = [node for node in graphs[0].graph.nodes if node.target is torch.ops.postlude.weights.default]
    assert [len(node.args[0]) for node in casts] == [4, 1]  # together, but for the one without a gradient
    assert {value.dtype for node in casts for value in node.meta["val"]} == {torch.bfloat16}
    # Weights are cast to the layout in which convolutions read them, here and in the backward pass.
    assert [node.args[2] for node in casts] == [[True, False, True, False], [True]]
    assert casts[0].meta["val"][0].is_contiguous(memory_format=torch.channels_last)
    grads = [
        torch.autograd.grad(y.float().square().sum(), [*m[0].parameters(), *m[1].parameters()])
        for m, y in ((model, ours), (plain, theirs))
    ]
    for mine, other in zip(*grads):
        torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-2)
        assert mine.is_contiguous()


@pytest.mark.parametrize("trains", [False, True])
def test_a_bias_is_added_by_whoever_reads_the_convolution(
    trains: bool, graphs: list[fx.GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With it the compiler would write the value twice: by the convolution, and with its bias, for the backward
    pass."""
    monkeypatch.setattr(biases, "_is_added_later", lambda bias, value: bias.dtype == value.dtype)
    # Nothing follows that could be fused, so these are PyTorch's.
    layers = [torch.nn.Conv2d(3, 8, 3, padding="same"), torch.nn.ConvTranspose2d(8, 4, 2), torch.nn.Conv2d(4, 4, 1)]
    plain, x = torch.nn.Sequential(*layers).double(), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    model = copy.deepcopy(plain)
    with torch.set_grad_enabled(trains):
        postlude.optimize(model, x, rest="inductor", verify=False)
        ours, theirs = model(x), plain(x)
    torch.testing.assert_close(ours, theirs)
    nodes = list(graphs[0].graph.nodes)
    convolutions = [node for node in nodes if spellings.is_convolution(node)]
    assert [spellings.arguments_of(node)["bias"] for node in convolutions] == [None] * 3
    assert [next(iter(node.users)).target for node in convolutions] == [torch.ops.aten.add.Tensor] * 3
    if trains:
        grads = [
            torch.autograd.grad(y.square().sum(), list(m.parameters())) for m, y in ((model, ours), (plain, theirs))
        ]
        for mine, other in zip(*grads, strict=True):
            torch.testing.assert_close(mine, other)


class _Regions(torch.nn.Module):
    """One that is all ours, then two convolutions that nothing is fused with."""

    def __init__(self) -> None:
        super().__init__()
        self.ours, self.norm = torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(2, 8)
        self.theirs = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3, stride=2), torch.nn.Conv2d(4, 2, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.ours(x)))
        return self.theirs(y.cumsum(1).reshape(x.shape[0], 2, -1, y.shape[3]))  # type: ignore[no-any-return]


def test_a_region_that_saves_no_conversions_keeps_its_layout(
    graphs: list[fx.GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packing before our own convolutions reads either layout; cuDNN's convert what is not channels-last."""
    plain, x = _Regions().double(), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    everywhere = postlude.optimize(copy.deepcopy(plain), x, rest="inductor", verify=False)
    assert [(item.name, item.layout) for item in everywhere.conversions] == [
        ("ours", "channels-last"),
        ("theirs.0", "channels-last"),
        ("theirs.1", "contiguous"),
    ]
    torch.compiler.reset()
    monkeypatch.setattr(decide, "unpaid", regions.unpaid)
    model = copy.deepcopy(plain)
    result = postlude.optimize(model, x, rest="inductor", verify=False)
    assert [item.name for item in result.conversions] == ["theirs.0", "theirs.1"]
    assert [site.problem.hands_on for site in result.sites] == [""]
    for ours, theirs in zip(step(model, x), step(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.stride() == theirs.stride()


class _Residual(torch.nn.Module):
    """A dilated convolution is PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.other = torch.nn.Conv2d(3, 4, 3, dilation=2), torch.nn.Conv2d(3, 4, 3, dilation=2)
        self.norm = torch.nn.GroupNorm(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(torch.tanh(self.conv(x)).cumsum(1))) + torch.sigmoid(self.other(x))


@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_a_pass_that_inductor_makes_as_well_is_left_to_it(rest: str) -> None:
    plain, x = _Residual().double(), torch.randn(2, 3, 7, 7, dtype=torch.float64)
    model = copy.deepcopy(plain)
    result = postlude.optimize(model, x, rest=rest, verify=False)
    torch.testing.assert_close(model(x), plain(x))
    fused = {site.name: site.is_fused for site in result.sites}
    assert fused == {"conv": rest == "eager", "other": rest == "eager", "norm": True}
    if rest == "inductor":
        assert "Inductor" in result.sites[0].outcome.reasons[0]


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_small_values_behind_pytorchs_convolution_are_inductors_unless_launches_are_replayed(
    mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = types.SimpleNamespace(outcome=_planned((1, 64, 64, 64, 64)))
    small = types.SimpleNamespace(outcome=_planned((1, 64, 64, 63, 64)))
    ledger = types.SimpleNamespace(planned=lambda one: one.entry, refuse=lambda _, why: why)
    monkeypatch.setattr(decide, "machine_for", lambda _: machines.H200)
    chain = Builder(3, dataclasses.replace(conv(3, (8, 64), stride=2), dtype="float16")).norm(8).op("relu").chain()
    for known, is_left in ((entry, False), (small, mode is None)):
        weight = types.SimpleNamespace(dtype="float32")
        problem = types.SimpleNamespace(device="cuda", place="cuda:0", tensors=(weight, weight))
        asked: Any = types.SimpleNamespace(entry=known, chain=chain, problem=problem)
        known_of_it = decide.Around(has_graphs=mode is not None, is_cast=False, is_summed=False)
        found = decide._entry(cast("Ledger", ledger), asked, known_of_it)
        assert (isinstance(found, str) and "63.0 MiB" in found) == is_left
        assert (found is known) != is_left


def test_a_result_that_is_also_read_in_16_bits_is_inductors(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = types.SimpleNamespace(outcome=_planned((1, 64, 64, 96, 64)))
    ledger = types.SimpleNamespace(planned=lambda _: entry, refuse=lambda _, why: why)
    monkeypatch.setattr(decide, "machine_for", lambda _: machines.H200)
    aten, weight = torch.ops.aten, types.SimpleNamespace(dtype="float32")
    given = types.SimpleNamespace(device="cpu", tensors=(weight, weight))
    asked: Any = types.SimpleNamespace(chain=entry.outcome.chain, problem=given)
    for is_laid_out, targets, is_left in (
        (False, [aten.neg.default], False),
        (True, [aten.neg.default], False),
        (False, [aten.neg.default, aten.to.dtype], True),
        (True, [aten.to.dtype], True),
    ):
        graph = fx.Graph()
        result = graph.call_function(torch.relu, (graph.placeholder("x"),))
        read = graph.call_function(aten.contiguous.default, (result,)) if is_laid_out else result
        for target in targets:
            graph.call_function(target, (read,))
        found = decide._entry(cast("Ledger", ledger), asked, decide.around(result, set(), has_graphs=True))
        assert (isinstance(found, str) and "16 bits" in found) == is_left


@pytest.mark.parametrize("reader", [torch.ops.aten.to.dtype, torch.ops.aten.add.Tensor])
@pytest.mark.parametrize("is_pooled", [False, True])
def test_a_pool_behind_a_norm_is_ours_whoever_reads_it(
    reader: Any, is_pooled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor would write what the norm gives at its full size: 0.4 of the 9.7 GB of resnet50_gn's inference."""
    entry = types.SimpleNamespace(outcome=_planned((1, 64, 64, 96, 64), is_pooled))
    ledger = types.SimpleNamespace(planned=lambda _: entry, refuse=lambda _, why: why)
    monkeypatch.setattr(decide, "machine_for", lambda _: machines.H200)
    weight = types.SimpleNamespace(dtype="float32", layout="channels_last")
    given = types.SimpleNamespace(device="cuda", place="cuda:0", tensors=(weight, weight))
    asked: Any = types.SimpleNamespace(chain=entry.outcome.chain, problem=given)
    graph = fx.Graph()
    x, other = graph.placeholder("x"), graph.placeholder("other")
    result = graph.call_function(torch.relu, (x,))
    graph.call_function(reader, (result, other))
    found = decide._entry(cast("Ledger", ledger), asked, decide.around(result, set(), has_graphs=False))
    assert (found is entry) == is_pooled


@pytest.mark.parametrize("reader", ["a sum", "a sum and more", "a sum of ours", "contiguous", "nothing"])
def test_a_result_that_is_only_added_to_another_is_inductors(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's pass adds as it normalizes; ours would write the result for another pass to read."""
    entry = types.SimpleNamespace(outcome=_planned((1, 64, 64, 96, 64)))
    ledger = types.SimpleNamespace(planned=lambda _: entry, refuse=lambda _, why: why)
    monkeypatch.setattr(decide, "machine_for", lambda _: machines.H200)
    weight = types.SimpleNamespace(dtype="float32", layout="contiguous" if reader == "contiguous" else "channels_last")
    given = types.SimpleNamespace(device="cpu", tensors=(weight, weight))
    asked: Any = types.SimpleNamespace(chain=entry.outcome.chain, problem=given)
    graph = fx.Graph()
    x, other = graph.placeholder("x"), graph.placeholder("other")
    result = graph.call_function(torch.relu, (x,))
    added = graph.call_function(torch.ops.aten.add.Tensor, (result, other)) if reader != "nothing" else None
    if reader == "a sum and more":
        graph.call_function(torch.ops.aten.neg.default, (result,))
    ours = {added} if reader == "a sum of ours" and added is not None else set()
    found = decide._entry(cast("Ledger", ledger), asked, decide.around(result, ours, has_graphs=False))
    assert (isinstance(found, str) and "added" in found) == (reader == "a sum")


def _planned(shape: tuple[int, ...], is_pooled: bool = False) -> Plan:
    """A plan with PyTorch's convolution, of which only the value's size and the pool matter."""
    built = Builder(3, conv(3, (8, 64), stride=2)).norm(8).op("relu")
    chain = (built.pool("max", 2) if is_pooled else built).chain()
    given = dataclasses.replace(problem(chain, (1, 8, 16, 16, 16), "contiguous"), device="cuda", convolution="pytorch")
    plan = lower(chain, given, machines.H200, even_if_slower=True)
    assert isinstance(plan, Plan)
    return dataclasses.replace(plan, value=dataclasses.replace(plan.value, shape=shape))


class _Viewed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 4, 3), torch.nn.GroupNorm(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x))).view(x.shape[0], -1).cumsum(1)


def test_a_graph_that_views_its_values_keeps_their_layout(graphs: list[fx.GraphModule]) -> None:
    model, x = _Viewed().double(), torch.randn(2, 3, 5, 5, dtype=torch.float64)
    plain = copy.deepcopy(model)
    result = postlude.optimize(model, x, rest="inductor", verify=False)
    torch.testing.assert_close(model(x), plain(x))
    assert [site.is_fused for site in result.sites] == [True]
    assert torch.ops.aten.contiguous.default not in [node.target for node in graphs[0].graph.nodes]


def test_keep_leaves_layouts_alone(graphs: list[fx.GraphModule]) -> None:
    x = torch.randn(2, 3, 4, 4)
    torch.compile(Net(), backend="postlude", options={"rest": "inductor", "layout": "keep", "verify": False})(x)
    assert torch.ops.aten.contiguous.default not in [node.target for node in graphs[0].graph.nodes]


def test_a_result_in_another_layout_is_seen(monkeypatch: pytest.MonkeyPatch, graphs: list[fx.GraphModule]) -> None:
    """Mutant: what the graph returns stays channels-last."""
    monkeypatch.setattr(fusion, "restore_results", lambda *_: None)
    with pytest.raises(AssertionError):
        test_results_gradients_and_their_strides_are_eagers(graphs)


class _Chain(torch.nn.Module):
    def __init__(self, ends_elsewhere: bool) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 4, 3), torch.nn.GroupNorm(2, 4)
        self.ends_elsewhere = ends_elsewhere

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.conv(x)))
        return y.cumsum(1) if self.ends_elsewhere else y


@pytest.mark.parametrize(
    ("leaves_something", "mode"),
    [(True, None), (False, None), (False, "max-autotune-no-cudagraphs"), (False, "reduce-overhead")],
)
def test_inductor_is_not_called_where_nothing_is_left_for_it(
    leaves_something: bool, mode: str | None, graphs: list[fx.GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for CUDA graphs it is, if a mode asks for them."""
    monkeypatch.setattr(backend, "_device_of", lambda inputs: "cuda")
    monkeypatch.setattr("postlude.hardware.can_compile", lambda: True)
    monkeypatch.setattr(backend, "check_precision", lambda *_: None)
    model, x = _Chain(leaves_something), torch.randn(2, 3, 6, 6)
    plain = copy.deepcopy(model)
    postlude.optimize(model, x, verify=False, mode=mode)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)
    assert bool(graphs) == (leaves_something or mode == "reduce-overhead")


class Headed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = Net(), torch.nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(x).mean((2, 3))).relu()


def test_a_linear_head_has_one_layout(graphs: list[fx.GraphModule]) -> None:
    """Its matrix is neither channels-last nor converted."""
    plain, x = Headed().double(), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    channels = plain.net(x).shape[1]
    plain.head = torch.nn.Linear(channels, 6).double()
    model = copy.deepcopy(plain)
    result = postlude.optimize(model, x.clone().requires_grad_(), rest="inductor", verify=False)
    assert [site.problem.hands_on for site in result.sites] == ["channels_last", "channels_last", "", ""]
    assert str(result.sites[-1].chain) == f"linear({channels}→6) → relu"
    for ours, theirs in zip(step(model, x), step(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.stride() == theirs.stride()
    assert [node.target for node in graphs[0].graph.nodes].count(torch.ops.postlude.chain.default) == 4


class _NormFirst(torch.nn.Module):
    """The order of pre-activation networks: a norm reads what upsampling and a concatenation made."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv3d(2, 4, 3, padding=1), torch.nn.GroupNorm(2, 8)
        self.last = torch.nn.Conv3d(8, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = torch.relu(self.conv(x))
        deep = torch.nn.functional.interpolate(torch.nn.functional.max_pool3d(skip, 2), scale_factor=2)
        return torch.relu(self.last(torch.relu(self.norm(torch.cat([skip, deep], 1)))))


def test_the_graph_says_which_layout_chains_read(graphs: list[fx.GraphModule]) -> None:
    plain, x = _NormFirst().double(), torch.randn(1, 2, 4, 4, 4, dtype=torch.float64)
    model = copy.deepcopy(plain)
    postlude.optimize(model, x, rest="inductor", verify=False)
    chains = [node for node in graphs[0].graph.nodes if node.target is torch.ops.postlude.chain.default]
    read = [node.args[0][0] for node in chains]
    (norms,) = [node for node in read if "cat" in str(node.args)]
    assert norms.target is torch.ops.aten.contiguous.default
    assert norms.kwargs["memory_format"] is torch.channels_last_3d
    torch.testing.assert_close(model(x), plain(x))


def test_gradients_are_converted_where_a_compiler_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not inside of `chain_backward`: nothing that either pass of a chain is given is copied there."""
    copied: list[tuple[int, ...]] = []
    honest = operator_passes.laid_out

    def laid_out(tensor: torch.Tensor, *spec: Any) -> torch.Tensor:
        copied.append(tensor.stride())
        return honest(tensor, *spec)

    monkeypatch.setattr(operator_passes, "laid_out", laid_out)
    for plain, x in ((Net(), torch.randn(2, 3, 4, 4)), (_NormFirst(), torch.randn(1, 2, 4, 4, 4))):
        model = copy.deepcopy(plain.double())
        postlude.optimize(model, x.double(), rest="inductor", verify=False)
        copied.clear()
        for ours, theirs in zip(step(model, x.double()), step(plain, x.double()), strict=True):
            torch.testing.assert_close(ours, theirs)
        assert not copied
        torch.compiler.reset()


def test_convolutions_read_channels_last_values_that_inductor_cannot_move(graphs: list[fx.GraphModule]) -> None:
    plain = torch.nn.Sequential(torch.nn.Conv3d(2, 4, 3), torch.nn.Sigmoid(), torch.nn.Conv3d(4, 2, 3)).double()
    model, x = copy.deepcopy(plain), torch.randn(2, 2, 6, 6, 6, dtype=torch.float64)
    postlude.optimize(model, x, rest="inductor", verify=False)
    read = [node.args[0].target for node in graphs[0].graph.nodes if "conv" in str(node.target)]
    assert read == [torch.ops.postlude.channels_last.default]  # by the last one; the first is in a chain
    for ours, theirs in zip(step(model, x), step(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs)


class _Writing(torch.nn.Module):
    """Writes through a view to what convolutions read: to a value between two of them, or to a weight before one."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.one, self.other, self.what = torch.nn.Conv2d(4, 8, 3), torch.nn.Conv2d(4, 8, 3), what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sigmoid()
        if self.what == "weight":
            self.other.weight.data.clamp_(-0.01, 0.01)
        y = self.one(x)
        if self.what == "value":
            x[:, :2].mul_(4)
        return y + self.other(x)


@pytest.mark.parametrize(("what", "autocast"), [("value", False), ("value", True), ("weight", True)])
@pytest.mark.parametrize("is_mutant", [False, True])
def test_what_the_graph_writes_to_is_read_where_the_model_reads_it(
    what: str, autocast: bool, is_mutant: bool, graphs: list[fx.GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversions and casts that several convolutions share are made before the first of them."""
    monkeypatch.setattr(casts, "_is_narrowed", lambda x, dtype: x.op == "call_function" and dtype.itemsize == 2)
    if is_mutant:
        for module in (casts, layout):
            monkeypatch.setattr(module, "written_storages", lambda graph: set())
    plain, x = _Writing(what), torch.randn(2, 4, 6, 6)
    model = copy.deepcopy(plain)
    with torch.no_grad(), torch.autocast("cpu", torch.float16, enabled=autocast):
        postlude.optimize(model, x, rest="inductor", verify=False)
        ours, theirs = model(x), plain(x)
    assert torch.allclose(ours, theirs, rtol=2e-2, atol=2e-2) is not is_mutant
    assert len(graphs) == 1

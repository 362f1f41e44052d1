"""`postlude.optimize`: in place, verified, undoable, and everything else left as it was."""

from __future__ import annotations

import copy
import functools
import gc
import io
import os
import pickle
import warnings
import weakref
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import postlude
from postlude import nn as fused_nn
from postlude import site_check
from postlude.check import random_state
from postlude.graph.backend import Backend
from postlude.plan import Plan, Refusal
from postlude.run import cpu
from postlude.run.ledger import PlannedRun

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "fresh_verdicts")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv3d(2, 8, 3, padding=1), nn.InstanceNorm3d(8, affine=True), nn.LeakyReLU(0.1)
        )
        self.bn = nn.BatchNorm3d(8)
        self.drop = nn.Dropout(0.5)
        self.decoder = nn.ConvTranspose3d(8, 4, 2, stride=2)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.bn(self.encoder(x)))
        return torch.relu(self.norm(self.decoder(h)))


@pytest.fixture
def net() -> Net:
    model = Net().eval()
    model.load_state_dict(random_state(model, 0))
    return model


LARGE = (4, 2, 8, 9, 10)  # enough to gain where `small_values_fuse`


@pytest.mark.usefixtures("small_values_fuse")
def test_in_place_verified_and_undoable(net: Net) -> None:
    x = torch.randn(LARGE)
    parameters, keys = list(net.parameters()), list(net.state_dict())
    plain = copy.deepcopy(net)
    with torch.no_grad():
        result = postlude.optimize(net, x)
        assert result.model is net
        assert postlude.is_optimized(net)
        assert [str(site.chain) for site in result.sites] == [
            "conv3d(2→8, k3, p1) → instance_norm → leaky_relu(0.1) → batch_norm(per channel)",
            "conv_transpose3d(8→4, k2, s2) → group_norm(2) → relu",
        ]
        assert [site.name for site in result.sites] == ["encoder.0", "decoder"]
        assert result.verdict is not None
        assert result.verdict.right, result.verdict
        first, *sites, _ = repr(result).splitlines()
        assert first == f"Optimized(Net: 2 of 2 chains fused; {result.verdict}"
        assert sites == [f"  ({site.name}): {site.chain}: fused" for site in result.sites]
        assert all(site.verdict is not None and site.verdict.right for site in result.sites)
        torch.testing.assert_close(net(x), plain(x))
    assert type(net) is Net
    assert all(a is b for a, b in zip(net.parameters(), parameters))
    assert list(net.state_dict()) == keys
    assert result.undo() is net
    assert not postlude.is_optimized(net)
    with torch.no_grad():
        torch.testing.assert_close(net(x), plain(x), rtol=0, atol=0)


def test_a_mean_after_a_norm_is_judged_with_its_initial_parameters_too() -> None:
    """With γ = 1 and β = 0 the result is nothing but rounding: other points must tell."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv3d(3, 24, 3), nn.GroupNorm(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x)).mean((1, 2, 3, 4))

    model = Mean().eval()
    with torch.no_grad():
        verdict = postlude.optimize(model, torch.randn(16, 3, 24, 32, 32)).verdict
    assert verdict is not None
    assert verdict.outcome == "right", verdict


def test_buffers_random_state_gradients_and_mode_are_left_alone(net: Net) -> None:
    net.train()
    x = torch.randn(2, 2, 8, 8, 8)
    net(x).sum().backward()
    before = copy.deepcopy(net.state_dict())
    grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    random = torch.get_rng_state()
    postlude.optimize(net, x)
    assert net.training
    assert torch.equal(random, torch.get_rng_state())
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name
    for ours, theirs in zip((p.grad for p in net.parameters()), grads):
        assert ours is not None
        assert torch.equal(ours, theirs)


class Averaging(nn.Module):
    """Keeps moving averages in the three ways that models write them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)
        self.register_buffer("assigned", torch.ones(4))
        self.register_buffer("written", torch.ones(4))
        self.codes = nn.Embedding(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        with torch.no_grad():
            mean = y.mean((0, 2, 3))
            self.assigned = 0.9 * self.assigned + 0.1 * mean
            self.written.data.mul_(0.9).add_(0.1 * mean)
            self.codes.weight.data.copy_(self.codes.weight + self.written)
        return y + self.codes.weight.data.mean()


@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_what_a_forward_writes_is_restored_once_and_kept_from_then_on(rest: str) -> None:
    ours, x = Averaging(), torch.randn(2, 3, 8, 8)
    plain, assigned = copy.deepcopy(ours), ours.assigned
    postlude.optimize(ours, x, rest=rest)
    assert ours.assigned is assigned
    for name, value in ours.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name
    for _ in range(3):
        torch.testing.assert_close(ours(x), plain(x))
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])


def test_a_graph_from_before_can_still_be_differentiated(net: Net) -> None:
    x = torch.randn(2, 2, 8, 8, 8)
    loss = net(x).sum()
    postlude.optimize(net, x)
    loss.backward()


def test_training_gives_pytorchs_gradients(net: Net) -> None:
    plain = copy.deepcopy(net)
    x = torch.randn(2, 2, 8, 8, 8)
    result = postlude.optimize(net, x)
    assert all(isinstance(site.outcome, Refusal) for site in result.sites)
    assert "gradients" in str(result.sites[0].outcome)
    for model in (net, plain):
        model(x).square().sum().backward()
    for ours, theirs in zip(net.parameters(), plain.parameters()):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_copies_and_pickles_are_plain_models(net: Net) -> None:
    x = torch.randn(1, 2, 8, 8, 8)
    postlude.optimize(net, x)
    twin = copy.deepcopy(net)
    assert not postlude.is_optimized(twin)
    again = pickle.loads(pickle.dumps(net))
    assert not postlude.is_optimized(again)
    with torch.no_grad():
        torch.testing.assert_close(twin(x), net(x))
        torch.testing.assert_close(again(x), net(x))
    saved = io.BytesIO()
    torch.save(net.state_dict(), saved)
    assert postlude.optimize(twin, x).model is twin


def test_a_model_of_pytorchs_own_class_is_captured_too() -> None:
    model = nn.Sequential(nn.Conv3d(2, 4, 3), nn.ReLU(), nn.GroupNorm(2, 4)).eval()
    plain = copy.deepcopy(model)
    x = torch.randn(2, 2, 6, 6, 6)
    with torch.no_grad():
        result = postlude.optimize(model, x)
        assert [(site.name, str(site.chain)) for site in result.sites] == [
            ("0", "conv3d(2→4, k3) → relu → group_norm(2)")
        ]
        torch.testing.assert_close(model(x), plain(x))


def test_only_selects_by_name_or_function(net: Net) -> None:
    x = torch.randn(1, 2, 8, 8, 8)
    result = postlude.optimize(net, x, only="decoder*")
    assert [site.name for site in result.sites] == ["decoder"]
    assert any(item.reason == "left out by only=" for item in result.declined)
    result = postlude.optimize(
        net, (x,), only=lambda name, chain: chain.producer is not None and name.startswith("enc")
    )
    assert [site.name for site in result.sites] == ["encoder.0"]


@pytest.mark.usefixtures("small_values_fuse")
def test_a_site_that_is_wrong_is_switched_off_and_said(
    net: Net, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    honest = cpu._stored

    def off_by_a_little(plan: Plan, tensors: Sequence[Tensor]) -> Tensor:
        return honest(plan, tensors) * 1.001

    monkeypatch.setattr(cpu, "_stored", off_by_a_little)
    plain = copy.deepcopy(net)
    x = torch.randn(LARGE)
    with torch.no_grad():
        result = postlude.optimize(net, x)
        assert result.verdict is not None
        assert result.verdict.outcome == "wrong"
        assert "PyTorch runs it; please report it" in caplog.text
        assert not any(site.is_fused for site in result.sites)
        assert "verification failed" in str(result.sites[0].outcome)
        torch.testing.assert_close(net(x), plain(x), rtol=0, atol=0)
    caplog.clear()
    with torch.no_grad():  # another shape is another plan, and the site is off all the same
        torch.testing.assert_close(net(x[:3]), plain(x[:3]), rtol=0, atol=0)
    assert "wrong" not in caplog.text


@pytest.mark.usefixtures("small_values_fuse")
def test_every_plan_is_checked_before_its_first_use(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for a shape that came later is judged too, and one that is wrong there never answers."""
    honest = cpu._stored

    def off_for_three(plan: Plan, tensors: Sequence[Tensor]) -> Tensor:
        return honest(plan, tensors) * (1.001 if len(tensors[0]) == 3 else 1)

    monkeypatch.setattr(cpu, "_stored", off_for_three)
    plain = copy.deepcopy(net)
    x = torch.randn(LARGE)
    with torch.no_grad():
        assert all(site.is_fused for site in postlude.optimize(net, x).sites)
        torch.testing.assert_close(net(x[:3]), plain(x[:3]), rtol=0, atol=0)
        torch.testing.assert_close(net(x), plain(x), rtol=0, atol=0)  # a site that failed once stays off


@pytest.mark.usefixtures("small_values_fuse")
def test_an_equal_plan_is_checked_once(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[PlannedRun] = []
    judge = site_check._judge
    monkeypatch.setattr(site_check, "_judge", lambda call, tensors: judged.append(call) or judge(call, tensors))
    monkeypatch.setattr(site_check.check_site, "known", {})
    x = torch.randn(LARGE)
    with torch.no_grad():
        postlude.optimize(net, x)
        assert len(judged) == 2
        postlude.optimize(copy.deepcopy(net), x)
        assert len(judged) == 2
        site_check.check_site.known.clear()  # as in a later process, which finds them on disk
        result = postlude.optimize(copy.deepcopy(net), x)
        assert len(judged) == 2
        assert result.verdict is not None
        assert result.verdict.right
        (path, *_) = Path(os.environ["POSTLUDE_CACHE_DIR"]).glob("*.verdict")
        path.write_bytes(b"spoilt")
        site_check.check_site.known.clear()
        postlude.optimize(copy.deepcopy(net), x)
        assert len(judged) == 3


@pytest.mark.usefixtures("small_values_fuse")
def test_a_kernel_that_cannot_be_built_leaves_the_model_to_pytorch(
    net: Net, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(plan: Plan, tensors: Sequence[Tensor]) -> Tensor:
        raise RuntimeError("ptxas fatal: no such register\nand more")

    monkeypatch.setattr("postlude.run.ledger.prepared", broken)
    plain = copy.deepcopy(net)
    x = torch.randn(LARGE)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="no such register"):  # POSTLUDE_STRICT is set for all tests
            postlude.optimize(copy.deepcopy(net), x)
        monkeypatch.delenv("POSTLUDE_STRICT")
        result = postlude.optimize(net, x)
        assert "(RuntimeError: ptxas fatal: no such register)" in str(result.sites[0].outcome)
        assert caplog.text.count("please report it") == 2  # once a site
        torch.testing.assert_close(net(x), plain(x), rtol=0, atol=0)
        assert caplog.text.count("please report it") == 2


@pytest.mark.usefixtures("small_values_fuse")
def test_pytorchs_own_convolution_is_kept_digit_for_digit() -> None:
    model = nn.Sequential(nn.Conv3d(3, 24, 3), nn.GroupNorm(4, 24), nn.ReLU()).eval()
    plain, x = copy.deepcopy(model), torch.randn(4, 3, 8, 12, 12)
    seen: list[Tensor] = []
    with torch.no_grad():
        (site,) = postlude.optimize(model, x, convolution="pytorch").sites
        assert site.is_fused
        assert "PyTorch's own convolution was asked for" in str(site.outcome)
        plain[0].register_forward_hook(lambda module, given, result: seen.append(result.clone()))
        expected = plain(x)
        torch.testing.assert_close(model(x), expected)
        own = functools.partial(F.conv3d, x, plain[0].weight, plain[0].bias)
        assert torch.equal(own(), seen[0])
    with pytest.raises(postlude.PostludeError, match="convolution='cudnn' is unknown; use 'auto' or 'pytorch'"):
        postlude.optimize(plain, x, convolution="cudnn")


@pytest.mark.parametrize(("batch", "convolution"), [(1, "auto"), (2, "auto"), (1, "pytorch")])
def test_one_small_volume_is_convolved_by_onednn(batch: int, convolution: str) -> None:
    """PyTorch's own loops for it are far slower, so the convolution alone is a chain."""

    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv3d(16, 16, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.conv(x), x], 1)

    model, x = Skip().eval(), torch.randn(batch, 16, 10, 9, 11)
    with torch.no_grad():
        expected, exact = model(x), copy.deepcopy(model).double()(x.double())
        result = postlude.optimize(model, x, convolution=convolution)
        found = model(x)
    is_ours = batch == 1 and convolution == "auto"
    assert [site.is_fused for site in result.sites] == ([True] if is_ours else [])
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("small_values_fuse")
def test_progress_is_told_what_is_done(net: Net) -> None:
    lines: list[str] = []
    with torch.no_grad():
        postlude.optimize(net, torch.randn(LARGE), progress=lines.append)
    assert [line.split(":")[0] for line in lines] == ["checking encoder.0", "checking decoder"]


@pytest.mark.usefixtures("small_values_fuse")
@pytest.mark.parametrize("verify", [True, False])
def test_rest_inductor_says_what_it_did(net: Net, verify: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, inputs, **_: graph.forward)
    plain, x = copy.deepcopy(net), torch.randn(LARGE)
    with torch.no_grad():
        result = postlude.optimize(net, x, rest="inductor", verify=verify)
        assert [site.name for site in result.sites] == ["encoder.0", "decoder"]
        assert all(site.is_fused for site in result.sites)
        assert (result.verdict is not None) == verify
        torch.testing.assert_close(net(x), plain(x))
        small = postlude.optimize(copy.deepcopy(plain), x[:, :, :4, :4, :4].contiguous(), rest="inductor")
        assert not any(site.is_fused for site in small.sites)
        assert all("too small to gain" in str(site.outcome) for site in small.sites)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"precision": "tf32"}, "precision 'tf32' exists only on NVIDIA GPUs"),
        ({"precision": "half"}, "precision 'half' is unknown; use one of auto, fp32, tf32."),
        ({"memory": "thin"}, "memory='thin' is unknown"),
        ({"memory": "lean"}, "memory='lean' is for training on a GPU"),
        ({"rest": "xla"}, "rest='xla' is unknown; use one of auto, eager, inductor."),
    ],
)
def test_bad_requests_get_one_sentence_and_change_nothing(net: Net, arguments: dict[str, str], sentence: str) -> None:
    with pytest.raises(postlude.PostludeError, match=sentence):
        postlude.optimize(net, torch.randn(1, 2, 8, 8, 8), **arguments)  # type: ignore[arg-type]
    assert net._compiled_call_impl is None


@pytest.mark.parametrize("option", ["memory", "rest", "layout", "convolution"])
def test_the_backend_refuses_unknown_options(option: str) -> None:
    with pytest.raises(postlude.PostludeError, match="'leen' is unknown; use"):
        Backend(**{option: "leen"})  # type: ignore[arg-type]


def test_a_model_that_raises_is_left_as_it_was(net: Net) -> None:
    with pytest.raises(RuntimeError):
        postlude.optimize(net, torch.randn(1, 3, 8, 8, 8))
    assert not postlude.is_optimized(net)
    assert net._compiled_call_impl is None


def test_an_already_compiled_model_is_declined(net: Net) -> None:
    net.compile(backend="eager")
    with pytest.raises(postlude.PostludeError, match="already compiled"):
        postlude.optimize(net, torch.randn(1, 2, 8, 8, 8))


@pytest.mark.skipif(not metadata.entry_points(name="postlude", group="torch_dynamo_backends"), reason="not installed")
def test_the_backend_works_by_name_with_no_import(net: Net) -> None:
    compiled = torch.compile(net, backend="postlude")
    x = torch.randn(1, 2, 8, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), net(x))
    with pytest.raises(Exception, match="unknown option colour"):
        torch.compile(copy.deepcopy(net), backend="postlude", options={"colour": 1})(x)


def test_fused_chain_is_a_sequential_with_one_chain() -> None:
    modules = nn.Sequential(nn.Conv3d(3, 6, 3), nn.GroupNorm(2, 6), fused_nn.Mean())
    fused = postlude.nn.FusedChain(*copy.deepcopy(modules))
    assert list(fused.state_dict()) == list(modules.state_dict())
    fused.load_state_dict(random_state(modules, 1))
    modules.load_state_dict(random_state(modules, 1))
    x = torch.randn(2, 3, 6, 7, 8)
    torch.testing.assert_close(fused(x), modules(x), rtol=0, atol=0)
    fused(x).sum().backward()
    assert fused[0].weight.grad is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fused(x).dtype == modules(x).dtype
    assert copy.deepcopy(fused)(x).shape == (2,)
    with pytest.raises(postlude.PostludeError, match=r"not one chain .*upsample_nearest3d"):
        postlude.nn.FusedChain(nn.Conv3d(3, 6, 3), nn.Upsample(scale_factor=2))(x)


def test_functional_runs_a_chain_and_complains_in_a_sentence() -> None:
    from cases import BY_NAME
    from postlude.check import tensors_for

    case = BY_NAME["61 small"]
    tensors = tensors_for(case.chain, case.shape, torch.float32, "cpu", 0, "normal", "contiguous")
    assert postlude.functional.run(case.chain, *tensors).shape == (3, 8, 7, 8, 9)
    with pytest.raises(postlude.PostludeError, match="takes 4 tensors"):
        postlude.functional.run(case.chain, tensors[0])


@pytest.mark.usefixtures("fresh_dynamo")
def test_no_number_of_models_is_too_many() -> None:
    """PyTorch's compiler gives up on a piece of code after eight versions of it."""
    for channels in range(1, 11):
        model = nn.Sequential(nn.Conv2d(channels, 4, 3), nn.GroupNorm(2, 4), nn.ReLU())
        result = postlude.optimize(model, torch.randn(2, channels, 5, 5), verify=False)
        assert len(result.sites) == 1, channels


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_call_of_which_nothing_is_captured_says_so() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU())
    with torch._dynamo.config.patch(disable=True):
        result = postlude.optimize(model, torch.randn(2, 3, 5, 5))
    assert not result.sites
    assert result.failure is not None
    assert "captured none of the model's layers" in result.failure


def _doubled(module: nn.Module, given: object, result: Tensor) -> Tensor:
    return 2 * result


@pytest.mark.parametrize("watched", [True, False])
def test_hooks_that_come_later_fire_and_go_again(watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 2.13, PyTorch looks for hooks only where it is told to. The second run does not look for them."""
    if not watched:
        if torch.__version__ >= "2.14":
            pytest.skip("PyTorch looks for them itself")
        monkeypatch.setattr("postlude.graph.compiled.HookWatch.sees_hooks", lambda _: False)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()).eval()
    twin = copy.deepcopy(model)
    x = torch.randn(2, 2, 6, 6)
    with torch.no_grad():
        assert len(postlude.optimize(model, x).sites) == 1
        before = model(x)
        for place in ("", "0", "1"):
            handles = [one.get_submodule(place).register_forward_hook(_doubled) for one in (model, twin)]
            assert torch.equal(model(x), twin(x) if watched else before), place
            for handle in handles:
                handle.remove()
            assert torch.equal(model(x), before)


def test_hooks_that_change_while_others_stay_are_seen() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()).eval()
    x = torch.randn(2, 2, 6, 6)
    with torch.no_grad():
        postlude.optimize(model, x)
        plain = model(x)
        first, second = (model.register_forward_hook(_doubled) for _ in range(2))
        assert torch.equal(model(x), 4 * plain)
        first.remove()
        assert torch.equal(model(x), 2 * plain)
        second.remove()
        assert torch.equal(model(x), plain)


def test_backward_hooks_that_come_later_fire() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU())
    x = torch.randn(2, 2, 6, 6, requires_grad=True)
    postlude.optimize(model, x)
    model(x)
    seen: list[Tensor] = []
    model[0].register_full_backward_hook(lambda module, given, result: seen.append(result[0]))
    model(x).sum().backward()
    assert len(seen) == 1


def test_hooks_of_all_modules_see_the_models_own_modules() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()).eval()
    x = torch.randn(2, 2, 6, 6)
    seen: list[str] = []
    postlude.optimize(model, x)
    handle = register_module_forward_hook(lambda module, given, result: seen.append(type(module).__name__))
    try:
        model(x)
        with pytest.raises(postlude.PostludeError, match="a global module hook is registered"):
            postlude.optimize(copy.deepcopy(model), x)
    finally:
        handle.remove()
    assert seen == ["Conv2d", "GroupNorm", "ReLU", "Sequential"]


@pytest.mark.usefixtures("small_values_fuse")
def test_an_optimized_model_is_the_plain_one_for_other_tools(net: Net) -> None:
    x = torch.randn(LARGE)
    with warnings.catch_warnings(), torch.no_grad():
        assert any(site.is_fused for site in postlude.optimize(net, x, verify=False).sites)
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        traced = torch.jit.trace(net, x, check_trace=False)
        exported = torch.export.export(net, (x,))
        symbolic = torch.fx.symbolic_trace(net)
        inside = torch.fx.symbolic_trace(nn.Sequential(net))
        graphs: list[torch.fx.GraphModule] = []
        torch.compile(net, backend=lambda graph, _: (graphs.append(graph), graph.forward)[1])(x)
        for found in (traced(x), exported.module()(x), symbolic(x), inside(x)):
            torch.testing.assert_close(found, net(x))
    assert "aten::group_norm" in str(traced.inlined_graph)
    for graph in (exported.graph_module, symbolic, inside, *graphs):
        assert not any("postlude" in str(node.target) for node in graph.graph.nodes)


def test_a_model_that_nobody_needs_is_freed() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()).eval()
    postlude.optimize(model, torch.randn(2, 2, 6, 6), verify=False)
    assert postlude.is_optimized(model)
    gone = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert gone() is None


def test_how_a_site_runs_is_readable() -> None:
    """The README prints outcomes as they are."""
    model = nn.Sequential(nn.ConvTranspose2d(16, 16, 3, stride=2), nn.ReLU(), nn.InstanceNorm2d(16)).eval()
    with torch.no_grad():
        (site,) = postlude.optimize(model, torch.randn(4, 16, 32, 32), verify=False).sites
    assert isinstance(site.outcome, Plan)
    assert str(site.outcome).startswith("pass 1: conv_transpose2d")
    assert "Chain(" not in str(site.outcome)


@pytest.mark.parametrize(("wider", "outcome"), [(None, "right"), (1.0, "wrong")])
def test_a_model_in_float64_is_right(wider: float | None, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own instance_norm is the less exact one there; by its error in float32 ours would be wrong."""
    if wider is not None:
        monkeypatch.setattr("postlude.check.compare.NOTHING_WIDER", wider)
    model = nn.Sequential(nn.Conv3d(4, 16, 3, padding=1), nn.InstanceNorm3d(16), nn.LeakyReLU()).double().eval()
    with torch.no_grad():
        result = postlude.optimize(model, torch.randn(2, 4, 24, 24, 24, dtype=torch.float64))
    assert result.verdict is not None
    assert result.verdict.outcome == outcome

"""After a graph break PyTorch's compiler meets frames one by one, and skips those of torch.nn."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import postlude
from postlude.graph.compiled import has_frame

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
SHAPE = (2, 4, 6, 6)


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of this process alone, without threads or sockets."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Breaking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
        return x


class Block(nn.Module):
    """A class whose frame PyTorch's compiler does not skip."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())


def children_in_a_list() -> nn.Module:
    class Picking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([chain(), chain()])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    return nn.Sequential(Picking())


MODELS = {
    "ddp": (lambda: DistributedDataParallel(chain()), ["module.0"]),
    "ddp of a container of containers": (
        lambda: DistributedDataParallel(nn.Sequential(chain(), chain())),
        ["module.0.0", "module.1.0"],
    ),
    "ddp of another class": (lambda: DistributedDataParallel(Block(chain())), ["module.body.0"]),
    "data parallel": (lambda: nn.DataParallel(chain()), ["module.0"]),
    "containers": (lambda: nn.Sequential(chain(), nn.Sequential(chain())), ["0.0", "1.0.0"]),
    "a list's children": (children_in_a_list, ["0.layers.0.0", "0.layers.1.0"]),
    "a break": (lambda: nn.Sequential(Breaking(), chain(), Block(chain())), ["1.0", "2.body.0"]),
    "breaks further in": (
        lambda: Block(nn.Sequential(chain(), Block(nn.Sequential(Breaking(), chain())))),
        ["body.0.0", "body.1.body.1.0"],
    ),
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("kind", MODELS)
def test_chains_in_modules_of_pytorchs_own_are_found_by_their_names(kind: str) -> None:
    make, names = MODELS[kind]
    model, x = make().eval(), torch.randn(SHAPE)
    with torch.no_grad():
        expected = model(x)
        result = postlude.optimize(model, x)
        assert [site.name for site in result.sites] == names
        assert result.failure is None
        torch.testing.assert_close(model(x), expected)


@pytest.mark.usefixtures("one_process")
def test_without_frames_of_their_own_nothing_is_found_and_the_result_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: PyTorch's compiler meets the frames of torch.nn."""
    monkeypatch.setattr("postlude.pipeline.give_frames", lambda _: None)
    result = postlude.optimize(DistributedDataParallel(chain()).eval(), torch.randn(SHAPE))
    assert result.sites == ()
    assert "captured none of the model's layers" in (result.failure or "")


def test_a_graph_between_the_layers_does_not_count_as_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    monkeypatch.setattr("postlude.pipeline.give_frames", lambda _: None)
    result = postlude.optimize(nn.Sequential(Breaking(), Scaling(), chain()).eval(), torch.randn(SHAPE))
    assert result.backend.captured
    assert "captured none of the model's layers" in (result.failure or "")


def test_without_the_models_names_blocks_have_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: names as PyTorch's compiler reaches the modules."""
    monkeypatch.setattr("postlude.graph.backend.name_from", lambda *_: None)
    model = nn.Sequential(Breaking(), chain(), chain()).eval()
    assert [site.name for site in postlude.optimize(model, torch.randn(SHAPE)).sites] == ["0"]


def test_gradients_after_a_break_are_the_plain_models() -> None:
    plain, x = nn.Sequential(Breaking(), chain()), torch.randn(SHAPE)
    model = copy.deepcopy(plain)
    assert len(postlude.optimize(model, x).sites) == 1
    for one in (plain, model):
        one(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_frames_go_with_undo_and_copies_have_none() -> None:
    model, x = nn.Sequential(Breaking(), nn.Sequential(chain(), nn.Flatten())), torch.randn(SHAPE)
    result = postlude.optimize(model, x)
    assert [has_frame(one) for one in (model, model[1], model[1][0], model[1][0][0])] == [False, True, True, False]
    assert not any(has_frame(one) for one in copy.deepcopy(model).modules())
    inner = postlude.optimize(model[1], x)
    assert len(inner.sites) == 1
    result.undo()
    assert postlude.is_optimized(model[1])
    inner.undo()
    assert all(one._compiled_call_impl is None for one in model.modules())
    with pytest.raises(RuntimeError):
        postlude.optimize(model, torch.randn(2, 3, 6, 6))
    assert all(one._compiled_call_impl is None for one in model.modules())


class Heads(nn.Module):
    """One of two heads is used, after a break."""

    def __init__(self) -> None:
        super().__init__()
        self.breaking, self.heads = Breaking(), nn.ModuleList([chain(), nn.Conv2d(4, 4, 1)])

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[0](self.breaking(x))


@pytest.mark.parametrize(
    "make", [lambda: nn.Sequential(chain(), nn.Sequential(chain())), Heads], ids=["whole", "heads"]
)
def test_a_model_that_misses_no_layer_has_no_frames(make: Callable[[], nn.Module]) -> None:
    """Each frame costs the host microseconds in every call."""
    model = make()
    assert postlude.optimize(model, torch.randn(SHAPE)).sites
    assert not any(has_frame(one) for one in model.modules())


def test_what_data_parallel_would_copy_has_no_frame() -> None:
    """A replica with the original's frame would run the original."""
    model = nn.Sequential(Breaking(), chain(), nn.DataParallel(nn.Sequential(chain())))
    postlude.optimize(model, torch.randn(SHAPE))
    assert has_frame(model[1])
    assert not any(has_frame(one) for one in model[2].modules())


def doubled(module: nn.Module, given: object, result: Tensor) -> Tensor:
    return 2 * result


@pytest.mark.parametrize("has_own", [True, False])
@pytest.mark.parametrize("wrap", [nn.Sequential, lambda *layers: nn.Sequential(Block(nn.Sequential(*layers)))])
def test_hooks_that_come_after_a_break_fire(
    wrap: Callable[..., nn.Module], has_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant: one backend, and so one graph of each frame, with and without hooks."""
    if not has_own:
        if torch.__version__ >= "2.14":
            pytest.skip("PyTorch looks for hooks itself")
        monkeypatch.setattr("postlude.graph.compiled._apart", lambda backend: backend)
    model, x = wrap(Breaking(), Block(chain())).eval(), torch.randn(SHAPE)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        postlude.optimize(model, x)
        for one in (model, twin):
            next(part for part in one.modules() if isinstance(part, nn.GroupNorm)).register_forward_hook(doubled)
        assert torch.allclose(model(x), twin(x), atol=1e-5) == has_own

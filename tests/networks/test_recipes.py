"""The recipes for frameworks, as docs/recipes.md has them, with the real packages on small volumes."""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import postlude
from networks.standins import stand_ins
from networks.zoo import NETWORKS
from postlude.graph.backend import Backend
from postlude.plan import cpu

pytestmark = [
    pytest.mark.networks,
    pytest.mark.usefixtures("fresh_dynamo", "plans_of_any_size"),
    pytest.mark.filterwarnings("ignore"),  # what the packages say of each other
]
PAGE = Path(__file__).parents[2] / "docs/recipes.md"
TRAINER = "nnunetv2.training.nnUNetTrainer.nnUNetTrainer"


@pytest.fixture
def plans_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SMALLEST_STORED", "SMALLEST_REDUCED"):
        monkeypatch.setattr(cpu, name, 0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Backend]:
    """The backend of each graph."""
    found: list[Backend] = []
    plain = Backend.__call__

    def call(self: Backend, *args: Any) -> Callable[..., Any]:
        found.append(self)
        return plain(self, *args)

    monkeypatch.setattr(Backend, "__call__", call)
    return found


def run_recipe(package: str, **given: Any) -> dict[str, Any]:
    """The block that imports `package`, with these names."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = [code for code in blocks if re.search(rf"^(?:from|import) {re.escape(package)}\b", code, re.MULTILINE)]
    exec(code, given)
    return given


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        if os.environ.get("POSTLUDE_NETWORKS") == "required":
            pytest.fail(f"{package} is not installed: `make install` installs it")
        pytest.skip(f"{package} is not installed")


def network() -> nn.Module:
    layers = (nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4, affine=True), nn.LeakyReLU(), nn.Conv3d(4, 2, 1))
    return nn.Sequential(*layers)


def assert_close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    assert list(one.state_dict()) == list(other.state_dict())
    for a, b in zip(one.state_dict().values(), other.state_dict().values()):
        assert_close(a, b)


def sites_of(made: list[Backend]) -> list[int]:
    assert [backend.failure for backend in made] == [None] * len(made)
    return [len(captured.sites) for backend in made for captured in backend.captured]


def stepped(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> nn.Module:
    """A plain copy after a step of SGD for each batch."""
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        optimizer.step()
    return plain


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(2, 1, 8, 8, 8) + 0.3, torch.randn(2, 2, 8, 8, 8)) for _ in range(3)]


def test_monai_trains(made: list[Backend]) -> None:
    """With MetaTensors, whose metadata differ from batch to batch: one graph serves all of them."""
    needs("monai")
    needs("ignite")
    with stand_ins():
        from monai.data import DataLoader, MetaTensor

        model, data = network(), batches()
        expected = stepped(model, data)
        pairs = [pair for x, y in data for pair in zip(x, y)]
        items = [{"image": MetaTensor(x, meta={"n": n}), "label": MetaTensor(y)} for n, (x, y) in enumerate(pairs)]
        loader = DataLoader(items, batch_size=2, num_workers=0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        names = {"device": "cpu", "loader": loader, "network": model, "optimizer": optimizer, "loss": nn.MSELoss()}
        ran = run_recipe("monai", **names)
    assert isinstance(ran["trainer"].state.output[0]["pred"], MetaTensor)
    assert sites_of(made) == [1]
    assert_same_weights(model, expected)


def lightning_module(logs: bool = False) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            loss = nn.functional.mse_loss(self.network(batch[0]), batch[1])
            if logs:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    return Module()


def test_lightning_trains(made: list[Backend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("lightning")
    monkeypatch.chdir(tmp_path)
    module, data = lightning_module(), batches()
    expected = stepped(module.network, data)
    loader = torch.utils.data.DataLoader(data, batch_size=None)  # type: ignore[arg-type]
    ran = run_recipe("lightning", module=module, loader=loader)
    assert 1 in sites_of(made)
    assert_same_weights(module.network, expected)
    ran["trainer"].save_checkpoint("kept.ckpt")
    kept = torch.load("kept.ckpt", weights_only=False)["state_dict"]
    assert list(kept) == list(module.state_dict())


def test_lightning_trains_a_module_that_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its network, optimized in place: Dynamo cannot capture `self.log`."""
    needs("lightning")
    monkeypatch.chdir(tmp_path)
    import lightning

    module, data = lightning_module(logs=True), batches()
    keys, expected = list(module.state_dict()), stepped(module.network, data)
    result = postlude.optimize(module.network, data[0][0])
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=1, **quiet)  # type: ignore[arg-type]
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    assert result.failure is None
    assert_same_weights(module.network, expected)
    assert list(module.state_dict()) == keys


def test_a_vae_decodes(made: list[Backend]) -> None:
    needs("diffusers")
    settings = {"block_out_channels": (8,), "layers_per_block": 1, "norm_num_groups": 4}
    with stand_ins(), torch.no_grad():
        latents = torch.randn(1, 4, 8, 8)
        vae = run_recipe("diffusers", config=settings, latents=latents)["vae"].eval()
        del vae.__dict__["decode"]
        compiled = run_recipe("diffusers", config=settings, latents=latents)["vae"].eval()
        compiled.load_state_dict(vae.state_dict())
        assert_close(compiled.decode(latents).sample, vae.decode(latents).sample)
    assert max(sites_of(made)) > 5


def test_ddp_trains(made: list[Backend], tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model, data = network(), batches()
        expected = stepped(model, data)
        wrapped = run_recipe("torch.nn.parallel", model=model)["model"]
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
        for x, y in data:
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapped(x), y).backward()
            optimizer.step()
    finally:
        dist.destroy_process_group()
    assert sites_of(made) == [1]
    assert_same_weights(model, expected)


class _Trainer:
    """What nnU-Net's trainer does with its network."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def initialize(self) -> None:
        self.network = torch.compile(self.network)  # type: ignore[assignment]


@pytest.fixture
def nnunet(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Trainer]]:
    """The trainer of the recipe, on that trainer."""
    module = types.ModuleType(TRAINER)
    module.nnUNetTrainer = _Trainer  # type: ignore[attr-defined]
    for parent in ("nnunetv2", "nnunetv2.training", "nnunetv2.training.nnUNetTrainer"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    monkeypatch.setitem(sys.modules, TRAINER, module)
    yield run_recipe("nnunetv2")["nnUNetTrainerPostlude"]
    torch.compiler.set_default_backend(None)


def mirrored(model: nn.Module, x: Tensor) -> Tensor:
    """As nnU-Net's predictor adds up: in place on the network's result."""
    prediction: Tensor = model(x)
    prediction += model(x.flip(2)).flip(2)
    prediction /= 2
    return prediction


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.stack([result.square().mean() for result in model(x)]).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.skipif(not hasattr(torch.compiler, "set_default_backend"), reason="needs torch 2.13")
def test_nnunet_trains_validates_and_swaps_folds(nnunet: type[_Trainer], made: list[Backend]) -> None:
    needs("dynamic_network_architectures")
    recipe = NETWORKS["nnU-Net"]
    model, other, x = recipe.build(), recipe.build(), recipe.inputs()
    folds, plain = [copy.deepcopy(m.state_dict()) for m in (model, other)], copy.deepcopy(model)
    trainer = nnunet(model)
    trainer.initialize()
    assert type(trainer).__name__ == "nnUNetTrainer"
    for _ in range(2):  # epochs: training with deep supervision, validation without
        for one in (model, plain):
            one.decoder.deep_supervision = True
        for ours, theirs in zip(gradients(trainer.network.train(), x), gradients(plain.train(), x), strict=True):
            assert_close(ours, theirs)
        for one in (model, plain):
            one.decoder.deep_supervision = False
            one.eval()
        found = []
        with torch.inference_mode():
            for weights in folds:
                trainer.network._orig_mod.load_state_dict(weights)  # type: ignore[union-attr,operator]
                plain.load_state_dict(weights)
                found.append(mirrored(trainer.network, x))
                assert_close(found[-1], mirrored(plain, x))
        assert not torch.allclose(*found)
    assert list(model.state_dict()) == list(folds[0])
    assert min(sites_of(made)) > 3
    assert len(made) <= 3  # a second epoch finds the graphs of the first

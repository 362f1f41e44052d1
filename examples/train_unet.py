"""Trains a tiny 3-D U-Net twice, plain and optimized, on synthetic volumes, and draws both loss curves.

python examples/train_unet.py                      60 steps on the CPU, about a minute
python examples/train_unet.py --device cuda --steps 300 --size 64

Both runs start from the same weights and see the same volumes: the curves must lie on one another within rounding.
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import postlude


def block(channels_in: int, channels_out: int) -> nn.Sequential:
    """Convolution → ReLU → GroupNorm, the chain that Postlude fuses."""
    conv = nn.Conv3d(channels_in, channels_out, 3, padding=1)
    return nn.Sequential(conv, nn.ReLU(), nn.GroupNorm(4, channels_out))


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = block(1, width), block(width, 2 * width)
        self.bottom = block(2 * width, 4 * width)
        self.up2, self.up1 = block(6 * width, 2 * width), block(3 * width, width)
        self.head = nn.Conv3d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool3d(first, 2))
        bottom = self.bottom(F.max_pool3d(second, 2))
        x = self.up2(torch.cat([F.interpolate(bottom, scale_factor=2.0), second], 1))
        x = self.up1(torch.cat([F.interpolate(x, scale_factor=2.0), first], 1))
        head: Tensor = self.head(x)
        return head


def volumes(step: int, batch: int, size: int, device: str) -> tuple[Tensor, Tensor]:
    """Noisy balls and where they are."""
    generator = torch.Generator().manual_seed(step)
    grid = torch.stack(torch.meshgrid(*[torch.linspace(-1, 1, size)] * 3, indexing="ij"))
    centre = torch.rand(batch, 3, 1, 1, 1, generator=generator) - 0.5
    radius = 0.25 + 0.3 * torch.rand(batch, 1, 1, 1, generator=generator)
    inside = ((grid - centre).square().sum(1).sqrt() < radius).float()[:, None]
    noisy = inside + 0.7 * torch.randn(inside.shape, generator=generator)
    return noisy.to(device), inside.to(device)


@dataclass
class Run:
    name: str
    model: nn.Module
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0


def train(run: Run, steps: int, batch: int, size: int, device: str) -> None:
    optimizer = torch.optim.Adam(run.model.parameters(), 1e-2)
    start = time.perf_counter()
    for step in range(steps):
        x, truth = volumes(step, batch, size, device)
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(run.model(x), truth)
        loss.backward()
        optimizer.step()
        run.losses.append(loss.item())
        if step % 20 == 0 or step == steps - 1:
            print(f"{run.name:9} step {step:4}  loss {run.losses[-1]:.5f}", flush=True)
    run.seconds = time.perf_counter() - start


def draw(runs: list[Run], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, below) = plt.subplots(2, 1, sharex=True, figsize=(7, 5), height_ratios=(3, 1))
    for run, style in zip(runs, ({"lw": 4, "alpha": 0.35}, {"lw": 1.2})):
        top.plot(run.losses, label=f"{run.name}: {run.seconds:.1f} s", **style)
    top.set_ylabel("loss")
    top.set_title("A 3-D U-Net of conv → ReLU → GroupNorm blocks, trained twice")
    top.legend(frameon=False)
    below.semilogy([max(abs(a - b), 1e-9) for a, b in zip(runs[0].losses, runs[1].losses)], lw=1, color="black")
    below.set_ylabel("|difference|")
    below.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"drawn: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--size", type=int, default=24, help="of a volume, a multiple of 4")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--plot", type=Path, default=Path("unet.png"))
    options = parser.parse_args()
    if options.size % 4:
        parser.error(f"--size must be a multiple of 4, not {options.size}")
    torch.manual_seed(0)
    plain = UNet().to(options.device)
    fused = copy.deepcopy(plain)
    x, _ = volumes(0, options.batch, options.size, options.device)
    result = postlude.optimize(fused, x)
    for site in result.sites:
        print(f"{site.name}: {site.chain}: {'fused' if site.is_fused else site.outcome}")
    runs = [Run("plain", plain), Run("optimized", fused)]
    for run in runs:
        train(run, options.steps, options.batch, options.size, options.device)
    worst = max(abs(a - b) for a, b in zip(runs[0].losses, runs[1].losses))
    print(f"largest difference between the curves: {worst:.1e}")
    draw(runs, options.plot)


if __name__ == "__main__":
    main()

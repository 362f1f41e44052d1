"""Small models, each with one thing that a capture can get wrong, and the chains that must come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def _conv(cin: int = 4, cout: int = 4, **options: object) -> nn.Conv3d:
    return nn.Conv3d(cin, cout, 3, padding=1, **options)  # type: ignore[arg-type]


class Written(nn.Module):
    """A model given by a function of itself and x, with a convolution, a norm and some spares."""

    def __init__(self, body: Callable[[Written, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.other = _conv(), _conv()
        self.norm, self.norm2 = nn.GroupNorm(2, 4), nn.InstanceNorm3d(4, affine=True)
        self.relu, self.relu_ = nn.ReLU(), nn.ReLU(inplace=True)
        self.drop, self.bn = nn.Dropout3d(0.5), nn.BatchNorm3d(4)
        self.vector = nn.Parameter(torch.randn(4, 1, 1, 1))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


class Doubling(torch.autograd.Function):
    """Backward is wrong on purpose: a capture that looks through it is found out."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 7


def _statement(m: Written, x: Tensor) -> Tensor:
    h = m.conv(x)
    h.relu_()
    return m.norm(h)


def _copy_written_to(m: Written, x: Tensor) -> Tensor:
    h = m.conv(x)
    doubled = h.clone()
    doubled.mul_(2.0)
    return m.norm(h) + doubled


def _view_then_write(m: Written, x: Tensor) -> Tensor:
    h = m.conv(x)
    h[:, :2].relu_()
    return m.norm(h)


def _own_statistics(m: Written, x: Tensor) -> Tensor:
    mean: Tensor = m.bn.running_mean  # type: ignore[assignment]
    return m.bn(m.conv(x) - mean.view(-1, 1, 1, 1))  # type: ignore[no-any-return]


def _plus_equals(m: Written, x: Tensor) -> Tensor:
    h = m.norm(m.conv(x))
    h += x
    return m.relu(h)


def _operand_changed_later(m: Written, x: Tensor) -> Tensor:
    vector = m.vector.detach().clone()
    alias = vector.view(-1)
    h = m.conv(x) + vector
    alias.mul_(3.0)  # a chain that reached past this would read the new values
    return m.norm(h)


def _autocast_inside(m: Written, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return m.norm(m.relu(m.conv(x)))


def _autocast_amax(m: Written, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return torch.amax(m.conv(x), 1)


def _autocast_ends_mid_chain(m: Written, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        h = m.conv(x)
    return m.norm(m.relu(h.float()))


def _no_grad_mid_chain(m: Written, x: Tensor) -> Tensor:
    h = m.conv(x)
    with torch.no_grad():
        scale = m.relu(h).mean()
    return m.norm(m.relu(h)) * scale


def _graph_break(m: Written, x: Tensor) -> Tensor:
    h = m.norm(m.conv(x))
    torch._dynamo.graph_break()
    return m.norm2(m.other(h))


@dataclass(frozen=True)
class Capture:
    name: str
    body: Callable[[Written, Tensor], Tensor]
    chains: tuple[str, ...]


C, G = "conv3d(4→4, k3, p1)", "group_norm(2)"
N = "batch_norm(batch)"
B, L = f"{C} → {N}", f"{C} → layer_norm over the last axis"
CAPTURES = [
    Capture("modules", lambda m, x: m.norm(m.relu(m.conv(x))), (f"{C} → relu → {G}",)),
    Capture("functional", lambda m, x: F.group_norm(F.relu(m.conv(x)), 2), (f"{C} → relu → {G}",)),
    Capture("clamp", lambda m, x: m.norm(m.conv(x).clamp(min=0)), (f"{C} → clamp_min(0) → {G}",)),
    Capture("clamp_min", lambda m, x: m.norm(torch.clamp_min(m.conv(x), 0.25)), (f"{C} → clamp_min(0.25) → {G}",)),
    Capture("in-place module", lambda m, x: m.norm(m.relu_(m.conv(x))), (f"{C} → relu → {G}",)),
    Capture("in-place statement", _statement, (f"{C} → relu → {G}",)),
    Capture(
        "shared activation",
        lambda m, x: m.norm2(m.relu_(m.other(m.norm(m.relu_(m.conv(x)))))),
        (f"{C} → relu → {G}", f"{C} → relu → instance_norm"),
    ),
    Capture(
        "norm first",
        lambda m, x: F.leaky_relu(m.norm2(m.conv(x)), 0.2),
        (f"{C} → instance_norm → leaky_relu(0.2)",),
    ),
    Capture("plus equals", _plus_equals, (f"{C} → {G} → add(tensor) → relu",)),
    Capture("number first", lambda m, x: 2.0 * (1.0 + m.norm(m.conv(x))), (f"{C} → {G} → add(1) → mul(2)",)),
    Capture("vector first", lambda m, x: m.norm(m.vector * m.conv(x)), (f"{C} → mul(per channel) → {G}",)),
    Capture(
        "mean",
        lambda m, x: m.norm(m.conv(x)).mean(dim=[1, 2, 3, 4]),
        (f"{C} → {G} → mean over all but batch",),
    ),
    Capture("negative axes", lambda m, x: m.conv(x).sum((-1, -2, -3)), (f"{C} → sum over space",)),
    Capture("values of max", lambda m, x: torch.max(m.norm(m.conv(x)), dim=1)[0], (f"{C} → {G} → max over channels",)),
    Capture("indices of min", lambda m, x: (p := m.norm(m.conv(x)).min(1)).values * p.indices, (f"{C} → {G}",)),
    Capture(
        "logsumexp and more",
        lambda m, x: m.norm(m.conv(x)).logsumexp(1, keepdim=True).relu() + x,
        (f"{C} → {G} → logsumexp over channels → relu",),
    ),
    Capture("amax in autocast", _autocast_amax, ("conv3d(4→4, k3, p1, bfloat16) → amax over channels",)),
    Capture(
        "value used twice",
        lambda m, x: m.norm((h := m.conv(x)) + F.silu(h)),
        (f"{C} → silu → add(value 0, value 1) → {G}",),
    ),
    Capture(
        "used outside", lambda m, x: m.norm((h := m.conv(x)).relu()) + h.amax(), (f"relu → {G} → add(one number)",)
    ),
    Capture(
        "copy",
        lambda m, x: m.norm((h := m.conv(x)) * h.clone().detach()),
        (f"{C} → detach → mul(value 0, value 1) → {G}",),
    ),
    Capture("copy written to", _copy_written_to, (f"{G} → add(tensor)",)),
    Capture("copy handed out", lambda m, x: (m.norm(h := m.conv(x)), h.clone())[0], (f"{C} → {G}",)),
    Capture("inactive dropout", lambda m, x: m.norm(F.dropout3d(m.conv(x), 0.0)), (f"{C} → {G}",)),
    Capture("active dropout", lambda m, x: m.norm(m.drop(m.conv(x))), (G,)),
    Capture("view then write", _view_then_write, (G,)),
    Capture("operand changed later", _operand_changed_later, (f"{C} → add(per channel)", G)),
    Capture("batch norm between", lambda m, x: m.norm(m.bn(m.conv(x))), (f"{B} → {G}",)),
    Capture(
        "one batch norm three times",
        lambda m, x: m.bn(F.relu(m.bn(m.other(m.bn(m.conv(x)))))),
        (B, f"{B} → relu", N),
    ),
    Capture(
        "one batch norm on both branches",
        lambda m, x: m.bn(m.conv(x)).relu() + m.bn(m.other(x)),
        (f"{B} → relu", f"{B} → add(tensor)"),
    ),
    Capture(
        "running statistics read meanwhile",
        lambda m, x: F.relu(m.bn(m.conv(x)) * m.bn.running_mean.mean()),
        (B,),
    ),
    Capture("running statistics as an operand", _own_statistics, (f"{C} → sub(per channel)", N)),
    Capture("layer norm", lambda m, x: F.gelu(F.layer_norm(m.conv(x), x.shape[4:])) * 2, (f"{L} → gelu → mul(2)",)),
    Capture(
        "detach mid-chain",
        lambda m, x: m.norm(m.conv(x).detach() + m.other(x)),
        (f"{C} → detach → add(tensor) → {G}",),
    ),
    Capture("autocast inside", _autocast_inside, (f"conv3d(4→4, k3, p1, bfloat16) → relu → {G}",)),
    Capture("autocast ends mid-chain", _autocast_ends_mid_chain, (f"relu → {G}",)),
    Capture("no_grad mid-chain", _no_grad_mid_chain, (f"relu → {G} → mul(one number)",)),
    Capture("graph break", _graph_break, (f"{C} → {G}", f"{C} → instance_norm")),
    Capture(
        "checkpoint",
        lambda m, x: m.norm(m.relu(m.other(checkpoint(lambda y: m.conv(y).relu(), x, use_reentrant=False)))),
        (f"{C} → relu → {G}",),
    ),
    Capture("autograd.Function", lambda m, x: m.norm(Doubling.apply(m.conv(x))), (G,)),
]

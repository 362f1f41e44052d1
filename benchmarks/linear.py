"""Times linear layers and what follows them in strict fp32 on a GPU: eager, torch.compile and ours, at KernelBench's
shapes, with errors against float64 for a sample of rows.

    python benchmarks/linear.py                      every shape, by the plan
    python benchmarks/linear.py --ways               also other tiles, and other ways to multiply
    python benchmarks/linear.py --only 8192 --train  forward and backward, of the shapes with that number in their name
    python benchmarks/linear.py --json out.json

Times are medians of Triton's do_bench, in milliseconds. An error is relative to the largest magnitude of the truth; the
worst and the root mean square are over all features of 64 rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from cases import Builder, conv
from postlude import hardware, reference
from postlude.chain import Chain, linear
from postlude.plan import Plan, lower, problem_of
from postlude.plan.linear import LinearGemm
from postlude.run.execute import prepare

ROWS = 64  # whose truth is computed
# Rows, input features, output features.
SHAPES = {
    "1024×8192→8192": (1024, 8192, 8192),
    "16384×4096→4096": (16384, 4096, 4096),
    "32768×1024→4096": (32768, 1024, 4096),
    "128×32768→32768": (128, 32768, 32768),
    "128×16384→16384": (128, 16384, 16384),
}
# Rows, features and depth of a tile, stages, warps; whether the GEMM splits the weight itself.
WAYS = [
    *((rows, features, depth, stages, warps, False) for rows, features, depth, stages, warps in (
        (128, 128, 64, 3, 8), (128, 128, 64, 2, 8), (128, 128, 32, 4, 8), (128, 64, 64, 3, 4), (64, 128, 64, 3, 4),
        (64, 256, 64, 2, 8), (256, 64, 64, 2, 8),
    )),
    *((rows, features, depth, stages, warps, True) for rows, features, depth, stages, warps in (
        (128, 128, 64, 3, 8), (128, 128, 64, 2, 8), (128, 128, 32, 4, 8), (128, 64, 64, 3, 4), (128, 64, 64, 2, 4),
        (128, 64, 32, 2, 4), (128, 64, 32, 3, 4), (128, 128, 32, 3, 8), (128, 64, 128, 2, 4), (64, 64, 64, 2, 4),
    )),
]  # fmt: skip


def chains(inner: int, outer: int) -> dict[str, Chain]:
    """A linear layer with each kind of what follows it."""

    def layer() -> Builder:
        return Builder(0, conv(0, (inner, outer)))

    return {
        "pointwise": layer().op("sub", 0.1).op("mul", 1.5).op("relu").chain(),
        "group_norm": layer().op("silu").op("add", "channel").norm(64).chain(),
        "batch_norm": layer().op("mul", "channel").batch_norm().chain(),
        "softmax": layer().op("gelu", approximate="none").softmax().chain(),
        "sum": layer().op("sigmoid").reduce("sum", "sample", True).chain(),
    }


def tensors_of(chain: Chain, rows: int) -> list[Tensor]:
    """Tensors like KernelBench's: rows in [0, 1), parameters as PyTorch initializes them, vectors from N(0, 1)."""
    layer = chain.convolution
    torch.manual_seed(0)
    bound = layer.in_channels**-0.5
    shapes = {"input": (rows, layer.in_channels), "weight": (layer.out_channels, layer.in_channels)}
    found = []
    for role in chain.roles:
        shape = shapes.get(role, (layer.out_channels,))
        if role == "input":
            made = torch.rand(shape, device="cuda")
        elif role in ("weight", "bias"):
            made = (2 * torch.rand(shape, device="cuda") - 1) * bound
        else:
            made = torch.randn(shape, device="cuda").abs() if role == "running" else torch.randn(shape, device="cuda")
        found.append(made)
    return found


def milliseconds(run: Callable[[], Any]) -> float:
    run()
    torch.cuda.synchronize()
    found = triton.testing.do_bench(run, warmup=50, rep=300, return_mode="median")
    assert isinstance(found, float)
    return found


def errors(chain: Chain, tensors: Sequence[Tensor], result: Tensor) -> tuple[float, float]:
    """Worst and root mean square; a batch_norm needs all rows, of which the first features are enough."""
    if any(role == "running" for role in chain.roles):
        few = 64
        layer = dataclasses.replace(chain.convolution, out_channels=few)
        given = [t if role == "input" else t[:few] for t, role in zip(tensors, chain.roles)]
        truth = reference.evaluate(dataclasses.replace(chain, producer=layer), given, dtype=torch.float64)
        found = result[:, :few]
    else:
        places = torch.linspace(0, len(result) - 1, ROWS, device="cuda").long()
        given = [t[places] if role in ("input", "full") else t for t, role in zip(tensors, chain.roles)]
        truth, found = reference.evaluate(chain, given, dtype=torch.float64), result[places]
    off = (found.double() - truth).abs() / truth.abs().max()
    return float(off.max()), float(off.square().mean().sqrt())


def planned(chain: Chain, tensors: Sequence[Tensor], train: bool = False) -> Plan:
    problem = dataclasses.replace(problem_of(tensors), needs_grad=train)
    plan = lower(chain, problem, hardware.machine_for("cuda"))
    if not isinstance(plan, Plan):
        raise SystemExit(f"{chain}: {plan}")
    return plan


def other_ways(plan: Plan, rows: int) -> Iterator[tuple[str, Plan]]:
    """The plan with other tiles that fit the card."""
    own, most = plan.own, hardware.machine_for("cuda").card.shared_bytes
    if not isinstance(own, LinearGemm):
        return
    for height, features, depth, stages, warps, cuts in WAYS:
        way = LinearGemm(own.arithmetic, height, features, depth, stages, warps, cuts)
        if way.shared_bytes <= most and height <= max(64, rows):
            name = f"{'cut' if cuts else 'packed'} {height}×{features}×{depth}, {stages} stages, {warps} warps"
            yield name, dataclasses.replace(plan, own=way)


@triton.jit
def tf32x3_kernel(p_x, p_w, p_y, rows, outer, inner, tile: tl.constexpr, depth: tl.constexpr):
    """The simplest way: three products in TF32, the compiler's own. Beside ours, to compare."""
    tiles = tl.cdiv(rows, tile)
    o_m = tl.program_id(0) % tiles * tile + tl.arange(0, tile)
    o_n = tl.program_id(0) // tiles * tile + tl.arange(0, tile)
    acc = tl.zeros([tile, tile], tl.float32)
    for k in range(0, inner, depth):
        o_k = k + tl.arange(0, depth)
        b_x = tl.load(p_x + o_m[:, None] * inner + o_k[None, :])
        b_w = tl.load(p_w + o_n[None, :].to(tl.int64) * inner + o_k[:, None])
        acc += tl.dot(b_x, b_w, input_precision="tf32x3")
    tl.store(p_y + o_m[:, None] * outer + o_n[None, :], acc)


def tf32x3(x: Tensor, weight: Tensor) -> Tensor:
    (rows, inner), outer = x.shape, weight.shape[0]
    result = torch.empty((rows, outer), device="cuda")
    grid = (triton.cdiv(rows, 128) * triton.cdiv(outer, 128),)
    tf32x3_kernel[grid](x, weight, result, rows, outer, inner, 128, 32, num_warps=8, num_stages=3)
    return result


def measure(shape: str, name: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    rows, inner, outer = SHAPES[shape]
    chain = chains(inner, outer)[name]
    tensors = tensors_of(chain, rows)

    def row(way: str, run: Callable[[Sequence[Tensor]], Tensor]) -> dict[str, Any]:
        given = [tensor.clone() if slot in chain.moved else tensor for slot, tensor in enumerate(tensors)]
        try:
            with torch.no_grad():
                worst, rms = errors(chain, given, run(given))
                ms = milliseconds(lambda: run(given))
        except Exception as error:  # a tile may not fit
            return {"shape": shape, "chain": name, "way": way, "error": f"{type(error).__name__}: {str(error)[:200]}"}
        return {"shape": shape, "chain": name, "way": way, "ms": ms, "worst": worst, "rms": rms}

    eager = row("eager", lambda given: reference.evaluate(chain, given, moves=True))
    yield eager
    if arguments.compile:
        compiled = torch.compile(lambda *given: reference.evaluate(chain, given, moves=True))
        yield row("torch.compile", lambda given: compiled(*given))
    plan = planned(chain, tensors)
    yield row("ours", prepare(chain, plan))
    if arguments.ways and name == "pointwise":
        for way, other in other_ways(plan, rows):
            yield row(way, prepare(chain, other))
        plain = Chain(0, linear(inner, outer), (), ("input", "weight"))
        found = tf32x3(*tensors[:2])
        worst, rms = errors(plain, tensors[:2], found)
        ms = milliseconds(lambda: tf32x3(*tensors[:2]))
        yield {"shape": shape, "chain": "none", "way": "tf32x3", "ms": ms, "worst": worst, "rms": rms}


def measure_training(shape: str, name: str) -> Iterator[dict[str, Any]]:
    """Forward and backward."""
    rows, inner, outer = SHAPES[shape]
    chain = chains(inner, outer)[name]
    tensors = [t.requires_grad_(role != "running") for t, role in zip(tensors_of(chain, rows), chain.roles)]
    outcome = lower(chain, problem_of(tensors), hardware.machine_for("cuda"))
    plain = reference.evaluate(chain, tensors)
    dy, wanted = torch.randn_like(plain), [t for t in tensors if t.requires_grad]
    truth = torch.autograd.grad(plain, wanted, dy)
    ways = {"eager": lambda: reference.evaluate(chain, tensors), "ours": lambda: prepared(tensors)}
    prepared = prepare(chain, outcome)
    for way, run in ways.items():

        def step(run: Callable[[], Tensor] = run) -> tuple[Tensor, ...]:
            return torch.autograd.grad(run(), wanted, dy)

        off = max(float((a - b).norm() / b.norm()) for a, b in zip(step(), truth))
        yield {"shape": shape, "chain": name, "way": f"{way}, a step", "ms": milliseconds(step), "from eager's": off}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="shapes with this in their name")
    parser.add_argument("--chain", default="", help="this chain alone")
    parser.add_argument("--ways", action="store_true", help="other tiles, and other ways to multiply")
    parser.add_argument("--train", action="store_true", help="a step of training instead")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="without torch.compile")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    for shape in [shape for shape in SHAPES if arguments.only in shape]:
        for name in [name for name in chains(1, 1) if arguments.chain in ("", name)]:
            found = measure_training(shape, name) if arguments.train else measure(shape, name, arguments)
            for row in found:
                rows.append(row)
                print("  ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()), flush=True)
            torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

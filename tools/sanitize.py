"""Runs every kernel of ours once, on small odd shapes, for compute-sanitizer to look on.

python tools/sanitize.py --plan                 # what would be run, and which kernels that launches; needs no GPU
python tools/sanitize.py                        # runs it, and compares with float64 on the CPU
python tools/sanitize.py --only 'few*'          # some of it
compute-sanitizer --tool memcheck python tools/sanitize.py

Ends with 1 where a result is wrong, or where a kernel of kernels/triton or kernels/cuda was not launched by the whole
list; `CONTRIBUTING.md` has the other tools.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import fnmatch
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # else what lies behind a tensor may be torch's own

import torch
from torch import Tensor

import postlude
from postlude import cards, hardware, reference
from postlude.chain import (
    Chain,
    Convolution,
    Normalize,
    Operand,
    Pointwise,
    Pool,
    Reduce,
    Role,
    Slot,
    Softmax,
    Step,
    Value,
    linear,
)
from postlude.check import tensors_for
from postlude.check.modes import pytorch_switches
from postlude.graph.upsample import gradient_is_right
from postlude.hardware import Machine, machine_on
from postlude.plan import Plan, Problem, lower, problem_of
from postlude.plan.problem import Layout, memory_format
from postlude.plan.program import TorchCall
from postlude.plan.upsample import Upsampling
from postlude.run import ahead, execute, launch, nvrtc
from postlude.stages.program import traced
from postlude.stages.upsample import upsample_gradient
from postlude.windows import Windows
from postlude.words import POOLS, REDUCTIONS, SOFTMAXES

KERNELS = Path(postlude.__file__).parent / "kernels"
HOPPER = machine_on(cards.H200)
GLOBAL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)")
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "tf32": 2e-2, "float16": 2e-2, "bfloat16": 1e-1}


@dataclasses.dataclass(frozen=True)
class Run:
    name: str
    chain: Chain
    shape: tuple[int, ...]
    dtype: str = "float32"
    layout: str = "contiguous"
    precision: str = "fp32"
    trains: bool = True
    frozen: tuple[int, ...] = ()  # slots that need no gradient

    def __str__(self) -> str:
        words = (self.dtype if self.dtype != "float32" else self.precision, self.layout.replace("_", "-"))
        how = "forward and backward" if self.trains else "forward"
        return f"{self.name}: {self.chain}, {'×'.join(map(str, self.shape))}, {', '.join(words)}, {how}"


@dataclasses.dataclass(frozen=True)
class Upsampled:
    """The gradient of upsampling."""

    name: str
    how: Upsampling
    dtype: str
    layout: Layout

    def __str__(self) -> str:
        sizes = ["×".join(map(str, size)) for size in (self.how.small, self.how.large)]
        return f"{self.name}: {' → '.join(sizes)}, {self.dtype}, {self.layout.replace('_', '-')}, backward"

    def like(self, device: str) -> Tensor:
        form = memory_format(self.layout, len(self.how.small))
        shape = (2, 5, *self.how.small)
        return torch.empty(shape, dtype=getattr(torch, self.dtype), device=device, memory_format=form)


def upsamplings() -> list[Upsampled]:
    return [
        Upsampled("upsample-fp32", Upsampling((3, 5, 7), (6, 11, 14), is_linear=True), "float32", "contiguous"),
        Upsampled("upsample-fp16", Upsampling((9, 7), (17, 21), is_linear=False), "float16", "channels_last"),
    ]


def convolution(
    dims: int,
    channels: tuple[int, int],
    padding: int = 0,
    *,
    transposed: bool = False,
    stride: int = 1,
    groups: int = 1,
    bias: bool = True,
) -> Convolution:
    sizes = (3, stride, padding, 1, stride - 1 if transposed else 0)
    kernel, strides, paddings, ones, extra = ((size,) * dims for size in sizes)
    return Convolution(transposed, *channels, kernel, strides, paddings, ones, extra, groups, bias)


def chain_of(producer: Convolution | None, dims: int, *steps: tuple[Any, ...]) -> Chain:
    """Steps in short: ("relu",), ("mul", "row"), ("norm", groups), ("layer_norm", axes), ("mean", "space"),
    ("max_pool", kernel, stride, padding)."""
    roles: list[Role] = ["input"]
    if producer is not None:
        roles += ["weight", "bias"] if producer.has_bias else ["weight"]
    made: list[Step] = []
    for word, *rest in steps:
        value = Value(len(made))
        if word == "norm":
            roles += ["channel", "channel"]
            weight, bias = Slot(len(roles) - 2), Slot(len(roles) - 1)
            op = "group_norm" if rest[0] else "instance_norm"
            made.append(Normalize(op, value, rest[0], 1e-5, weight, bias))
        elif word == "batch_norm":
            roles += ["channel", "channel", "running", "running"]
            weight, bias, mean, variance = (Slot(len(roles) - place) for place in (4, 3, 2, 1))
            made.append(Normalize(word, value, None, 1e-5, weight, bias, 0, (mean, variance), 0.1))
        elif word == "layer_norm":
            roles += ["last", "last"]
            made.append(Normalize(word, value, None, 1e-5, Slot(len(roles) - 2), Slot(len(roles) - 1), rest[0]))
        elif word in SOFTMAXES:
            made.append(Softmax(word, value))
        elif word in POOLS:
            made.append(Pool(word, value, Windows(*((size,) * dims for size in rest))))
        elif word in REDUCTIONS:
            made.append(Reduce(word, value, rest[0]))
        else:
            operands: list[Operand] = [value]
            for role in rest:
                roles.append(role)
                operands.append(Slot(len(roles) - 1))
            settings = (("approximate", "none"),) if word == "gelu" else ()
            made.append(Pointwise(word, tuple(operands), settings))
    return Chain(dims, producer, tuple(made), tuple(roles))


def runs() -> list[Run]:
    turned = chain_of(convolution(3, (17, 33), transposed=True), 3, ("relu",), ("norm", 3))
    block = chain_of(convolution(3, (20, 32), 1), 3, ("norm", None), ("silu",))
    packed = chain_of(convolution(2, (9, 12), 1), 2, ("norm", 3), ("silu",))
    boxes = chain_of(convolution(2, (20, 50), 1), 2, ("mul", "row"), ("norm", 5), ("silu",))
    pairs = chain_of(convolution(2, (16, 24), 1), 2, ("norm", 4), ("relu",))
    back = chain_of(convolution(2, (50, 66), transposed=True), 2, ("relu",), ("norm", 3))
    plain = convolution(2, (9, 10), 1, bias=False)
    gated = chain_of(plain, 2, ("mul", "row"), ("norm", 2), ("add", "full"), ("mul", "row"))
    grouped = chain_of(convolution(3, (6, 10), groups=2), 3, ("gelu",), ("norm", 5), ("mul", "channel"))
    alone = chain_of(None, 2, ("mul", "full"), ("norm", 3), ("silu",), ("add", "channel"))
    once = chain_of(convolution(2, (9, 10), 1), 2, ("gelu",), ("add", "full"))
    phases = chain_of(convolution(2, (9, 20), 1, transposed=True, stride=2), 2, ("mul", "row"), ("norm", 5))
    deep = chain_of(convolution(3, (9, 10), 1, transposed=True, stride=2), 3, ("gelu",), ("add", "full"))
    down = chain_of(convolution(3, (17, 24), 1, stride=2), 3, ("norm", 3), ("silu",))
    halves = chain_of(convolution(2, (18, 20), 1, stride=2), 2, ("gelu",), ("add", "full"))
    batch = chain_of(convolution(2, (9, 10), 1), 2, ("mul", "row"), ("batch_norm",), ("silu",))
    layer = chain_of(convolution(2, (9, 10), 1), 2, ("mul", "row"), ("layer_norm", 1), ("add", "full"), ("silu",))
    pooled = chain_of(convolution(3, (17, 24)), 3, ("norm", 8), ("mul", "row"), ("mean", "space"))
    summed = chain_of(None, 3, ("relu",), ("sum", "space"))
    soft = chain_of(convolution(2, (9, 12), 1), 2, ("norm", 3), ("mul", "row"), ("logsumexp", "channels"))
    halved = chain_of(convolution(3, (9, 12), 1), 3, ("norm", 3), ("silu",), ("max_pool", 2, 2, 0), ("mul", "channel"))
    strided = chain_of(None, 2, ("norm", 3), ("mul", "channel"), ("avg_pool", 3, 2, 1))
    thinned = chain_of(convolution(2, (9, 12), 1), 2, ("norm", 3), ("silu",), ("max_pool", 3, 2, 1))
    shared = chain_of(convolution(2, (9, 12), 1), 2, ("softmax",), ("mul", "channel"))
    least = chain_of(convolution(2, (9, 12), 1), 2, ("silu",), ("min", "channels"), ("tanh",))
    top = chain_of(None, 3, ("mul", "full"), ("amax", "channels"))
    beside = chain_of(convolution(3, (3, 20), 1), 3, ("gelu",), ("norm", 5), ("silu",))
    normed = chain_of(linear(50, 70, has_bias=True), 0, ("mul", "channel"), ("batch_norm",), ("silu",))
    rows = chain_of(linear(52, 70, has_bias=True), 0, ("silu",), ("norm", 7), ("add", "full"))
    chosen = chain_of(
        linear(50, 70, has_bias=True), 0, ("softmax",), ("mul", "channel"), ("max", "channels"), ("tanh",)
    )
    wide = chain_of(linear(17, 33), 0, ("gelu",), ("sum", "sample"))
    added = chain_of(linear(150, 70, has_bias=True), 0, ("add", "channel"), ("sum", "sample"))
    averaged = chain_of(linear(150, 70), 0, ("mean", "sample"))
    tapped = chain_of(convolution(3, (9, 10), 1, transposed=True, stride=2), 3, ("mul", "channel"), ("mean", "space"))
    few = chain_of(convolution(3, (3, 24)), 3, ("norm", 8), ("mean", "sample"))
    fewer = chain_of(convolution(2, (2, 40), 1), 2, ("norm", 8), ("mean", "space"))
    cube, flat, last = (2, 17, 5, 6, 7), (3, 9, 13, 11), "channels_last"
    small = (2, 3, 6, 13, 37)
    return [
        Run("product-fp32", turned, cube),
        Run("product-tf32", turned, cube, layout=last, precision="tf32"),
        Run("product-fp64", turned, (1, 17, 3, 4, 5), "float64"),
        Run("product-bf16", block, (2, 20, 5, 6, 7), "bfloat16", last),
        Run("product-fp16", block, (1, 20, 3, 5, 9), "float16"),
        Run("product-once-fp16", once, flat, "float16", trains=False),
        Run("product-once-bf16", once, flat, "bfloat16", last, trains=False),
        Run("side-by-side-fp32", beside, small),
        Run("side-by-side-tf32", beside, small, layout=last, precision="tf32", trains=False),
        Run("packed-bf16", packed, (2, 9, 3, 32), "bfloat16"),
        Run("packed-fp16", packed, (2, 9, 3, 64), "float16", last),
        Run("in-place-fp16", boxes, (2, 20, 31, 63), "float16"),
        Run("in-place-bf16", pairs, (1, 16, 31, 62), "bfloat16", last),
        Run("back-in-place-bf16", back, (2, 50, 31, 16), "bfloat16"),
        Run("back-fp32", back, (2, 50, 31, 16)),
        Run("gated-fp32", gated, flat),
        Run("gated-fp16", gated, flat, "float16", last),
        Run("phases-fp32", phases, flat),
        Run("phases-tf32", deep, (2, 9, 3, 4, 5), layout=last, precision="tf32", trains=False),
        Run("phases-fp16", phases, flat, "float16", last),
        Run("strided-fp32", down, cube),
        Run("strided-tf32", halves, (3, 18, 13, 11), layout=last, precision="tf32"),
        Run("strided-fp16", halves, (3, 18, 13, 11), "float16", trains=False),
        Run("batch-fp32", batch, flat),
        Run("batch-bf16", batch, flat, "bfloat16", last),
        Run("layer-fp32", layer, flat),
        Run("layer-fp16", layer, flat, "float16", last),
        Run("library-fp32", grouped, (2, 6, 7, 6, 9)),
        Run("library-bf16", grouped, (2, 6, 7, 6, 9), "bfloat16", last),
        Run("passes-fp64", alone, (3, 9, 45, 47), "float64"),
        Run("passes-fp16", alone, (3, 9, 45, 47), "float16", last),
        Run("moments-tf32", pooled, cube, precision="tf32"),
        Run("moments-fp32", pooled, cube, layout=last, trains=False),
        Run("sums-fp32", summed, (3, 5, 9, 11, 13), trains=False),
        Run("sums-bf16", summed, (3, 5, 9, 11, 13), "bfloat16", last, trains=False),
        Run("channels-fp32", soft, flat),
        Run("channels-fp16", soft, flat, "float16", last, trains=False),
        Run("channels-bf16", top, (3, 5, 9, 11, 13), "bfloat16"),
        Run("pools-fp32", halved, (2, 9, 5, 7, 9)),
        Run("pools-fp16", halved, (2, 9, 5, 7, 9), "float16", last),
        Run("pools-fp64", strided, (3, 9, 45, 47), "float64"),
        Run("pools-bf16", strided, (3, 9, 13, 11), "bfloat16", last),
        Run("packed-pools-bf16", thinned, (2, 9, 3, 64), "bfloat16"),
        Run("linear-fp32", normed, (37, 50)),
        Run("linear-tf32", normed, (37, 50), precision="tf32", trains=False),
        Run("linear-rows-fp32", rows, (37, 52)),
        Run("linear-rows-fp16", rows, (37, 52), "float16"),
        Run("linear-softmax-fp32", chosen, (37, 50)),
        Run("linear-fp64", wide, (5, 17), "float64"),
        Run("column-sums-fp32", added, (37, 150)),
        Run("column-sums-fp64", averaged, (37, 150), "float64"),
        Run("tap-sums-fp32", tapped, (3, 9, 5, 7, 13)),
        Run("softmax-fp32", shared, flat),
        Run("softmax-bf16", shared, flat, "bfloat16", last),
        Run("least-fp32", least, flat),
        Run("least-fp32-last", least, flat, layout=last),
        Run("few-fp32", few, small),
        Run("few-tf32", few, small, layout=last, precision="tf32", frozen=(0,)),
        Run("few-bf16", few, small, "bfloat16", frozen=(1,)),
        Run("few-stored", chain_of(convolution(3, (3, 24)), 3, ("relu",)), (2, 3, 11, 12, 37), trains=False),
        Run("few-fp16", fewer, (2, 2, 19, 35), "float16", last, trains=False),
    ]


@functools.cache
def all_kernels() -> frozenset[str]:
    """Every kernel that there is, by the sources alone."""
    names: set[str] = set()
    for file in (KERNELS / "triton").glob("*.py"):
        functions = [node for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]
        names |= {node.name for node in functions if node.name.endswith("_kernel")}
    for file in (KERNELS / "cuda").glob("*.cu"):
        names |= set(GLOBAL.findall(file.read_text("utf-8")))
    return frozenset(names)


def problem_for(run: Run, tensors: Sequence[Tensor]) -> Problem:
    return dataclasses.replace(
        problem_of(tensors, run.precision), device="cuda", needs_grad=run.trains, allows_tf32=run.precision == "tf32"
    )


def plan_of(run: Run, problem: Problem, machine: Machine) -> Plan:
    plan = lower(run.chain, problem, machine, even_if_slower=True)
    if not isinstance(plan, Plan):
        raise SystemExit(f"{run.name} is not planned: {plan}")
    return plan


def called(run: Run, plan: Plan, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The result, and the gradients where it trains."""
    return _with_gradients(run, execute.prepare(run.chain, plan), tensors)


def _with_gradients(
    run: Run, function: Callable[[Sequence[Tensor]], Tensor], tensors: Sequence[Tensor]
) -> list[Tensor]:
    if not run.trains:
        with torch.no_grad():
            return [function(tensors)]
    wanted = [t.requires_grad_() for t, needed in zip(tensors, needs_of(run)) if needed]
    result = function(tensors)
    dy = torch.linspace(0.5, 1.5, result.numel()).reshape(result.shape).to(result.dtype).to(result.device)
    return [result.detach(), *torch.autograd.grad(result, wanted, dy)]


def needs_of(run: Run) -> list[bool]:
    """Which slots want a gradient."""
    roles = enumerate(run.chain.roles)
    return [run.trains and slot not in run.frozen and role != "running" for slot, role in roles]


def inputs_of(run: Run, device: str) -> list[Tensor]:
    layout: Any = run.layout
    return list(tensors_for(run.chain, run.shape, getattr(torch, run.dtype), device, 0, "normal", layout))


@contextlib.contextmanager
def watched(names: set[str]) -> Iterator[None]:
    """Notes the kernels that are launched inside."""
    honest = nvrtc.load

    def load(source: Any, name: str, *rest: Any) -> Any:
        names.add(name)  # loaded right before its first launch, by what will launch it
        return honest(source, name, *rest)

    def watch(name: str, _: Any) -> None:
        names.add(name)

    nvrtc.load = load  # type: ignore[assignment]
    launch.watchers.append(watch)
    try:
        yield
    finally:
        nvrtc.load = honest
        launch.watchers.remove(watch)


def planned(run: Run | Upsampled, machine: Machine = HOPPER) -> list[str]:
    """The kernels that a run launches, in order."""
    if isinstance(run, Upsampled):
        form = memory_format(run.layout, len(run.how.small))
        dy = run.like("meta").new_empty((2, 5, *run.how.large)).contiguous(memory_format=form)
        calls = traced(lambda given: upsample_gradient(given[0], run.how, run.layout), [dy]).forward
        return [call.kernel for call in calls if not isinstance(call, TorchCall)]
    problem = problem_for(run, inputs_of(run, "cpu"))
    runner = execute.prepare(run.chain, plan_of(run, problem, machine))
    program = ahead.program_of(run.chain, runner, problem, needs_of(run))
    return [call.kernel for call in (*program.forward, *program.backward) if not isinstance(call, TorchCall)]


def apart(run: Run, ours: Sequence[Tensor], tensors: Sequence[Tensor]) -> float:
    """The largest error of any result, as a part of the largest number in it."""
    leaves = [t.detach().cpu().double() for t in tensors]
    truth = _with_gradients(run, lambda ts: reference.evaluate(run.chain, ts, dtype=torch.float64), leaves)
    sizes = [float(t.abs().max()) for t in truth]
    least = 1e-2 * max(sizes)  # what is nothing in truth (a bias before a norm) is measured by the others
    errors = [(a.detach().cpu().double() - b).abs().max() for a, b in zip(ours, truth, strict=True)]
    return max(float(error.nan_to_num(torch.inf)) / max(size, least) for error, size in zip(errors, sizes))


def run_on_card(run: Run | Upsampled, machine: Machine, names: set[str]) -> bool:
    if isinstance(run, Upsampled):
        with watched(names):
            is_right = gradient_is_right(run.like("cuda"), run.how)
        print(f"{'right' if is_right else 'WRONG'}  {run}", flush=True)
        return is_right
    with pytorch_switches(run.precision, torch.device("cuda")), watched(names):
        tensors = inputs_of(run, "cuda")
        ours = called(run, plan_of(run, problem_for(run, tensors), machine), tensors)
        torch.cuda.synchronize()
    error = apart(run, ours, tensors)
    limit = TOLERANCE["tf32" if run.precision == "tf32" else run.dtype]
    print(f"{'right' if error <= limit else 'WRONG'} {error:.1e}  {run}", flush=True)
    return error <= limit


def summary(count: int, names: set[str], wrong: int, seconds: float) -> str:
    missing = sorted(all_kernels() - names)
    covered = f"{len(all_kernels()) - len(missing)} of {len(all_kernels())} kernels launched"
    left = f"; not launched: {', '.join(missing)}" if missing else ""
    return f"sanitize: {count} runs, {wrong} wrong, {covered}, {seconds:.0f} s{left}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Runs every kernel once, for compute-sanitizer to look on.")
    parser.add_argument("--plan", action="store_true", help="say what would be run and launched; needs no GPU")
    parser.add_argument("--only", default="*", metavar="GLOBS", help="some of the runs, by names with commas")
    parser.add_argument("--forward", action="store_true", help="no backward passes")
    options = parser.parse_args(arguments)
    every: list[Run | Upsampled] = [*runs(), *upsamplings()]
    chosen = [run for run in every if any(fnmatch.fnmatch(run.name, one) for one in options.only.split(","))]
    if options.forward:
        chosen = [dataclasses.replace(run, trains=False) for run in chosen if isinstance(run, Run)]
    if not chosen:
        parser.error(f"no run is called {options.only}")
    if not options.plan and not torch.cuda.is_available():
        parser.error("there is no GPU to run on; --plan says what would be run")
    start, names, wrong = time.monotonic(), set[str](), 0
    for run in chosen:
        if options.plan:
            found = planned(run)
            names |= set(found)
            print(f"{run}\n  {', '.join(dict.fromkeys(found))}")
        else:
            wrong += not run_on_card(run, hardware.machine_for("cuda"), names)
    print(summary(len(chosen), names, wrong, time.monotonic() - start))
    is_whole = options.only == "*" and not options.forward
    return int(wrong > 0 or (is_whole and not names >= all_kernels()))


if __name__ == "__main__":
    sys.exit(main())

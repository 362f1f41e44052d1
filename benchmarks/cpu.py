"""Times chains on the CPU, eager, torch.compile and fused in turns, under the system's malloc and a tuned one, and
under the tuned one next to as many busy processes as there are cores. Under the tuned one, training steps and bfloat16
autocast are timed as well. All of it takes about ten minutes on 2 quiet cores.

    python benchmarks/cpu.py                     print the table
    python benchmarks/cpu.py --record            also merge the rows into benchmarks/results/cpu.csv
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=avx2 python benchmarks/cpu.py    without AVX512
    python benchmarks/cpu.py --only 23 --rounds 9
    python benchmarks/cpu.py --busy 2            only next to two busy processes

Every row has its error against float64 and PyTorch's own. Half of eager's time on large outputs is page faults, which a
tuned malloc avoids, so a ratio means little without naming the malloc.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from rows import AUTOCAST, BUSY, CPU_SOURCES, RESULTS, STEP

from cases import CHAIN_23, CHAIN_61, Builder, conv
from postlude import hardware, reference
from postlude.chain import Chain
from postlude.check import clock, records
from postlude.check.points import tensors_for
from postlude.plan import Plan, problem_of
from postlude.run import execute as running
from postlude.run.site import Site

TUNED = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}


@dataclass(frozen=True)
class Bench:
    name: str
    chain: Chain
    shape: tuple[int, ...]
    compiled: bool = False  # torch.compile takes part: ten seconds of compiling for each row
    layouts: tuple[str, ...] = ("contiguous", "channels_last")
    more: tuple[str, ...] = ()  # modes in which it is timed under the tuned malloc besides: STEP, AUTOCAST


BENCHES = [
    Bench("23", CHAIN_23, (16, 3, 24, 32, 32), True),
    Bench("61", CHAIN_61, (2, 64, 16, 16, 16), True),
    Bench("61 large", CHAIN_61, (2, 64, 32, 32, 32), True),
    Bench(
        "conv instance_norm leaky_relu",
        Builder(3, conv(3, (32, 32), padding=1)).norm(None).op("leaky_relu", slope=0.01).chain(),
        (2, 32, 32, 32, 32),
        True,
        more=(STEP,),  # a bfloat16 convolution takes 10 s where the processor has no bfloat16 products
    ),
    Bench(
        "few channels, norm, relu",
        Builder(3, conv(3, (3, 16))).norm(4).op("relu").chain(),
        (8, 3, 24, 32, 32),
    ),
    Bench(
        "2-D conv group_norm silu",
        Builder(2, conv(2, (16, 32), padding=1)).norm(8).op("silu").chain(),
        (8, 16, 64, 64),
        more=(STEP,),
    ),
    Bench(
        "2-D conv gelu residual",
        Builder(2, conv(2, (16, 16), padding=1)).op("gelu", approximate="none").op("add", "full").chain(),
        (8, 16, 96, 96),
    ),
    Bench(
        "2-D many",
        Builder(2, conv(2, (16, 32), padding=1)).norm(8).op("silu").chain(),
        (32, 16, 128, 128),
        more=(STEP,),
    ),
    Bench("conv relu batch of one", Builder(3, conv(3, (8, 16))).op("relu").chain(), (1, 8, 48, 48, 48)),
    Bench(
        "conv instance_norm batch of one",
        Builder(3, conv(3, (32, 32), padding=1)).norm(None).op("leaky_relu", slope=0.01).chain(),
        (1, 32, 24, 24, 24),
        True,
    ),
    Bench("conv relu", Builder(3, conv(3, (8, 16))).op("relu").chain(), (4, 8, 24, 32, 32)),
    Bench(
        "conv relu mean over space",
        Builder(3, conv(3, (8, 16))).op("relu").reduce("mean", "space").chain(),
        (8, 8, 16, 32, 32),
    ),
    Bench(
        "2-D transposed conv relu instance_norm",
        Builder(2, conv(2, (16, 16), transposed=True, stride=2, padding=1, output_padding=1))
        .op("relu")
        .norm(None)
        .chain(),
        (8, 16, 48, 48),
    ),
    Bench("group_norm relu", Builder(3).norm(8).op("relu").chain(), (2, 32, 32, 48, 48), True, more=(STEP, AUTOCAST)),
    Bench("group_norm silu 2-D", Builder(2).norm(32).op("silu").chain(), (8, 128, 64, 64), True, more=(STEP, AUTOCAST)),
    Bench(
        "instance_norm leaky_relu",
        Builder(3).norm(None).op("leaky_relu", slope=0.01).chain(),
        (2, 32, 32, 48, 48),
        True,
        more=(STEP,),
    ),
    Bench("group_norm mean", Builder(3).norm(8).reduce("mean", "space").chain(), (4, 32, 32, 32, 32)),
    Bench(
        "conv norm residual relu",
        Builder(3, conv(3, (16, 16), padding=1)).norm(4).op("add", "full").op("relu").chain(),
        (4, 16, 24, 24, 24),
    ),
]


# Beside busy processes: two threads may share a core for a tenth of a second, so shorter windows measure the scheduler.
_LONG_WINDOW_S = 0.6


@contextlib.contextmanager
def beside_busy_processes(count: int) -> Iterator[None]:
    """Each keeps one core busy with arithmetic and no memory."""
    workers = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def measure(bench: Bench, layout: str, mode: str, rounds: int, seconds: float) -> list[records.Record]:
    inputs = inputs_for(bench, layout, mode)
    # Of a training step: the gradient of the input.
    shape = reference.evaluate(bench.chain, [tensor.detach() for tensor in inputs[0]]).shape
    first = functools.partial(step, dy=torch.randn(shape)) if mode == STEP else call
    truth = first(functools.partial(reference.evaluate, bench.chain, dtype=torch.float64), inputs[0])
    site = Site(bench.name, bench.chain)
    runs: dict[str, Run] = {
        "eager": lambda tensors: reference.evaluate(bench.chain, tensors),
        "postlude": lambda tensors: site(*tensors),
    }
    if bench.compiled and hardware.cpp_compiler() is not None:
        torch._dynamo.reset()
        runs["torch.compile"] = torch.compile(runs["eager"])
    variants = {
        name: clock.rotating(lambda *tensors, run=run: first(run, tensors), inputs) for name, run in runs.items()
    }
    for run in variants.values():  # torch.compile's half a minute is not part of the rounds' time
        run(0)
    window, budget = (_LONG_WINDOW_S, 4 * seconds) if mode == BUSY else (0.1, seconds)
    timings = clock.time_interleaved(variants, rounds=rounds, min_window_s=window, budget_s=budget)
    rows = []
    for name, timing in timings.items():
        result = variants[name](0)
        assert isinstance(result, Tensor)
        error = (result - truth).abs() / truth.std()
        rows.append(
            records.Record(
                str(bench.chain),
                "×".join(map(str, bench.shape)),
                "bfloat16" if mode == AUTOCAST else "float32",
                layout,
                "bf16" if mode == AUTOCAST else "fp32",
                mode,
                name,
                *records.times_of(timing, timings["eager"]),
                float(error.square().mean().sqrt()),
                float(error.max()),
                threads=torch.get_num_threads(),
                kernel_hash=records.kernel_hash(CPU_SOURCES),
                **records.environment("cpu"),  # type: ignore[arg-type]
            )
        )
    return rows


Run = Callable[[Sequence[Tensor]], Tensor]


def call(run: Run, tensors: Sequence[Tensor]) -> Tensor:
    return run(tensors)


def step(run: Run, tensors: Sequence[Tensor], dy: Tensor) -> Tensor:
    result = run(tensors)
    return torch.autograd.grad(result, tensors, dy.to(result.dtype))[0]


def inputs_for(bench: Bench, layout: str, mode: str) -> list[list[Tensor]]:
    """Three calls' tensors. Under autocast the value is of 16 bits and what a norm reads beside it is not."""
    found = [tensors_for(bench.chain, bench.shape, torch.float32, "cpu", seed, "normal", layout) for seed in range(3)]
    if mode == AUTOCAST:
        narrow = ("input", "full") if bench.chain.producer is None else ()
        found = [[t.bfloat16() if r in narrow else t for t, r in zip(ts, bench.chain.roles)] for ts in found]
    return [[tensor.requires_grad_(mode == STEP) for tensor in tensors] for tensors in found]


def under(bench: Bench, mode: str) -> Bench:
    """As autocast has it: a convolution in bfloat16."""
    conv = bench.chain.producer
    if mode != AUTOCAST or conv is None:
        return bench
    narrow = dataclasses.replace(conv, dtype="bfloat16")
    return dataclasses.replace(bench, chain=dataclasses.replace(bench.chain, producer=narrow))


def way_of(bench: Bench, layout: str, mode: str) -> str:
    tensors = inputs_for(bench, layout, mode)[0]
    outcome, _ = running.prepared(bench.chain, problem_of(tensors))
    if not isinstance(outcome, Plan):
        return "through PyTorch"
    if outcome.own is not None:
        return "our convolution"
    if outcome.is_compiled:
        return "C++"
    return "whole batch" if outcome.slabs == 1 else f"{outcome.slabs} slabs of {outcome.slab}"


def show(rows: Sequence[records.Record], way: str) -> None:
    by_name = {row.variant: row for row in rows}
    eager, ours, rival = by_name["eager"], by_name["postlude"], by_name.get("torch.compile")
    print(
        f"{eager.malloc:8} {eager.mode:18} {eager.layout:14} {eager.chain[:62]:62} {eager.shape:16} {eager.ms_p50:8.2f}"
        f" {'' if rival is None else format(rival.ms_p50, '.2f'):>8} {ours.ms_p50:8.2f}"
        f" {ours.speedup:5.2f} ({ours.speedup_low:.2f}–{ours.speedup_high:.2f})"
        f"  {ours.error_rms:.1e} / {eager.error_rms:.1e}  {way}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="benches whose name contains this")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=8.0, help="at most, for each row")
    parser.add_argument("--record", action="store_true", help="merge the rows into a file")
    parser.add_argument("--csv", type=Path, default=RESULTS, help=f"which, instead of {RESULTS.name}")
    parser.add_argument("--busy", type=int, default=0, help="processes that keep cores busy meanwhile")
    options = parser.parse_args()
    torch.set_num_threads(2)
    if options.busy:
        print(f"beside {options.busy} busy processes")
    for bench in BENCHES:
        if options.only in bench.name:
            is_more = hardware.malloc_is_tuned() and not options.busy
            for mode in (BUSY if options.busy else "forward", *(bench.more if is_more else ())):
                for layout in bench.layouts:
                    with torch.set_grad_enabled(mode == STEP), beside_busy_processes(options.busy):
                        asked = under(bench, mode)
                        rows = measure(asked, layout, mode, options.rounds, options.seconds)
                        show(rows, way_of(asked, layout, mode))
                    if options.record:
                        records.update(options.csv, rows)
    if not hardware.malloc_is_tuned():
        tuned = {**os.environ, **TUNED}
        subprocess.run([sys.executable, *sys.argv], env=tuned, check=True)
        if not options.busy:
            busy = ["--busy", str(hardware.usable_cores())]
            subprocess.run([sys.executable, *sys.argv, *busy], env=tuned, check=True)


if __name__ == "__main__":
    main()

"""Times chains on a GPU: eager, torch.compile and fused in turns, at the same precision, verified before timed.

python benchmarks/gpu.py --csv benchmarks/results/h200.csv
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from table import GPU_SOURCES

from cases import CHAIN_23, CHAIN_61, Builder, conv
from postlude import hardware, reference
from postlude.chain import Chain
from postlude.check import clock, records
from postlude.check.modes import pytorch_switches
from postlude.check.points import tensors_for
from postlude.plan import Plan, problem_of
from postlude.plan.gpu import lower_for_gpu
from postlude.run.execute import prepare
from postlude.run.site import Site


@dataclass(frozen=True)
class Bench:
    chain: Chain
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str = "contiguous"
    precision: str = "auto"
    autotune: bool = False  # torch.compile's most expensive mode as well


def block(cin: int, cout: int) -> Chain:
    return Builder(3, conv(3, (cin, cout), padding=1)).norm(None).op("leaky_relu", slope=0.01).chain()


NORM = Builder(3).norm(None).op("leaky_relu", slope=0.01).chain()
GROUP = Builder(3).norm(8).op("relu").chain()
BLOCKS = [(2, 32, 32, 128), (1, 32, 32, 160), (2, 32, 64, 64), (2, 64, 64, 64), (2, 128, 128, 32)]
LAYOUTS = ("contiguous", "channels_last")
NAMED = {CHAIN_61: (16, 64, 32, 32, 32), CHAIN_23: (128, 3, 24, 32, 32)}
BENCHES = [
    *(
        Bench(chain, shape, dtype, precision=precision, autotune=chain is CHAIN_23 and dtype == torch.bfloat16)
        for chain, shape in NAMED.items()
        for dtype, precision in ((torch.float32, "fp32"), (torch.float32, "tf32"), (torch.bfloat16, "auto"))
    ),
    *(
        Bench(block(cin, cout), (n, cin, s, s, s), torch.float16, layout)
        for n, cin, cout, s in BLOCKS
        for layout in LAYOUTS
    ),
    *(
        Bench(chain, shape, torch.float16, layout)
        for chain in (NORM, GROUP)
        for shape in ((2, 32, 128, 128, 128), (1, 32, 160, 160, 160))
        for layout in LAYOUTS
    ),
]


def calls_of(bench: Bench) -> dict[str, Callable[..., Tensor]]:
    torch._dynamo.reset()

    def evaluate(*tensors: Tensor) -> Tensor:
        return reference.evaluate(bench.chain, tensors)

    calls: dict[str, Callable[..., Tensor]] = {"eager": evaluate, "torch.compile": torch.compile(evaluate)}
    if bench.autotune:
        calls["torch.compile max-autotune"] = torch.compile(
            lambda *tensors: evaluate(*tensors), mode="max-autotune-no-cudagraphs"
        )
    calls["postlude"] = Site("bench", bench.chain, bench.precision)
    if bench.chain.producer is None:
        calls["copy twice"] = lambda x, *_: x.clone().clone()
    return calls


def measure(bench: Bench, rounds: int) -> list[records.Record]:
    sets = [tensors_for(bench.chain, bench.shape, bench.dtype, "cuda", s, "normal", bench.layout) for s in range(2)]
    calls = calls_of(bench)
    variants = {name: clock.rotating(call, sets) for name, call in calls.items()}
    timings = clock.time_interleaved(variants, rounds=rounds, min_window_s=0.03)
    few = [t[:2] if role in ("input", "full") else t for t, role in zip(sets[0], bench.chain.roles)]
    truth = reference.evaluate(bench.chain, few, dtype=torch.float64)
    rows = []
    for name, timing in timings.items():
        gain = clock.ratio(timings["eager"], timing)
        error = None
        if name != "copy twice":
            error = (calls[name](*sets[0])[:2].double() - truth) / truth.std()
        rows.append(
            records.Record(
                str(bench.chain),
                "×".join(map(str, bench.shape)),
                str(bench.dtype).removeprefix("torch."),
                bench.layout,
                bench.precision,
                "forward",
                name,
                *(1e3 * timing.quantile(p) for p in (0.2, 0.5, 0.8)),
                1e3 * timing.low,
                1e3 * timing.high,
                *(gain.median, gain.low, gain.high),
                None if error is None else float(error.square().mean().sqrt()),
                None if error is None else float(error.abs().max()),
                peak_mib=peak_mib(calls[name], sets[0]),
                launches=launches_of(calls[name]),
                clock_mhz=busy_clock(calls[name], sets[0]),
                kernel_hash=records.kernel_hash(GPU_SOURCES),
                **records.environment("cuda"),  # type: ignore[arg-type]
            )
        )
    return rows


def peak_mib(call: Callable[..., Tensor], tensors: Sequence[Tensor]) -> float:
    """Memory that one call takes beyond what was there before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call(*tensors)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def launches_of(call: Callable[..., Tensor]) -> int | None:
    if isinstance(call, Site) and call.last is not None and isinstance(call.last[1], Plan):
        return call.last[1].launches
    return None


def busy_clock(call: Callable[..., Tensor], tensors: Sequence[Tensor]) -> int | None:
    for _ in range(30):
        call(*tensors)
    try:
        return int(torch.cuda.clock_rate())
    except (ModuleNotFoundError, RuntimeError):  # NVML is not there to ask
        return None


def measure_training(bench: Bench, rounds: int) -> list[records.Record]:
    """One step, forward and backward for every tensor, at the same precision."""
    tensors = [
        t.requires_grad_()
        for t in tensors_for(bench.chain, bench.shape, bench.dtype, "cuda", 0, "normal", bench.layout)
    ]
    problem = dataclasses.replace(problem_of(tensors), needs_grad=True)
    plan = lower_for_gpu(bench.chain, problem, hardware.machine_for("cuda"), even_if_slower=True)
    if not isinstance(plan, Plan):
        print(f"{bench.chain}: {plan}")
        return []
    torch._dynamo.reset()
    runner = prepare(bench.chain, plan, "cuda")
    forwards: dict[str, Callable[..., Tensor]] = {
        "eager": lambda *ts: reference.evaluate(bench.chain, ts),
        "torch.compile": torch.compile(lambda *ts: reference.evaluate(bench.chain, ts)),
        "postlude": lambda *ts: runner(ts),
    }
    dy = torch.randn_like(forwards["eager"](*tensors))

    def step(forward: Callable[..., Tensor]) -> Callable[..., object]:
        return lambda *ts: torch.autograd.grad(forward(*ts), ts, dy)

    variants = {name: clock.rotating(step(forward), [tensors]) for name, forward in forwards.items()}
    timings = clock.time_interleaved(variants, rounds=rounds, min_window_s=0.03)
    shape, dtype = "×".join(map(str, bench.shape)), str(bench.dtype).removeprefix("torch.")
    rows = []
    for name, timing in timings.items():
        gain = clock.ratio(timings["eager"], timing)
        rows.append(
            records.Record(
                *(str(bench.chain), shape, dtype, bench.layout, bench.precision, "training step", name),
                *(1e3 * timing.quantile(p) for p in (0.2, 0.5, 0.8)),
                1e3 * timing.low,
                1e3 * timing.high,
                *(gain.median, gain.low, gain.high),
                kernel_hash=records.kernel_hash(GPU_SOURCES),
                **records.environment("cuda"),  # type: ignore[arg-type]
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--train", action="store_true", help="a training step instead of a forward pass")
    options = parser.parse_args()
    for bench in BENCHES:
        with torch.set_grad_enabled(options.train), pytorch_switches(bench.precision, torch.device("cuda")):
            rows = (measure_training if options.train else measure)(bench, options.rounds)
        if not rows:
            continue
        cells = " ".join(f"{row.variant} {row.ms_p50:.3f} (err {row.error_rms or 0:.1e})" for row in rows)
        first = rows[0]
        what = f"{first.chain[:40]:40} {first.shape:16} {first.dtype:8} {first.precision:4} {first.layout:13}"
        print(what, cells, flush=True)
        if options.csv:
            records.update(options.csv, rows)


if __name__ == "__main__":
    main()

"""Times chains on a GPU: eager, torch.compile and fused in turns, at the same precision, verified before timed.

python benchmarks/gpu.py --csv benchmarks/results/h200.csv
python benchmarks/gpu.py --train --csv benchmarks/results/h200.csv
python benchmarks/gpu.py --level2
python benchmarks/gpu.py --train --missing --csv benchmarks/results/h200.csv

A chain that fails leaves the others their rows. `--missing` leaves out what the file has from today's code.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from rows import GPU_SOURCES, TRAINING_SOURCES, are_recorded

from cases import CHAIN_23, CHAIN_61, Builder, conv
from level2 import LEVEL2
from postlude import reference
from postlude.chain import Chain
from postlude.check import clock, records
from postlude.check.modes import pytorch_switches
from postlude.check.points import tensors_for
from postlude.plan import Plan, Settings
from postlude.run.site import Site


@dataclass(frozen=True)
class Bench:
    chain: Chain
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str = "contiguous"
    precision: str = "auto"
    autotune: bool = False  # torch.compile's most expensive mode as well
    frozen_input: bool = False  # in training: the first layer of a network


def block(cin: int, cout: int, stride: int = 1) -> Chain:
    return Builder(3, conv(3, (cin, cout), stride=stride, padding=1)).norm(None).op("leaky_relu", slope=0.01).chain()


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
        Bench(block(cin, cout, stride=2), (2, cin, s, s, s), torch.float32, precision="fp32")
        for cin, cout, s in ((32, 64, 128), (64, 128, 64))
    ),
    *(
        Bench(chain, shape, torch.float16, layout)
        for chain in (NORM, GROUP)
        for shape in ((2, 32, 128, 128, 128), (1, 32, 160, 160, 160))
        for layout in LAYOUTS
    ),
]

TRAINED = [
    *(dataclasses.replace(bench, autotune=False) for bench in BENCHES if bench.chain.producer is not None),
    *(
        Bench(CHAIN_23, NAMED[CHAIN_23], dtype, precision=precision, frozen_input=True)
        for dtype, precision in ((torch.float32, "fp32"), (torch.float32, "tf32"), (torch.bfloat16, "auto"))
    ),
]

WITHOUT_NORM = [
    Bench(chain, shape, torch.float32, precision=precision)
    for chain, shape in LEVEL2.values()
    for precision in ("tf32", "fp32")
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
    calls["postlude"] = Site("bench", bench.chain, Settings(bench.precision))
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
                *records.times_of(timing, timings["eager"]),
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
    entry = call.ledger.latest.get((call.name, call.chain)) if isinstance(call, Site) else None
    return entry.outcome.launches if entry is not None and isinstance(entry.outcome, Plan) else None


def busy_clock(call: Callable[..., Tensor], tensors: Sequence[Tensor]) -> int | None:
    for _ in range(30):
        call(*tensors)
    try:
        return int(torch.cuda.clock_rate())
    except (ModuleNotFoundError, RuntimeError):  # NVML is not there to ask
        return None


def measure_training(bench: Bench, rounds: int) -> list[records.Record]:
    """One step, forward and backward for every tensor that is not frozen, at the same precision."""
    tensors = tensors_for(bench.chain, bench.shape, bench.dtype, "cuda", 0, "normal", bench.layout)
    for slot, tensor in enumerate(tensors):
        tensor.requires_grad_(slot > 0 or not bench.frozen_input)
    calls = calls_of(bench)
    dy = torch.randn_like(calls["eager"](*tensors))
    steps = {name: step_of(call, dy) for name, call in calls.items() if name != "copy twice"}
    variants = {name: clock.rotating(step, [tensors]) for name, step in steps.items()}
    timings = clock.time_interleaved(variants, rounds=rounds, min_window_s=0.03)
    mode = mode_of(bench)
    rows = []
    for name, timing in timings.items():
        rows.append(
            records.Record(
                *(str(bench.chain), "×".join(map(str, bench.shape)), str(bench.dtype).removeprefix("torch.")),
                *(bench.layout, bench.precision, mode, name),
                *records.times_of(timing, timings["eager"]),
                error_rms=gradient_error(calls[name], bench),
                peak_mib=peak_mib(steps[name], tensors),
                saved_mib=saved_mib(calls[name], tensors),
                clock_mhz=busy_clock(steps[name], tensors),
                kernel_hash=records.kernel_hash(TRAINING_SOURCES),
                **records.environment("cuda"),  # type: ignore[arg-type]
            )
        )
    return rows


def mode_of(bench: Bench) -> str:
    return "training step, input frozen" if bench.frozen_input else "training step"


def step_of(call: Callable[..., Tensor], dy: Tensor) -> Callable[..., Any]:
    def step(*tensors: Tensor) -> Any:
        return torch.autograd.grad(call(*tensors), [t for t in tensors if t.requires_grad], dy)

    return step


def gradient_error(call: Callable[..., Tensor], bench: Bench) -> float:
    """The worst tensor's error against float64 on two samples, relative to the spread of its truth.

    A bias that the norm cancels is left out: its gradient is only rounding.
    """
    shape = (2, *bench.shape[1:])
    tensors = tensors_for(bench.chain, shape, bench.dtype, "cuda", 1, "normal", bench.layout)
    ours = [t.detach().requires_grad_() for t in tensors]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    y = reference.evaluate(bench.chain, exact)
    dy = torch.randn(y.shape, generator=torch.Generator("cuda").manual_seed(2), device="cuda", dtype=y.dtype)
    dy = dy.to(call(*ours).dtype)  # the same for every variant
    truths = torch.autograd.grad(y, exact, dy.double())
    found = torch.autograd.grad(call(*ours), ours, dy)
    matters = [t.square().mean().sqrt() > 1e-6 * dy.double().norm() / t.numel() for t in truths]
    errors = [
        float((g.double() - t).square().mean().sqrt() / t.square().mean().sqrt())
        for g, t, does in zip(found, truths, matters)
        if does
    ]
    return max(errors)


def saved_mib(call: Callable[..., Tensor], tensors: Sequence[Tensor]) -> float:
    """What a forward pass saves for the backward pass, besides the tensors that it was given."""
    given = {t.untyped_storage().data_ptr() for t in tensors}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = call(*tensors)
    del result
    return sum(kept.values()) / 2**20


def is_recorded(bench: Bench, trains: bool, known: Sequence[records.Record]) -> bool:
    about = (str(bench.chain), "×".join(map(str, bench.shape)), str(bench.dtype).removeprefix("torch."))
    about += (bench.layout, bench.precision, mode_of(bench) if trains else "forward")
    found = [row for row in known if (row.chain, row.shape, row.dtype, row.layout, row.precision, row.mode) == about]
    code = records.kernel_hash(TRAINING_SOURCES if trains else GPU_SOURCES)
    return are_recorded(["eager", "torch.compile", "postlude"], found, code)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--train", action="store_true", help="a training step instead of a forward pass")
    parser.add_argument("--level2", action="store_true", help="chains of KernelBench without a norm instead")
    parser.add_argument("--only", help="numbers of the benches to run, such as 0,3,4")
    parser.add_argument("--missing", action="store_true", help="only what --csv lacks, or has from other code")
    options = parser.parse_args()
    benches = TRAINED if options.train else WITHOUT_NORM if options.level2 else BENCHES
    if options.only:
        benches = [benches[int(number)] for number in options.only.split(",")]
    if options.missing and options.csv and options.csv.exists():
        known = records.read(options.csv)
        benches = [bench for bench in benches if not is_recorded(bench, options.train, known)]
    failed = 0
    for bench in benches:
        try:
            with torch.set_grad_enabled(options.train), pytorch_switches(bench.precision, torch.device("cuda")):
                rows = (measure_training if options.train else measure)(bench, options.rounds)
        except Exception:  # whatever one raises, others are left
            traceback.print_exc()
            failed += 1
            continue
        cells = " ".join(f"{row.variant} {row.ms_p50:.3f} (err {row.error_rms or 0:.1e})" for row in rows)
        first = rows[0]
        what = f"{first.chain[:40]:40} {first.shape:16} {first.dtype:8} {first.precision:4} {first.layout:13}"
        print(what, cells, flush=True)
        if options.csv:
            records.update(options.csv, rows)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

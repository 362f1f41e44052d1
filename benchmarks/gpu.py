"""Times chains on a GPU: eager, torch.compile and fused in turns, at the same precision, verified before timed.

python benchmarks/gpu.py --csv benchmarks/results/h200.csv
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from table import GPU_SOURCES

from cases import CHAIN_23, CHAIN_61, Builder, conv
from postlude import reference
from postlude.chain import Chain
from postlude.check import clock, records
from postlude.check.points import tensors_for
from postlude.run.site import Site


@dataclass(frozen=True)
class Bench:
    chain: Chain
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str


def block(cin: int, cout: int) -> Chain:
    return Builder(3, conv(3, (cin, cout), padding=1)).norm(None).op("leaky_relu", slope=0.01).chain()


NORM = Builder(3).norm(None).op("leaky_relu", slope=0.01).chain()
GROUP = Builder(3).norm(8).op("relu").chain()
BLOCKS = [(2, 32, 32, 128), (1, 32, 32, 160), (2, 32, 64, 64), (2, 64, 64, 64), (2, 128, 128, 32)]
BENCHES = [
    *(
        Bench(block(cin, cout), (n, cin, s, s, s), torch.float16, layout)
        for n, cin, cout, s in BLOCKS
        for layout in ("contiguous", "channels_last")
    ),
    *(
        Bench(chain, shape, torch.float16, layout)
        for chain in (NORM, GROUP)
        for shape in ((2, 32, 128, 128, 128), (1, 32, 160, 160, 160))
        for layout in ("contiguous", "channels_last")
    ),
    Bench(CHAIN_61, (16, 64, 32, 32, 32), torch.float32, "contiguous"),
    Bench(CHAIN_61, (16, 64, 32, 32, 32), torch.bfloat16, "contiguous"),
    Bench(CHAIN_23, (128, 3, 24, 32, 32), torch.float32, "contiguous"),
    Bench(CHAIN_23, (128, 3, 24, 32, 32), torch.bfloat16, "contiguous"),
]


def measure(bench: Bench, rounds: int) -> list[records.Record]:
    sets = [tensors_for(bench.chain, bench.shape, bench.dtype, "cuda", s, "normal", bench.layout) for s in range(2)]
    torch._dynamo.reset()
    calls: dict[str, Callable[..., Tensor]] = {
        "eager": lambda *tensors: reference.evaluate(bench.chain, tensors),
        "torch.compile": torch.compile(lambda *tensors: reference.evaluate(bench.chain, tensors)),
        "postlude": Site("bench", bench.chain),
    }
    if bench.chain.producer is None:
        calls["copy twice"] = lambda x, *_: x.clone().clone()
    variants = {name: clock.rotating(call, sets) for name, call in calls.items()}
    timings = clock.time_interleaved(variants, rounds=rounds, min_window_s=0.03)
    small = [t[:1] if role in ("input", "full") else t for t, role in zip(sets[0], bench.chain.roles)]
    truth = reference.evaluate(bench.chain, small, dtype=torch.float64)
    rows = []
    for name, timing in timings.items():
        gain = clock.ratio(timings["eager"], timing)
        error = None if name == "copy twice" else (calls[name](*small).double() - truth) / truth.abs().mean()
        rows.append(
            records.Record(
                str(bench.chain),
                "×".join(map(str, bench.shape)),
                str(bench.dtype).removeprefix("torch."),
                bench.layout,
                "auto",
                "forward",
                name,
                *(1e3 * timing.quantile(p) for p in (0.2, 0.5, 0.8)),
                1e3 * timing.low,
                1e3 * timing.high,
                *(gain.median, gain.low, gain.high),
                None if error is None else float(error.square().mean().sqrt()),
                None if error is None else float(error.abs().max()),
                kernel_hash=records.kernel_hash(GPU_SOURCES),
                **records.environment("cuda"),  # type: ignore[arg-type]
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    for bench in BENCHES:
        with torch.no_grad():
            rows = measure(bench, options.rounds)
        cells = " ".join(f"{row.variant} {row.ms_p50:.3f} (err {row.error_rms or 0:.1e})" for row in rows)
        print(f"{rows[0].chain[:60]:60} {rows[0].shape:16} {rows[0].dtype:8} {rows[0].layout:13} {cells}", flush=True)
        if options.csv:
            records.update(options.csv, rows)


if __name__ == "__main__":
    main()

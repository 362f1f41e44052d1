"""Times whole networks of other packages on a GPU: a training step and inference, by eager PyTorch, by torch.compile in
both layouts and by Postlude, in turns, with peak memory and errors against strict fp32.

python benchmarks/networks.py --csv benchmarks/results/h200-networks.csv
python benchmarks/networks.py --only nnU-Net --variants eager postlude --profile
python benchmarks/networks.py --only nnU-Net --first-step
python benchmarks/networks.py --jobs 6 --csv benchmarks/results/h200-networks.csv
python benchmarks/networks.py --missing --csv benchmarks/results/h200-networks.csv

With `--jobs` every network and mode has a process of its own. They compile side by side; when all are ready, one after
the other is timed, alone on the card. `--missing` leaves out what the file has from today's code, so that several runs
can record a table. A variant that fails, or a process that ends or hangs, is named and leaves the others their rows;
the exit code is then 1.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "networks"))

from gpu import peak_mib
from network_models import NETWORKS, Network
from rows import NETWORK_SOURCES, are_recorded
from standins import stand_ins

import postlude
from postlude.check import clock, records
from postlude.errors import first_line

_GRAPHS = "reduce-overhead"  # torch.compile's mode with CUDA graphs
_LEAN = "postlude memory=lean"
VARIANTS = (
    *("eager", "compile", "compile channels-last", "postlude"),
    *("postlude rest=eager", _LEAN, f"compile {_GRAPHS}", f"postlude {_GRAPHS}"),
)


class Contestant:
    """One way to run a network, on a copy of it."""

    def __init__(
        self, variant: str, network: Network, model: nn.Module, x: Tensor, trains: bool, verify: bool = False
    ) -> None:
        self.network, self.trains = network, trains
        self.model = copy.deepcopy(model).train(trains)
        self.x, self.sites = x, ""
        if "channels-last" in variant:
            layout = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
            self.model, self.x = self.model.to(memory_format=layout), x.contiguous(memory_format=layout)
        self.call: Callable[..., Any] = self.model
        self.parameters = list(self.model.parameters())
        self.has_graphs = variant.endswith(_GRAPHS)
        settings: dict[str, Any] = {"mode": _GRAPHS} if self.has_graphs else {}
        if variant.startswith("compile"):
            self.call = torch.compile(self.model, **settings)
        elif variant.startswith("postlude"):
            settings |= {"memory": "lean"} if variant == _LEAN else {}
            settings["rest"] = "eager" if variant.endswith("eager") else "auto"
            with self.mode():
                found = postlude.optimize(self.model, self.x, verify=verify, **settings)
            fused = sum(site.is_fused for site in found.sites)
            self.sites = f"{fused} of {len(found.sites) + len(found.declined)}"
            self.result = found

    @contextmanager
    def mode(self) -> Iterator[None]:
        dtype = self.network.dtype
        with torch.set_grad_enabled(self.trains), torch.autocast("cuda", dtype or torch.float16, dtype is not None):
            yield

    def step(self) -> Any:
        if self.trains:
            for parameter in self.parameters:  # as an optimizer does, which has them listed
                parameter.grad = None
        if self.has_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with self.mode():
            found = self.call(self.x)
            outputs = found if isinstance(found, (list, tuple)) else [found]
            if not self.trains:
                return outputs
            loss = 2**16 * sum(output.float().square().mean() for output in outputs)  # as a GradScaler begins
        loss.backward()  # type: ignore[union-attr]
        return [output.detach() for output in outputs]

    def error(self, truth: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[float, float]:
        """The error of the outputs, and of the worst parameter's gradient, relative to the size of the truth."""
        outputs = self.step()
        worst = max((relative(o, t) for o, t in zip(outputs, truth)), default=0.0)
        found = [p.grad for p in self.model.parameters() if p.grad is not None]
        largest = max((float(g.norm()) for g in gradients), default=0.0)
        pairs = [(f, g) for f, g in zip(found, gradients) if float(g.norm()) > 1e-4 * largest]
        return worst, max((relative(f, g) for f, g in pairs), default=0.0)


def relative(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def truth_of(network: Network, model: nn.Module, x: Tensor, trains: bool) -> tuple[list[Tensor], list[Tensor]]:
    """In strict fp32."""
    exact = Contestant("eager", Network(network.build, network.shape, None), model, x, trains)
    switches = {torch.backends.cudnn: ("allow_tf32", "benchmark"), torch.backends.cuda.matmul: ("allow_tf32",)}
    for place, names in switches.items():
        for switch in names:
            setattr(place, switch, False)
    outputs = exact.step()
    for place, names in switches.items():
        for switch in names:
            setattr(place, switch, True)
    return list(outputs), [p.grad for p in exact.model.parameters() if p.grad is not None]


def compiled(name: str, variants: Sequence[str], trains: bool) -> tuple[dict[str, Contestant], Any]:
    """Every variant after three steps, and the truth; a variant that fails is named and left out."""
    network = NETWORKS[name]
    torch.manual_seed(0)
    model, x = network.build().cuda(), torch.randn(network.shape, device="cuda")
    truth = truth_of(network, model, x, trains)
    contestants = {}
    for variant in variants:
        start, mode = time.perf_counter(), "train" if trains else "inference"
        try:
            made = Contestant(variant, network, model, x, trains)
            for _ in range(3):
                made.step()
            torch.cuda.synchronize()
        except Exception as error:  # anything between Dynamo and the card
            print(f"{name} {mode} {variant}: failed: {first_line(error)[:300]}", flush=True)
        else:
            contestants[variant] = made
            took = time.perf_counter() - start
            print(f"{name} {mode} {variant}: ready in {took:.1f} s", made.sites, flush=True)
        made = None  # type: ignore[assignment]
        gc.collect()  # of what failed
    return contestants, truth


_WITHOUT_SPEEDUP = 5  # of the numbers of a time


def variants_of(mode: str, asked: Sequence[str]) -> list[str]:
    """Those of a mode: between passes that are not there nothing is saved."""
    return [variant for variant in asked if variant != _LEAN or mode == "train"]


def mode_of(trains: bool) -> str:
    return "training step" if trains else "inference"


def is_recorded(name: str, mode: str, variants: Sequence[str], known: Iterable[records.Record]) -> bool:
    """Whether every variant has a time, ours from today's code."""
    found = [row for row in known if (row.chain, row.mode) == (name, mode)]
    return are_recorded(variants, found, records.kernel_hash(NETWORK_SOURCES))


def record_of(name: str, mode: str, variant: str, *times: float, **more: float | None) -> records.Record:
    network = NETWORKS[name]
    return records.Record(
        *(name, "×".join(map(str, network.shape)), network.precision, "", "auto", mode, variant),
        *times,
        kernel_hash=records.kernel_hash(NETWORK_SOURCES),
        **more,  # type: ignore[arg-type]
        **records.environment("cuda"),  # type: ignore[arg-type]
    )


def measure(
    name: str, contestants: dict[str, Contestant], truth: Any, trains: bool, rounds: int, profile: bool
) -> list[records.Record]:
    # One copy of Dynamo's state serves all: guards tell the models apart.
    steps = {variant: clock.rotating(lambda made=made: made.step(), [()]) for variant, made in contestants.items()}
    timings = clock.time_interleaved(steps, rounds=rounds, min_window_s=0.1)
    rows = []
    for variant, made in contestants.items():
        outputs, worst = made.error(*truth)
        times = records.times_of(timings[variant], timings.get("eager", timings[variant]))
        rows.append(
            record_of(
                *(name, mode_of(trains), variant),
                *(times if "eager" in timings else times[:_WITHOUT_SPEEDUP]),
                error_rms=outputs,
                error_worst=worst if trains else None,
                peak_mib=peak_of(made),
                launches=int(made.sites.split()[0]) if made.sites else None,
            )
        )
        words = f"{rows[-1].ms_p50:8.2f} ms  {rows[-1].peak_mib:7.0f} MiB"
        print(f"  {variant:24} {words}  errors {outputs:.1e} {worst:.1e}", flush=True)
        if profile:
            print(profile_of(made), flush=True)
    return rows


def peak_of(made: Contestant) -> float:
    made.model.zero_grad(set_to_none=True)
    return peak_mib(made.step, ())


def profile_of(made: Contestant, rows: int = 40) -> str:
    """Time on the GPU by kernel, of one step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        for _ in range(3):
            made.step()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = {}
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.device_time_total > 0:
            spent.setdefault(event.name, []).append(event.device_time_total / 3e3)
    total = sum(map(sum, spent.values()))
    ranked = sorted(spent.items(), key=lambda item: -sum(item[1]))[:rows]
    lines = [f"    {sum(ms):8.3f} ms {len(ms) // 3:5} ×  {kernel[:110]}" for kernel, ms in ranked]
    return "\n".join([f"    busy {total:.2f} ms", *lines])


FIRST_STEP = "first step"
_FIRST_WITHIN_S = 240.0
_READY = "waiting to be timed"
_TIMED_WITHIN_S = 120.0


def run_one(name: str, mode: str, options: argparse.Namespace) -> bool:
    """Whether every variant has its row."""
    trains = mode == "train"
    variants = variants_of(mode, options.variants)
    contestants, truth = compiled(name, variants, trains)
    if options.waits:
        torch.cuda.empty_cache()
        print(_READY, flush=True)
        if not sys.stdin.readline():  # who asked for it is gone
            return False
        print(f"{name}, {mode}", flush=True)
    if contestants:
        rows = measure(name, contestants, truth, trains, options.rounds, options.profile)
        if options.csv:
            records.update(options.csv, rows)
    return len(contestants) == len(variants)


Item = tuple[str, str]  # a network and a mode


def run_side_by_side(wanted: Sequence[Item], options: argparse.Namespace) -> int:
    """Compiles in `options.jobs` processes at a time and lets them wait; then times one after the other. What is not
    ready in `options.ready_within` seconds is ended and named, and so is what takes longer to be timed."""
    started: dict[Item, subprocess.Popen[str]] = {}
    lock, is_over = threading.Lock(), threading.Event()

    def start(item: Item) -> bool:
        command = [sys.executable, __file__, "--waits", "--only", item[0], "--modes", item[1]]
        more = [variant for variant in VARIANTS if variant.endswith(_GRAPHS)] if item[0] in options.graphs else []
        command += ["--variants", *dict.fromkeys((*options.variants, *more)), "--rounds", str(options.rounds)]
        command += ["--profile"] * options.profile + (["--csv", str(options.csv)] if options.csv else [])
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with lock:
            if is_over.is_set():
                return False
            child = started[item] = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
        return _told(child, until=_READY)

    with ThreadPoolExecutor(options.jobs) as pool:
        items = {pool.submit(start, item): item for item in wanted}
        done, late = wait(items, options.ready_within)
        with lock:
            is_over.set()
        for one in late:
            if not one.cancel() and items[one] in started:  # it runs
                started[items[one]].kill()
    for one in (one for one in items if one in late):
        print(f"{', '.join(items[one])}: not ready after {options.ready_within:g} s, not timed", flush=True)
        if items[one] in started:
            started[items[one]].communicate()
    codes = [int(bool(late))]
    for one, item in items.items():  # in their order
        if one not in done:
            continue
        child = started[item]
        with child:  # which closes its pipes and waits
            if one.result():
                _time(child)
        if child.returncode:
            print(f"{', '.join(item)}: its process ended with {child.returncode}", flush=True)
        codes.append(abs(child.returncode))
    return int(any(codes))


def _time(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    watch = threading.Timer(_TIMED_WITHIN_S, child.kill)
    watch.start()
    with suppress(BrokenPipeError):
        child.stdin.write("go\n")
        child.stdin.close()
    _told(child)
    watch.cancel()


def _told(child: subprocess.Popen[str], until: str | None = None) -> bool:
    """Prints what it prints, up to a line."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.strip() == until:
            return True
        print(line, end="", flush=True)
    return False


def first_step(name: str, variant: str) -> float:
    """Seconds from the model to the end of its first training step, in a process with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        names = ("TRITON_CACHE_DIR", "POSTLUDE_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        caches = {key: f"{folder}/{key.lower()}" for key in names}
        command = [sys.executable, __file__, "--child", name, variant]
        limit = {"timeout": _FIRST_WITHIN_S, "check": True}
        done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, **limit)  # type: ignore[call-overload]
    return float(done.stdout.strip().splitlines()[-1])


def record_first_step(name: str, variant: str, csv: Path | None) -> bool:
    """Whether there was one."""
    try:
        seconds = first_step(name, variant)
    except subprocess.SubprocessError as error:
        said = error.stderr or "" if isinstance(error, subprocess.CalledProcessError) else ""
        print(f"{name} {variant}: no first step: {first_line(error)}\n{said[-2000:]}", flush=True)
        return False
    print(f"{name} {variant}: first step after {seconds:.1f} s", flush=True)
    if csv is not None:
        records.update(csv, [record_of(name, FIRST_STEP, variant, ms_p50=1e3 * seconds)])
    return True


def child(name: str, variant: str) -> None:
    """One process of `first_step`. CUDA and its libraries are loaded before the clock starts. The network has not run:
    with cudnn.benchmark, cuDNN searches algorithms at the first call for each layout, and an eager step would spare
    that search to whoever computes in eager's layout (11 s in nnU-Net)."""
    network = NETWORKS[name]
    model, x = network.build().cuda().train(), torch.randn(network.shape, device="cuda")
    nn.Conv2d(8, 8, 3).cuda()(torch.randn(1, 8, 16, 16, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    start = time.perf_counter()
    Contestant(variant, network, model, x, True, verify=True).step()
    torch.cuda.synchronize()
    print(time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=VARIANTS[:4])
    parser.add_argument("--modes", nargs="*", choices=("train", "inference"), default=("train", "inference"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--first-step", action="store_true")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--missing", action="store_true", help="only what --csv lacks, or has from other code")
    parser.add_argument("--jobs", type=int, default=0, help="compile in so many processes before timing")
    parser.add_argument("--ready-within", type=float, metavar="SECONDS", help="with --jobs: time what is ready by then")
    parser.add_argument("--graphs", nargs="*", choices=NETWORKS, default=(), help="with --jobs: CUDA graphs as well")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--waits", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.missing and options.csv is None:
        parser.error("--missing needs --csv, the file to look in")
    torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    torch._dynamo.config.recompile_limit = 4 * len(VARIANTS)  # all variants of a network share its code
    modes = [(name, mode) for name in options.only for mode in options.modes]
    known = records.read(options.csv) if options.missing and options.csv.exists() else []
    wanted = [
        (name, mode)
        for name, mode in modes
        if mode == "inference" or NETWORKS[name].trains
        if not is_recorded(name, mode_of(mode == "train"), variants_of(mode, options.variants), known)
    ]
    if options.first_step:
        asked = [(name, variant) for name in options.only if NETWORKS[name].trains for variant in options.variants]
        left = [one for one in asked if not is_recorded(one[0], FIRST_STEP, one[1:], known)]
        return int(sum(not record_first_step(*one, options.csv) for one in left) > 0)
    if options.jobs:
        return run_side_by_side(wanted, options)
    with stand_ins():
        if options.child:
            child(*options.child)
            return 0
        return int(sum(not _ran(*one, options) for one in wanted) > 0)


def _ran(name: str, mode: str, options: argparse.Namespace) -> bool:
    try:
        return run_one(name, mode, options)
    except Exception:  # whatever one network raises, others are left
        traceback.print_exc()
        return False


if __name__ == "__main__":
    sys.exit(main())

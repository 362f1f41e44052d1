"""Times the first call of a chain on a GPU: with nothing compiled yet, and in a later process that finds it on disk.

python benchmarks/start.py --csv benchmarks/results/h200.csv
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
CHAINS = ("61", "23", "block")


def child(name: str, precision: str) -> None:
    """Prints the seconds that the first call took; the CUDA context and the tensors were there before it."""
    import torch

    from cases import CHAIN_23, CHAIN_61, Builder, conv
    from postlude.check.points import tensors_for
    from postlude.plan import Settings
    from postlude.run.site import Site

    block = Builder(3, conv(3, (64, 64), stride=2)).norm(None).op("leaky_relu", slope=0.01).chain()
    chains = {"61": (CHAIN_61, 64), "23": (CHAIN_23, 3), "block": (block, 64)}
    chain, channels = chains[name]
    tensors = tensors_for(chain, (16, channels, 24, 32, 32), torch.float32, "cuda")
    site = Site("start", chain, Settings(precision))
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.no_grad():
        site(*tensors)
    torch.cuda.synchronize()
    print(time.perf_counter() - start, chain, sep="\t")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--child", nargs=2)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    from rows import GPU_SOURCES

    from postlude.check import records

    for name in CHAINS:
        with tempfile.TemporaryDirectory() as folder:
            caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "POSTLUDE_CACHE_DIR": f"{folder}/postlude"}
            for mode in ("first call", "first call of a later process"):
                command = [sys.executable, __file__, "--child", name, "fp32"]
                done = subprocess.run(
                    command, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True, check=True
                )
                seconds, chain = done.stdout.strip().splitlines()[-1].split("\t")
                print(f"{chain}: {mode} {float(seconds):.2f} s", flush=True)
                ms = 1e3 * float(seconds)
                row = records.Record(
                    *(chain, f"16×…×24×32×32 ({name})", "float32", "contiguous", "fp32", mode, "postlude"),
                    ms_p50=ms,
                    ms_low=ms,
                    kernel_hash=records.kernel_hash(GPU_SOURCES),
                    **records.environment("cuda"),  # type: ignore[arg-type]
                )
                if options.csv:
                    records.update(options.csv, [row])


if __name__ == "__main__":
    main()

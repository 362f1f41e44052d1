"""`postlude explain --repro SITE`: one chain as a small script, to be sent with a bug report."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from postlude import chain as chain_words
from postlude.cli.output import check_writable
from postlude.errors import PostludeError
from postlude.files import write_whole
from postlude.optimized import SiteReport

_SCRIPT = '''\
"""{chain}

Found as {name} by `postlude explain`. Run this file, and send what it prints together with the output of
`postlude doctor`.
"""

import torch

from postlude import functional
from postlude.chain import {words}
from postlude.check.points import tensors_like
from postlude.reference import evaluate

CHAIN = {value!r}
# Shape, dtype and layout of each tensor; the values are drawn.
TENSORS = {tensors!r}


def empty(shape, dtype, layout):
    made = torch.empty(shape, dtype=getattr(torch, dtype), device={device!r})
    formats = {{4: torch.channels_last, 5: torch.channels_last_3d}}
    return made.contiguous(memory_format=formats[len(shape)]) if layout == "channels_last" else made


for seed in range(5):
    tensors = tensors_like(CHAIN, [empty(*one) for one in TENSORS], seed)
    with torch.no_grad():
        fused = functional.run(CHAIN, *tensors, precision={precision!r})
        eager, truth = evaluate(CHAIN, tensors), evaluate(CHAIN, tensors, dtype=torch.float64)
    spread = truth.std()
    ours, theirs = (float((one.double() - truth).square().mean().sqrt() / spread) for one in (fused, eager))
    print(f"seed {{seed}}: error {{ours:.2e}} of the spread, PyTorch's own {{theirs:.2e}}")
'''


def write_repro(sites: Sequence[SiteReport], wanted: str) -> Path:
    """Writes the script for the site of that name into the current folder."""
    site = next((site for site in sites if site.name == wanted), None)
    if site is None:
        names = ", ".join(site.name for site in sites) or "none"
        raise PostludeError(f"--repro {wanted}: there is no such chain; explain shows: {names}.")
    name = re.sub(r"\W+", "_", site.name).strip("_") or "site"
    path = Path(f"repro_{name}.py")
    check_writable(path)
    write_whole(path, script_for(site))
    return path


def script_for(site: SiteReport) -> str:
    tensors = [(one.shape, one.dtype, one.layout) for one in site.problem.tensors]
    # The chain's repr is valid Python; only the names in it are imported.
    words = sorted({word for word in re.findall(r"([A-Z]\w+)\(", repr(site.chain)) if hasattr(chain_words, word)})
    return _SCRIPT.format(
        words=", ".join(words),
        chain=site.chain,
        name=site.name,
        value=site.chain,
        tensors=tensors,
        device=site.problem.device,
        precision=site.problem.precision,
    )

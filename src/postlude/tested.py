"""The versions of PyTorch and Triton that Postlude was tested with."""

from __future__ import annotations

import re

from postlude.hardware import versions

# First and last, both included.
TESTED = {"torch": ((2, 11), (2, 15)), "triton": ((3, 6), (3, 6))}


def untested_versions() -> list[str]:
    """A sentence for each package whose version is outside the tested range. Triton runs only on a GPU."""
    found = versions()
    sentences = []
    for package, (first, last) in TESTED.items():
        if package == "triton" and "gpu" not in found:
            continue
        release = tuple(int(part) for part in re.findall(r"\d+", found[package])[:2])
        if len(release) == 2 and not first <= release <= last:
            sentences.append(f"Postlude was tested with {tested_span(package)}, not with {found[package]}.")
    return sentences


def tested_span(package: str) -> str:
    """The package with its tested versions, such as "torch 2.11 to 2.15"."""
    ends = dict.fromkeys(".".join(map(str, end)) for end in TESTED[package])
    return f"{package} {' to '.join(ends)}"

"""Whole models on the CPU by the plans of a GPU: the kernels run in Triton's interpreter."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from machines import SMALL_H200
from postlude.chain import Chain
from postlude.hardware import Machine
from postlude.plan import Plan, Problem, Refusal, lower
from postlude.run import execute


@contextmanager
def planned_for_a_gpu(even_if_slower: bool = True) -> Iterator[None]:
    """What is planned inside is planned for an H200, wherever its tensors are."""

    def pretend(chain: Chain, problem: Problem, machine: Machine) -> Plan | Refusal:
        return lower(chain, dataclasses.replace(problem, device="cuda"), SMALL_H200, even_if_slower=even_if_slower)

    honest, execute.lower = execute.lower, pretend
    execute.prepared.cache_clear()
    try:
        yield
    finally:
        execute.lower = honest
        execute.prepared.cache_clear()

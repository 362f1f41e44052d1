"""Machines with cards that are not here, as values for `lower`."""

from __future__ import annotations

import dataclasses

from kernels.offline import CARDS
from postlude import cards
from postlude.hardware import Machine, machine_on

H200 = machine_on(cards.H200)
A100 = machine_on(cards.A100)
# For Triton's interpreter: so few multiprocessors that split sums stay short, and no CUDA C++.
SMALL_H200 = machine_on(dataclasses.replace(cards.H200, multiprocessors=4), has_nvrtc=False)
_BY_NUMBER = {80: cards.A100, 89: cards.L40S, 90: cards.H200, 100: cards.B200, 120: cards.RTX_5090}


def card(number: int) -> Machine:
    """One of each architecture that the kernels are compiled for; sm_86 has no card that we know by name."""
    known = _BY_NUMBER.get(number)
    if known is None:
        known = cards.estimated("RTX A6000", f"sm_{number}", (84, CARDS[number], 6 << 20), 1.8e9, 768e9)
    return machine_on(known)


def with_shared_bytes(machine: Machine, count: int) -> Machine:
    return dataclasses.replace(machine, card=dataclasses.replace(machine.card, shared_bytes=count))

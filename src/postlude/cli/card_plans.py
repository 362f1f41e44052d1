"""`postlude explain FILE.py --card NAME`: what would run on a card that need not be here. Nothing is run."""

from __future__ import annotations

from pathlib import Path

import torch

from postlude import cards, hardware, problem_file
from postlude.cards import Card
from postlude.cli.chains import NOTHING, explain_site
from postlude.cli.frame import DONE, Answer
from postlude.cli.output import say, show_table, working
from postlude.cli.session import site_data
from postlude.errors import PostludeError
from postlude.export.export_model import HOPPER, plans
from postlude.optimized import SiteReport
from postlude.plan import Problem


def explain_for_card(path: Path, name: str, precision: str, convolution: str, train: bool) -> Answer:
    """The plans of the chains that an exported file would have, and refusals. Tensors have shapes but no memory."""
    card = _card(name)
    tf32, products = (_allows_tf32(precision, is_linear) for is_linear in (False, True))
    with working(f"Planning {path.name} for {card.name}"), torch.device("meta"):
        problem = problem_file.load(path)
        model, inputs = problem.build("meta"), problem.inputs("meta")
        blank = Problem((), "cuda", precision, train, tf32, multiplies_tf32=products)
        machine = hardware.machine_on(card, keeping_layout=HOPPER.keeping_layout)
        found, left = plans(model, inputs, blank, machine, convolution)
    say(f"{path.name} as it is planned for {card}; nothing was run.\n")
    sites = [SiteReport(*one, None) for one in found]
    for site in sites:
        explain_site(site, card)
        say()
    if left:
        say("Left to PyTorch:")
        show_table(["what", "why"], [[what, why] for what, why in left.items()])
    if not sites and not left:
        say(NOTHING)
    data = {"file": str(path), "card": card.name, "sites": list(map(site_data, sites)), "left": dict(left)}
    return Answer(DONE, data)


def _allows_tf32(precision: str, is_linear: bool) -> bool:
    """What PyTorch's switches would say on that card with this precision asked for."""
    return precision == "tf32" or (precision == "auto" and hardware.default_fp32_precision(is_linear) == "tf32")


def _card(name: str) -> Card:
    found = next((card for card in cards.KNOWN if _bare(card.name) == _bare(name)), None)
    if found is None:
        raise PostludeError(f"--card {name} is unknown; use {', '.join(card.name for card in cards.KNOWN)}.")
    return found


def _bare(name: str) -> str:
    """A name as people write it: with or without spaces and hyphens, in any case."""
    return name.lower().replace(" ", "").replace("-", "")

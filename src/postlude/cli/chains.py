"""`postlude optimize` and `postlude explain`: the chains of a model and how they run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from postlude import hardware
from postlude.cards import Card
from postlude.check.verdict import Verdict
from postlude.cli.frame import COULD_NOT_RUN, DONE, NO, Answer, Settings
from postlude.cli.output import say, show_table
from postlude.cli.report import check_report
from postlude.cli.repro import write_repro
from postlude.cli.session import fuse, machine_data, open_problem, result_data
from postlude.errors import PostludeError
from postlude.optimized import Optimized, SiteReport
from postlude.plan import Plan
from postlude.plan.problem import body_dtype, fp32_mode
from postlude.plan.program import launches, most_memory
from postlude.plan.rules import rule_lines
from postlude.report import words

NOTHING = "There is no convolution and no norm in this model."


def optimize(settings: Settings, path: Path, report: Path | None = None) -> Answer:
    check_report(report)
    opened = open_problem(settings, path, takes_several=True)
    result = fuse(settings, opened.model, opened.inputs)
    _raise_if_not_captured(result, path)
    if result.sites:
        rows = [[site.name, str(site.chain), _how(site), _checked(site)] for site in result.sites]
        show_table(["where", "chain", "what will run", "against float64"], rows)
    _show_declined(result)
    code, sentence = _conclusion(result)
    say(sentence, "bold")
    if report is not None:
        result.report(report, title=path.name)
    return Answer(code, {"file": str(path), **machine_data(settings), **result_data(result)})


def explain(settings: Settings, path: Path, repro: str | None = None, train: bool = False) -> Answer:
    opened = open_problem(settings, path, takes_several=True)
    result = fuse(settings, opened.model, opened.inputs, train=train)
    _raise_if_not_captured(result, path)
    _show_cards(result.sites)
    for site in result.sites:
        explain_site(site)
        say()
    _show_layout(result)
    _show_declined(result)
    if not result.sites and not result.declined:
        say(NOTHING)
    if repro is not None:
        say(f"Wrote {write_repro(result.sites, repro)}.")
    return Answer(DONE, {"file": str(path), **machine_data(settings), **result_data(result)})


def _show_cards(sites: Sequence[SiteReport]) -> None:
    for place in dict.fromkeys(site.problem.place for site in sites if site.problem.device == "cuda"):
        say(f"{place} is planned for as {hardware.machine_for(place).card}.\n")


def explain_site(site: SiteReport, card: Card | None = None) -> None:
    """Shows the passes of one chain, their memory traffic, and the reasons for the plan; for a card that need not be
    here, or for the device on which the chain ran."""
    say(f"{site.name}: {site.chain}", "bold")
    x = site.problem.x
    shape, layout = "×".join(map(str, x.shape)), x.layout.replace("_", " ")
    say(f"  input {shape}, {x.dtype}, {layout}, on {site.problem.device}")
    has_tf32 = hardware.has_tf32(site.problem.place) if card is None else card.is_served
    if precision := _precision(site, has_tf32):
        say(f"  precision: {precision}")
    plan = site.outcome
    if not isinstance(plan, Plan):
        say("  runs through PyTorch's own operators")
    else:
        for line in plan.describe():
            say(f"  {line}")
        say(f"  {_launches(plan) if plan.has_program else _slabs(plan)}")
        if plan.has_program and plan.launches > 1:
            say(f"  in order: {', '.join(call.kernel for call in launches(plan.program.forward))}")
        for line in plan.describe_training():
            say(f"  {line}")
        moved, before = words.size(plan.moved_bytes), words.size(plan.eager_bytes)
        say(f"  predicted memory traffic: {moved} (eager PyTorch: {before})")
        if plan.has_program:
            say(f"  {_memory(plan)}")
        for line in plan.tiles:
            say(f"  tiles of the {line}")
        for line in rule_lines(plan):
            say(f"  {line}")
    for reason in plan.reasons:
        say(f"  why: {reason}")
    if site.verdict is not None and _matters(site):
        say(f"  checked: {site.verdict}")


def _precision(site: SiteReport, has_tf32: bool) -> str:
    """The precision of the products of an fp32 chain, and whether "auto" chose it. Other dtypes have no choice."""
    chain, problem = site.chain, site.problem
    if chain.producer is None or body_dtype(chain, problem) != "float32":
        return ""
    if problem.precision != "auto":
        return problem.precision
    if not has_tf32:
        return "fp32 (auto)"
    allows_tf32 = problem.multiplies_tf32 if chain.is_linear else problem.allows_tf32
    if getattr(site.outcome, "own", None) is None and allows_tf32:  # cuDNN may still choose fp32
        return "tf32 where PyTorch chooses it (auto)"
    return f"{fp32_mode(chain, problem)} (auto)"


def _launches(plan: Plan) -> str:
    count = f"{plan.launches} launch{'es' * (plan.launches != 1)} of Postlude's kernels"
    if plan.own is None and plan.chain.producer is not None:
        count += " after PyTorch's convolution"
    if plan.slab_bytes == 0:
        return f"{count}; nothing of the convolution's size is stored"
    return f"{count}; a value of {words.size(plan.slab_bytes)} in memory"


def _memory(plan: Plan) -> str:
    program = plan.program
    forward = most_memory(program.forward, (program.result, *program.kept))
    text = f"predicted memory: at most {words.size(forward)} beside the inputs"
    if not plan.trains:
        return text
    backward = most_memory(program.backward, program.gradients)
    return f"{text}; {words.size(backward)} in the backward pass beside what is kept"


def _slabs(plan: Plan) -> str:
    samples = f"{plan.slab} sample{'s' * (plan.slab != 1)}"
    if plan.slabs == 1:
        return f"all {samples} at once, {words.size(plan.slab_bytes)}"
    return f"{plan.slabs} slabs of {samples}, {words.size(plan.slab_bytes)} each, which stays in cache"


def _raise_if_not_captured(result: Optimized, path: Path) -> None:
    if result.failure is not None and not result.sites:
        raise PostludeError(f"{path}: the model cannot be captured and runs as it was ({result.failure.rstrip('.')}).")


def _show_layout(result: Optimized) -> None:
    """Shows where values change their layout, if the model is channels-last in between."""
    if result.conversions:
        say("Convolutions read channels-last values here; these are all the conversions:", "bold")
        rows = [[c.name, c.layout, "×".join(map(str, c.shape)), words.size(c.bytes)] for c in result.conversions]
        show_table(["where", "becomes", "shape", "size"], rows)
    if result.gathered:
        say(f"Upsampling whose gradient our kernel gathers: {', '.join(result.gathered)}.")


def _show_declined(result: Optimized) -> None:
    if result.declined:
        say("Left to PyTorch:")
        show_table(["where", "what", "why"], [[item.name, item.what, item.reason] for item in result.declined])


def _how(site: SiteReport) -> str:
    plan = site.outcome
    if not isinstance(plan, Plan):
        return f"PyTorch's operators: {'; '.join(plan.reasons)}"
    return "\n".join([*plan.describe(), *(f"why: {reason}" for reason in plan.reasons)])


def _matters(site: SiteReport) -> bool:
    """Whether the verdict matters: not if the fused plan is right but is not what runs."""
    return isinstance(site.outcome, Plan) or (site.verdict is not None and not site.verdict.right)


def _checked(site: SiteReport) -> str:
    return verdict_words(site.verdict) if _matters(site) else "–"


def verdict_words(verdict: Verdict | None) -> str:
    if verdict is None:
        return "not checked"
    if verdict.errors is None or verdict.quantities[0].own is None or verdict.reasons:
        return str(verdict)
    own = verdict.quantities[0].own.rms
    return f"right: error {verdict.errors.rms:.1e} of the spread, PyTorch's own {own:.1e}"


def _conclusion(result: Optimized) -> tuple[int, str]:
    fused = [site for site in result.sites if site.is_fused]
    outcomes = {site.verdict.outcome for site in result.sites if site.verdict is not None}
    if "wrong" in outcomes:
        return NO, "Wrong: a fused chain failed its check, so it runs through PyTorch's operators."
    if "cannot tell" in outcomes:
        return COULD_NOT_RUN, "Cannot tell: this problem cannot distinguish a right result from a wrong one."
    if any(site.verdict is None for site in fused):
        return COULD_NOT_RUN, "Cannot tell: a fused chain was not checked."
    if not fused:
        return NO, "Nothing to fuse: the model runs as it did."
    return (
        DONE,
        f"{len(fused)} of {len(result.sites)} chain{'s' * (len(result.sites) != 1)} fused, and right.",
    )

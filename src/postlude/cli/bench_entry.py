"""Who takes part in `postlude bench`: PyTorch's ways, Postlude and the candidate, all with the same parameters."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import ExitStack

import torch

from postlude.check.isolation import Candidate, CandidateFailed
from postlude.check.modes import has_no_convolution, resolve
from postlude.check.nested import tensors_in
from postlude.check.points import random_state
from postlude.check.verdict import combine
from postlude.cli.bench_state import Bench, Options
from postlude.cli.chains import verdict_words
from postlude.cli.frame import Settings
from postlude.cli.judge import judge_file, started, usual_rules
from postlude.cli.output import working
from postlude.cli.session import fuse, open_problem
from postlude.cli.variants import (
    AUTOTUNED,
    BENCHMARKED,
    FORWARD,
    STEP,
    WITH_GRAPH,
    Baselines,
    Runner,
    compiled_ways,
    first_calls,
    input_sets,
    pytorch_ways,
    with_state,
)
from postlude.cli.watch import crowded
from postlude.errors import PostludeError
from postlude.plan import Refusal
from postlude.report.model import CANDIDATE, COMPILE, POSTLUDE

STATE_SEED = 61
WINDOW_LIMIT_S = 120.0  # for one window of a candidate's timed calls


def bench_of(settings: Settings, options: Options) -> Bench:
    """The problem with random parameters: with a fresh model's γ = 1 and β = 0 some mistakes would not show."""
    opened = open_problem(settings, options.file, options.shapes)
    floating = next((x for x in tensors_in(list(opened.inputs)) if x.is_floating_point()), opened.output)
    device, is_linear = torch.device(settings.device), has_no_convolution(opened.model)
    mode = resolve(settings.precision, floating.dtype, device, is_linear)
    own = copy.deepcopy(opened.model.state_dict())
    state = random_state(opened.model, STATE_SEED)
    opened.model.load_state_dict(state)
    output = opened.problem.run(opened.model, opened.inputs)
    one = Bench(settings, options, dataclasses.replace(opened, output=output), state, mode)
    if not bool(torch.isfinite(output).all()):
        opened.model.load_state_dict(own)
        one.state, one.opened = own, opened
        one.left_out.append("random parameters: with them the result is not finite, so the file's own are used")
    if not options.beside_others and (busy := crowded(settings.device)) is not None:
        one.findings.append(busy)
    if options.train and not output.is_floating_point():
        raise PostludeError("--train needs a model whose result has a gradient.")
    one.sets = input_sets(one.opened, settings.device)
    return one


def enter(one: Bench) -> None:
    """Makes the variants, each ready to be called, and judges the candidate."""
    device, options = one.settings.device, one.options
    level = options.baselines or ("all" if device == "cuda" else "usual")
    if options.candidate is not None:
        rules = usual_rules(one.settings, options.train)
        verdict = judge_file(one.settings, one.opened, options.candidate, rules).verdict
        one.verdicts[CANDIDATE], one.notes[CANDIDATE] = verdict, verdict_words(verdict)
    eager = pytorch_ways(one.opened, device, one.state, one.sets, level)
    compiled = Baselines()
    if level != "few":
        with working("Compiling with torch.compile, which can take half a minute"):
            compiled = compiled_ways(one.opened, device, one.state, one.sets, _works(one), level)
    one.runners = [*eager.runners, *compiled.runners, _postlude(one)]
    one.left_out += [*eager.left_out, *compiled.left_out]
    one.notes |= {runner.name: runner.note for runner in one.runners}


def _works(one: Bench) -> tuple[str, ...]:
    return (FORWARD, WITH_GRAPH, STEP) if one.options.train else (FORWARD,)


def warm(one: Bench) -> None:
    """Makes first calls. cuDNN's algorithm search is a measurement and happens in the race."""
    for runner in one.runners:
        if runner.name not in (COMPILE, AUTOTUNED, BENCHMARKED):
            first_calls(runner.model, _works(one), runner.sets[:1], one.opened.output)


def _postlude(one: Bench) -> Runner:
    fused = with_state(one.opened.problem.build(one.settings.device), one.state)
    result = one.result = fuse(one.settings, fused, one.opened.inputs)
    verdicts = [result.verdict]
    if one.options.train:  # training has its own plans
        trained = fuse(one.settings, fused, one.opened.inputs, train=True)
        verdicts += [trained.verdict] if any(site.is_fused for site in trained.sites) else []
        whole = [site for site in trained.sites if isinstance(site.outcome, Refusal)]
        one.left_out += [f"training of {site.name}, which PyTorch runs: {site.outcome}" for site in whole]
    known = combine(verdict for verdict in verdicts if verdict is not None)
    if known is not None:
        one.verdicts[POSTLUDE] = known
    count = sum(site.is_fused for site in result.sites)
    note = f"{count} of {len(result.sites)} chains fused" if result.sites else "nothing to fuse"
    if result.failure is not None:
        note = f"not captured ({result.failure})"
    elif known is not None:
        note += f", {verdict_words(known)}"
    return Runner(POSTLUDE, fused, one.sets, note)


def candidate_of(one: Bench, stack: ExitStack) -> Candidate | None:
    """The candidate in its process, if it may be timed."""
    path = one.options.candidate
    if path is None or not one.verdicts[CANDIDATE].right:
        return None
    one.left_out.append("candidate: it is timed warm and forward only, and the memory of its process is not measured")
    try:
        candidate = stack.enter_context(started(one.settings, one.opened, path, WINDOW_LIMIT_S))
        candidate.load_state(one.state)
        return candidate
    except CandidateFailed as error:
        one.reject(CANDIDATE, error.reason)
        return None

"""Builds the data of a report from the results of checking, planning and timing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone

from postlude import hardware
from postlude.chain import Chain
from postlude.check.budget import RMS_FACTOR, WORST_FACTOR
from postlude.check.clock import Estimate, ratio
from postlude.check.verdict import Errors, Judged, Verdict
from postlude.plan import Plan, Problem, Refusal
from postlude.plan.rules import rule_lines
from postlude.report import model


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def judgement_of(verdict: Verdict | None) -> model.Judgement:
    if verdict is None:
        return model.Judgement(model.NOT_CHECKED)
    quantities = tuple(map(_quantity, verdict.quantities))
    return model.Judgement(verdict.outcome, verdict.reasons, verdict.precision, quantities)


def _quantity(judged: Judged) -> model.Quantity:
    allowed = None
    if judged.budget is not None:
        allowed = model.Errors(RMS_FACTOR * judged.budget.rms, WORST_FACTOR * judged.budget.worst)
    return model.Quantity(
        judged.name, judged.outcome, _errors(judged.errors), allowed, _errors(judged.own), judged.points
    )


def _errors(errors: Errors | None) -> model.Errors | None:
    return None if errors is None else model.Errors(errors.rms, errors.worst)


def interval_of(estimate: Estimate) -> model.Interval:
    return model.Interval(estimate.median, estimate.low, estimate.high, estimate.coverage, estimate.samples)


def race_of(
    direction: str,
    cache: str,
    timings: Mapping[str, Estimate],
    refused: frozenset[str] = frozenset(),
    events: Mapping[str, float] | None = None,
) -> model.Race:
    """The timings of one race; variants in `refused` get times but no ratios."""
    fastest = model.fastest_compile({name: timing.median for name, timing in timings.items()})
    entries = []
    for name, timing in timings.items():
        is_shown, beside = name not in refused, events or {}
        eager = timings.get(model.EAGER) if is_shown and name != model.EAGER else None
        # Compared with torch.compile's faster mode; its modes are not compared with each other.
        compiled = timings[fastest] if is_shown and fastest and not name.startswith(model.COMPILE) else None
        ratios = [None if base is None else interval_of(ratio(base, timing)) for base in (eager, compiled)]
        entries.append(model.Entry(name, interval_of(timing), ratios[0], ratios[1], beside.get(name)))
    rounds = max((len(timing.samples) for timing in timings.values()), default=0)
    return model.Race(direction, cache, tuple(entries), rounds)


def report_of(
    title: str,
    sites: Sequence[model.Site],
    declined: Sequence[tuple[str, str, str]],
    verdict: Verdict | None,
    device: str,
    findings: Sequence[str] = (),
    conversions: Sequence[tuple[str, str, tuple[int, ...], int]] = (),
) -> model.Report:
    """The report without timings."""
    judgement = judgement_of(verdict)
    if verdict is None and not any(site.is_fused for site in sites):
        judgement = model.Judgement(model.DECLINED, ("nothing was fused, the model runs as it did",))
    environment = environment_of(device)
    return model.Report(
        title,
        model.POSTLUDE,
        judgement,
        judgement.precision or "auto",
        environment.get("gpu" if device == "cuda" else "cpu", device),
        now(),
        sites=tuple(sites),
        declined=tuple(model.Declined(*item) for item in declined),
        conversions=tuple(
            model.Conversion(name, layout.replace("_", "-"), "×".join(map(str, shape)), size)
            for name, layout, shape, size in conversions
        ),
        findings=tuple(findings),
        left_out=("nothing was timed",),
        environment=environment,
    )


def failure(title: str, reason: str, device: str, precision: str) -> model.Report:
    """The report of a problem that failed."""
    return model.Report(title, model.POSTLUDE, model.Judgement(model.FAILED, (reason,)), precision, device, now())


def site_of(
    name: str, chain: Chain, problem: Problem, outcome: Plan | Refusal, is_fused: bool, verdict: Verdict | None
) -> model.Site:
    inputs = tuple(f"{'×'.join(map(str, t.shape))} {t.dtype}, {t.layout.replace('_', '-')}" for t in problem.tensors)
    operators = chain.words() if chain.producer is None else [str(chain.producer), *chain.words()]
    if not isinstance(outcome, Plan) or not is_fused:
        before = tuple(map(model.Pass, operators))
        judged = None if verdict is None else judgement_of(verdict)
        reasons = (*outcome.reasons, *(() if verdict is None else verdict.reasons))
        return model.Site(name, str(chain), inputs, False, before, before, reasons=reasons, judgement=judged)
    on_gpu = outcome.on_gpu
    library = on_gpu and outcome.own is None and chain.producer is not None
    return model.Site(
        name,
        str(chain),
        inputs,
        True,
        _operators(chain, operators, problem, outcome),
        tuple(model.Pass(line.split(": ", 1)[-1]) for line in outcome.describe()),
        outcome.eager_bytes,
        outcome.moved_bytes,
        len(operators),
        outcome.launches + library if on_gpu else len(outcome.passes),
        "launches" if on_gpu else "passes",
        (*outcome.reasons, *rule_lines(outcome)),
        judgement_of(verdict),
    )


def _operators(chain: Chain, words: list[str], problem: Problem, plan: Plan) -> tuple[model.Pass, ...]:
    """Eager's operators: each reads what the one before it wrote; the first reads the inputs, the last writes the
    result."""
    if chain.producer is None or not chain.steps:
        return tuple(map(model.Pass, words))
    value, inputs = plan.value.bytes, sum(spec.bytes for spec in problem.tensors)
    result = plan.eager_bytes - 2 * value * len(chain.steps) - inputs
    sizes = [inputs + value, *[2 * value] * (len(words) - 2), value + result]
    return tuple(model.Pass(word, size) for word, size in zip(words, sizes))


def environment_of(device: str) -> dict[str, str]:
    machine = hardware.machine_for(device)
    found = {name: value for name, value in hardware.versions().items() if value}
    if device == "cpu":
        found["threads"] = str(machine.threads)
        found["malloc"] = "tuned" if hardware.malloc_is_tuned() else "the system's"
    found["last-level cache"] = f"{machine.cache_bytes / 1e6:.3g} MB"
    found |= {name: os.environ[name] for name in SWITCHES if name in os.environ}
    return found


# Variables that change what is timed.
SWITCHES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "PYTORCH_ALLOC_CONF")

"""Runs a candidate on every case and judges its results; the candidate always runs before the reference."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from postlude import hardware
from postlude.check.budget import (
    FEW_ELEMENTS,
    Measured,
    budget_of,
    is_constant,
    pooled,
    spreads_of,
    within,
)
from postlude.check.compare import (
    GRADIENT,
    OUTPUT,
    Answers,
    AtPoint,
    Progress,
    Quantities,
    compare,
    contract_problem,
    has_error,
    is_output,
    poison,
    same_bits,
    verdict_of,
)
from postlude.check.exam.cases import MASKED, MOST_REPLACED, OFFSET, REQUIRED, Case
from postlude.check.exam.exam import Exam, Sheet
from postlude.check.exam.nonfinite import lost_or_spread
from postlude.check.exam.shapes import WORKING
from postlude.check.exam.strides import other_strides
from postlude.check.exam.truths import Known
from postlude.check.nested import tensors_in
from postlude.check.sides import (
    Answering,
    CandidateError,
    Question,
    UnanswerableError,
    key_findings,
    keys_of,
    lacks_memory,
    some,
    unread_counters,
)
from postlude.check.verdict import Verdict

FAR = 1000.0  # budgets
TIME, MEMORY = "time (--time-budget)", "memory"
CROSSING = "the answer for "  # the prefix of null candidates that ignore an input or a parameter


def examine(
    exam: Exam, candidate: Answering, progress: Progress = None, cases: Sequence[Case] | None = None
) -> Verdict:
    """The verdict on all cases, or on those given; its notes say what was left out."""
    mode = exam.truths.mode
    try:
        findings = key_findings(keys_of(exam.reference), candidate.state_keys())
        if findings:
            return Verdict("wrong", tuple(findings), mode)
        devices = {t.device for t in tensors_in(exam.shapes[WORKING].inputs) if t.device.type == "cuda"}
        with (
            torch.random.fork_rng(devices=sorted(devices, key=str)),
            torch.autocast(exam.truths.device.type, enabled=False),
        ):
            return _Sitting(exam, candidate).run(exam.cases if cases is None else cases, progress)
    except CandidateError as error:
        return Verdict("wrong", (str(error),), mode)
    except UnanswerableError as error:
        return Verdict("cannot tell", (str(error),), mode)


class _Sitting:
    """One candidate at one examination."""

    def __init__(self, exam: Exam, candidate: Answering) -> None:
        self.exam = exam
        self.candidate = candidate
        self.findings: list[str] = []
        self.remarks: list[str] = []
        self.skipped: dict[str, list[str]] = {}  # the names of the points that are left out, by what is lacking
        self.begun = time.monotonic()
        self.telling: Case | None = None  # the first point in its final form
        self.costs: dict[str, float] = {}
        self.held: Quantities | None = None  # the first result and its gradients, to see whether they change later
        self.gapped: frozenset[str] = frozenset()  # of the last answer
        self.counters = unread_counters(exam.reference)
        self.tells_integers = False  # integers of the result are others for other inputs

    def run(self, cases: Sequence[Case], progress: Progress) -> Verdict:
        points: list[AtPoint] = []
        for number, case in enumerate(cases):
            if not case.required and (lack := self._lack(case)):
                self.skipped.setdefault(lack, []).append(case.name)
                continue
            begin = time.monotonic()
            try:
                if case.is_nonfinite:
                    self._look_at_nonfinite(case)
                else:
                    points.append(self._measured(case))
            except Exception as error:
                if case.required or not lacks_memory(error):
                    raise
                self.skipped.setdefault(MEMORY, []).append(case.name)
            self.costs[case.shape] = time.monotonic() - begin
            if progress:
                progress(f"point {number + 1} of {len(cases)} ({case.name})")
            if self.findings or (number + 1 >= REQUIRED and self._hopeless(points)):
                break
        least = self.exam.rules.least
        verdict = verdict_of(points, self.findings, self.exam.truths.mode, faint=True, least=least, offset=OFFSET)
        if self.tells_integers and not self.findings and not any(one.quantities for one in points):
            verdict = Verdict("right", (), self.exam.truths.mode)
            self.remarks.append("the result consists of integers, and all of them are PyTorch's")
        if verdict.outcome == "wrong" and not self.findings and (where := _worst_place(points)) is not None:
            self.remarks.append(f"the largest error of the output is at the point “{where}”")
        return replace(verdict, notes=tuple(self._notes(verdict)))

    def _hopeless(self, points: list[AtPoint]) -> bool:
        """Whether the result is so wrong that no further point can change the verdict."""
        judged = verdict_of(points, [], self.exam.truths.mode, faint=True).quantities
        numbers = [(one.errors.rms, one.budget.rms) for one in judged if one.errors and one.budget]
        return any(error > FAR * budget for error, budget in numbers)

    def _measured(self, case: Case) -> AtPoint:
        while True:
            sheet = self.exam.sheet(case)
            result, repeated = self._ask_candidate(sheet)
            known = self.exam.known(sheet)
            self._look_at_counters(result, known)
            answers = Answers(
                result,
                known.own,
                known.truth,
                known.rounded,
                repeated,
                known.nulls,
                known.single,
                before=sheet.measured,
                guesses=case.shape == WORKING,
                flipped=known.flipped,
            )
            measured = compare(answers, self.findings)
            self.tells_integers = self.tells_integers or _differ_as_integers(known)
            sheet.measured = sheet.measured or measured
            self._look_at_strides(case, result, known)
            if self.findings or case.attempt == MOST_REPLACED or not _is_blind(_outputs(measured)):
                self.telling = self.telling or case
                return AtPoint(case.name, measured)
            case = case.again()

    def _ask_candidate(self, sheet: Sheet) -> tuple[Quantities, Quantities | None]:
        case, question = sheet.case, sheet.question
        if not case.repeated:
            result = self._ask(question, case)
            self._look_at_held()
            return result, None
        is_first = self.held is None
        result = self._ask(question, case, keep=is_first)
        for tensor in result.values():
            poison(tensor)
        repeated = self._ask(replace(question, interrupted=question.backward), case)
        if is_first:
            self.held = {name: tensor for name, tensor in result.items() if name.startswith((OUTPUT, GRADIENT))}
        if not all(name in repeated and same_bits(one, repeated[name]) for name, one in result.items()):
            self.remarks.append(
                "two answers to the same question differ in their last bits: the candidate is not deterministic"
            )
        return result, repeated

    def _look_at_held(self) -> None:
        if self.held:
            now = self.candidate.kept()
            changed = [name for name, one in self.held.items() if name not in now or not same_bits(one, now[name])]
            for what in dict.fromkeys("gradient" if name.startswith(GRADIENT) else "result" for name in changed):
                self.findings.append(f"an earlier {what} changed when the candidate was called again")
            self.held = {}

    def _ask(self, question: Question, case: Case, keep: bool = False) -> Quantities:
        try:
            answer = self.candidate.ask(question, keep=keep)
        except CandidateError as error:
            if (why := self.exam.why_raises(question)) is not None:
                raise UnanswerableError(f"{case.name}: the reference raises as well ({why})") from error
            raise CandidateError(f"{error}{self._place(case)}") from error
        self.findings += [one for one in answer.findings if one not in self.findings]
        self.gapped = answer.gapped
        return answer.quantities

    def _place(self, case: Case) -> str:
        """Where a candidate fails that has answered at the first points."""
        if case.shape != WORKING:
            return f" ({case.name}: {self.exam.shapes[case.shape]}; --declared-only leaves it out)"
        if case.wants == "recorded":
            return f" ({case.name}, as KernelBench times it)"
        return f" ({case.name})" if case.wants or case.unaligned else ""

    def _look_at_counters(self, result: Quantities, known: Known) -> None:
        """A counter that nothing reads is worth a note only: many honest candidates call F.batch_norm."""
        for name in sorted(self.counters & result.keys() & known.own.keys()):
            if not same_bits(result[name], known.own[name]):
                self.remarks.append(f"{name} is not PyTorch's: checkpoints will differ, results will not")
                result[name] = known.own[name]

    def _look_at_nonfinite(self, case: Case) -> None:
        sheet = self.exam.sheet(case)
        result = self._ask(sheet.question, case)
        known = self.exam.known(sheet)
        samples = next((tensor.shape[0] for tensor in tensors_in(sheet.question.inputs) if tensor.dim()), 0)
        samples = 0 if case.spoiled else samples  # a second operand need not have samples
        may_spread = case.family != MASKED or self.exam.has_products
        for name, truth in known.truth.items():
            if is_output(name):
                own, ours = known.own[name], result.get(name)
                problem, note = contract_problem(name, ours, own), None
                if problem is None and ours is not None:
                    problem, note = lost_or_spread(ours, own, truth, case.name, samples, may_spread)
                self._record(problem, note)

    def _look_at_strides(self, case: Case, result: Quantities, known: Known) -> None:
        for name, own in known.own.items():
            ours = result.get(name)
            if is_output(name) and ours is not None and ours.shape == own.shape:
                self._record(*other_strides(name, ours, own, name in self.gapped, self.exam.shapes[case.shape]))

    def _record(self, finding: str | None, note: str | None) -> None:
        self.findings += [finding] if finding else []
        self.remarks += [note] if note else []

    def _lack(self, case: Case) -> str | None:
        """What a point would take too much of, if anything."""
        device = self.exam.truths.device
        if device.type == "cpu" and self.exam.needed_bytes(case.shape) > hardware.available_bytes(device):
            return MEMORY
        spent = time.monotonic() - self.begun
        expected = self.costs.get(case.shape)
        if expected is None:
            expected = self.exam.expected_seconds(case.shape)
        return None if spent + expected <= self.exam.rules.seconds else TIME

    def _notes(self, verdict: Verdict) -> Iterable[str]:
        yield from dict.fromkeys(self.remarks)
        yield from (f"left out: {what}" for what in self.exam.left_out)
        for lack, names in self.skipped.items():
            yield f"left out for lack of {lack}: {', '.join(dict.fromkeys(names))}"
        if verdict.right and self.telling is not None and self._lack(self.telling) is None:
            with suppress(UnanswerableError):
                ignored = self.exam.ignored_parameters(self.telling)
                if ignored:
                    yield f"the result does not depend on {some(ignored)}: anything done with it passes"


def _worst_place(points: Sequence[AtPoint]) -> str | None:
    """The name of the point at which an output is furthest from the truth."""
    found = [(one.name, measured) for one in points for measured in _outputs(one.quantities)]
    spreads = spreads_of([measured for _, measured in found])
    ratios = [m.result.errors.rms / max(s, m.scale.ulp.rms, 1e-300) for (_, m), s in zip(found, spreads)]
    return found[ratios.index(max(ratios))][0] if found else None


def _differ_as_integers(known: Known) -> bool:
    """Whether some output of integers is another one for another input."""
    return any(
        name in null and not has_error(truth) and not torch.equal(truth, null[name])
        for null in known.nulls.values()
        for name, truth in known.truth.items()
    )


def _outputs(quantities: Mapping[str, Measured]) -> list[Measured]:
    return [measured for name, measured in quantities.items() if is_output(name)]


def _is_blind(outputs: Iterable[Measured]) -> bool:
    """Whether every output's truth is nearly constant here, or the same for other inputs or parameters."""
    found = [_blind(output) for output in outputs if output.scale.count >= FEW_ELEMENTS]
    return bool(found) and all(found)


def _blind(output: Measured) -> bool:
    spread = output.scale.spread
    if is_constant(output, spread):
        return True
    budget = budget_of([output], [spread])
    crossing = [pooled([errors], [spread]) for name, errors in output.nulls.items() if name.startswith(CROSSING)]
    return any(within(errors, budget) for errors in crossing)

"""A candidate in a separate process, with the interface of any other side."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from postlude.check.compare import GRADIENT, Quantities
from postlude.check.isolation import Answered, Candidate, CandidateFailed
from postlude.check.nested import named_tensors
from postlude.check.sides import Answer, CandidateError, Question, StateKeys, parameter_findings


class IsolatedSide:
    """The candidate's side. Which names of the state are parameters comes from the reference, not from the
    candidate."""

    def __init__(self, candidate: Candidate, reference: nn.Module) -> None:
        self.candidate = candidate
        self._parameters = {name for name, _ in reference.named_parameters(remove_duplicate=False)}
        self._buffers = {name for name, _ in reference.named_buffers()}

    def state_keys(self) -> StateKeys:
        keys: StateKeys = _said(self.candidate.state_keys)
        return keys

    def ask(self, question: Question, *, keep: bool = False) -> Answer:
        _said(self.candidate.load_state, question.state)
        answered = _said(
            self.candidate.forward,
            question.inputs,
            question.cotangents if question.backward else None,
            training=question.training,
            seed=question.seed,
            keep=keep,
            wants=question.wants,
            interrupted=question.interrupted,
            unaligned=question.unaligned,
        )
        findings = _findings(answered)
        found = {**answered.tensors, **{GRADIENT + name: one for name, one in answered.gradients.items()}}
        if not answered.tensors:
            raise CandidateError("failed: the candidate returns no tensor.")
        # After every call: a candidate may write to its parameters in one mode only, or from some call on.
        state: dict[str, Tensor] = _said(self.candidate.read_state) if question.state else {}
        findings += parameter_findings({n: v for n, v in state.items() if n in self._parameters}, question.state)
        found.update({f"buffer {name}": state[name] for name in self._buffers if name in state})
        return Answer(found, tuple(findings), answered.gapped)

    def kept(self) -> Quantities:
        outputs, gradients = _said(self.candidate.kept)
        return named_tensors("output", outputs) | {GRADIENT + name: one for name, one in gradients.items()}


def _findings(answered: Answered) -> list[str]:
    findings = []
    if answered.changed_inputs:
        findings.append(f"the candidate changed its inputs: {', '.join(answered.changed_inputs)}")
    return findings + list(answered.notes)


def _said(ask: Any, *args: Any, **options: Any) -> Any:
    try:
        return ask(*args, **options)
    except CandidateFailed as error:
        raise CandidateError(str(error)) from error

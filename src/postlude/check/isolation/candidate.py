"""A candidate's model in a separate process, as the verifier sees it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from postlude.check.isolation.buffers import NO_SEAL, can_be_sealed
from postlude.check.isolation.process import CandidateFailed, Limits, Reply, Running
from postlude.check.isolation.wire import DTYPES, UnsendableError, flatten, overlaps_itself
from postlude.check.nested import map_tensors, named_tensors
from postlude.check.supply import Turns
from postlude.errors import PostludeError

if TYPE_CHECKING:
    from postlude.check.sides import Wants

POISON = 1  # memory is filled with its complement: -1.7e38 in fp32, NaN in fp16


@dataclass(frozen=True)
class Answered:
    """What a model returned, copied to our own memory, and what else it did."""

    outputs: Any  # nested as the model returned it; named tuples are tuples
    gradients: dict[str, Tensor]  # of "input[0]", … and of parameters by name; one that is not used is absent
    changed_inputs: tuple[str, ...]  # inputs that were written to
    notes: tuple[str, ...]  # about results that were not plain tensors on the device
    gapped: frozenset[str] = frozenset()  # results that were views with gaps

    @property
    def tensors(self) -> dict[str, Tensor]:
        return named_tensors("output", self.outputs)


@dataclass(frozen=True)
class Timed:
    """One window of calls: the outputs are those of call number `call`."""

    seconds: float
    calls: int
    call: int
    outputs: Any


class Candidate:
    """Starts the process and builds the file's ModelNew; use it in a `with` block.

    With `poisoned`, memory from the system is filled first, which takes time: for checking, not for timing. A copy of
    the file runs in a folder that contains nothing else. The thread that makes a Candidate must outlive it,
    because on Linux the process ends with that thread. After an exception of the candidate's own (`CandidateFailed`)
    the process keeps running; after any other failure it is ended.
    """

    def __init__(
        self,
        path: str | Path,
        init_args: Sequence[Any] = (),
        init_kwargs: Mapping[str, Any] | None = None,
        *,
        device: str = "cpu",
        limits: Limits | None = None,
        poisoned: bool = False,
        precision: str = "auto",
    ) -> None:
        self.device = torch.device(device)
        self.limits = limits or Limits()
        given = {"args": list(init_args), "kwargs": dict(init_kwargs or {})}
        _check_sendable(given, "an argument of the constructor")
        self._kept_names: list[str] = []
        _leave_room(self.device)
        self._running = Running(self.limits)
        # Also if it is never closed, and when the interpreter exits.
        self._finalizer = weakref.finalize(self, self._running.close)
        try:
            copied = self._running.copy_in(Path(path))
            self._ask("poison", {"byte": POISON if poisoned else 0}, "its start", self.limits.start_s)
            start = {**given, "path": str(copied), "device": device, "precision": precision}
            self.skipped = self._protections(self._ask("start", start, "its start", self.limits.start_s).value)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Candidate:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._finalizer()

    @property
    def alive(self) -> bool:
        return self._running.ending is None

    @property
    def said(self) -> str:
        """Its output so far, standard error included, up to `limits.said_bytes`; complete once closed."""
        return self._running.said

    def state_keys(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        found = self._ask("state keys", {}, "listing its state").value
        if not isinstance(found, dict) or not all(map(_is_state_entry, found.items())):
            raise self._broken("is not a list of state keys")
        return {key: (tuple(shape), dtype) for key, (shape, dtype) in found.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Writes the state into the model's own tensors. What is not a tensor, such as an extra state, stays."""
        given = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        _check_sendable(given, "the state")
        self._ask("load state", {"state": given}, "loading its state")

    def read_state(self) -> dict[str, Tensor]:
        """The current state, to see what calls did to parameters and buffers."""
        reply = self._ask("read state", {}, "reading its state")
        found = reply.value
        if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
            raise self._broken("is no state")
        return {str(key): value for key, value in self._on_device(reply, found).items()}

    def forward(
        self,
        inputs: Sequence[Any],
        cotangents: Sequence[Tensor | None] | None = None,
        *,
        training: bool = False,
        seed: int = 0,
        keep: bool = False,
        wants: Wants = "none",
        interrupted: bool = False,
        unaligned: bool = False,
    ) -> Answered:
        """One call, and the gradients for `cotangents` where given, one per tensor of the result, in order.

        With `keep` its results are kept in the process, see `kept`. With `interrupted` the model is called on other
        inputs before gradients are taken.
        """
        asked = {"inputs": list(inputs), "cotangents": None if cotangents is None else list(cotangents)}
        _check_sendable(asked, "an input")
        _leave_room(self.device)
        how = {"training": training, "seed": seed, "keep": keep, "wants": wants}
        how |= {"interrupted": interrupted, "unaligned": unaligned}
        reply = self._ask("forward", {**asked, **how}, "a call", watched=True)
        names = list(named_tensors("input", list(inputs)))
        with_gradients = names if cotangents is not None else []
        outputs, gradients = self._results(reply, with_gradients)
        if keep:
            self._kept_names = with_gradients
        changed = tuple(names[place] for place in reply.changed if place < len(names))
        return Answered(outputs, gradients, changed, *self._notes(reply))

    def kept(self) -> tuple[Any, dict[str, Tensor]]:
        """The current values of the outputs and gradients of the last call with `keep`: later calls may have written
        to them."""
        return self._results(self._ask("kept", {}, "reading an earlier result"), self._kept_names)

    def time_calls(self, turns: Turns, *, training: bool = False, signal_s: float | None = None) -> Timed:
        """Seconds for one call on each of the inputs, by our clock around one request; inputs are sent before it.

        After `signal_s` seconds a signal picks the call whose result comes back; without one it is the last call. A
        candidate can answer first and compute later, so `outputs` must be checked. Fetching them is not included in
        `seconds`: a gain that disappears in the whole round trip is not real.
        """
        calls = len(turns)
        if not calls:
            raise ValueError("there is nothing to time without calls")
        inputs, forms = turns.whole()
        _check_sendable([list(inputs), list(turns.inputs(0))], "an input")
        given = {"inputs": list(inputs), "forms": forms, "places": torch.tensor(turns.places)}
        self._ask("prepare", {**given, "training": training}, "taking its inputs")
        signal = {"signal": torch.zeros(1, dtype=torch.uint8)}
        seconds = self._ask("window", signal, f"{calls} timed calls", signal_s=signal_s).seconds
        reply = self._ask("kept", {}, "reading an earlier result")
        found = self._on_device(reply, reply.value)
        whole = isinstance(found, dict) and found.keys() == {"call", "outputs"} and type(found["call"]) is int
        if not whole or found["call"] not in range(calls):
            raise self._broken("is not the result of a timed call")
        return Timed(seconds, calls, found["call"], found["outputs"])

    def _results(self, reply: Reply, names: list[str]) -> tuple[Any, dict[str, Tensor]]:
        """The outputs of a call and its gradients, those of the inputs under `names`."""
        value = reply.value
        if not isinstance(value, dict) or value.keys() != {"outputs", "inputs", "parameters"}:
            raise self._broken("is not the result of a call")
        of_inputs, of_parameters = value["inputs"], value["parameters"]
        if not isinstance(of_inputs, list) or not isinstance(of_parameters, dict) or len(of_inputs) != len(names):
            raise self._broken("has other gradients than inputs")
        found = {**dict(zip(names, of_inputs)), **{str(key): one for key, one in of_parameters.items()}}
        if not all(one is None or isinstance(one, Tensor) for one in found.values()):
            raise self._broken("has a gradient that is not a tensor")
        gradients = {name: gradient for name, gradient in found.items() if gradient is not None}
        return self._on_device(reply, value["outputs"]), dict(self._on_device(reply, gradients))

    def _ask(self, do: str, value: dict[str, Any], doing: str, limit_s: float | None = None, **how: Any) -> Reply:
        return self._running.ask(do, self.limits.call_s if limit_s is None else limit_s, value, doing, **how)

    def _on_device(self, reply: Reply, value: Any) -> Any:
        """Moves tensors that were on the candidate's device to ours of the same type; others stay on the host."""
        places = {id(tensor): spec.device for tensor, spec in zip(reply.tensors, reply.layout.specs, strict=True)}

        def placed(tensor: Tensor) -> Tensor:
            return tensor.to(self.device) if places.get(id(tensor)) == self.device.type else tensor

        return map_tensors(placed, value)

    def _notes(self, reply: Reply) -> tuple[tuple[str, ...], frozenset[str]]:
        """What is to be said about the results, and those that were views with gaps."""
        specs = {id(tensor): spec for tensor, spec in zip(reply.tensors, reply.layout.specs, strict=True)}
        found = {name: specs[id(tensor)] for name, tensor in named_tensors("output", reply.value["outputs"]).items()}
        notes = []
        for name, spec in found.items():
            notes += [f"{name} was a {spec.kind} tensor"] if spec.kind not in ("plain", "gapped") else []
            notes += [f"{name} was on {spec.device}"] if spec.device != self.device.type else []
        return tuple(notes), frozenset(name for name, spec in found.items() if spec.kind == "gapped")

    def _protections(self, found: Any) -> tuple[str, ...]:
        """The protections that this system lacks. The candidate's process reports its part before it loads anything."""
        listed = found.get("skipped") if isinstance(found, dict) else None
        if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
            raise self._broken("is not a report of its start")
        return (*listed, *([] if can_be_sealed() else [NO_SEAL]))

    def _broken(self, what: str) -> CandidateFailed:
        reason = f"the candidate's process sent an answer that {what}"
        self._running.close(reason)
        return CandidateFailed(reason)


def _leave_room(device: torch.device) -> None:
    """Gives back to the GPU what PyTorch's allocator in this process keeps unused, if that is more than is free.

    Float64 leaves most of a GPU's memory there after a large point, and an honest candidate would find none.
    """
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if unused > torch.cuda.mem_get_info(device)[0]:
        torch.cuda.empty_cache()


def _is_state_entry(item: tuple[Any, Any]) -> bool:
    key, value = item
    if not (isinstance(key, str) and isinstance(value, tuple) and len(value) == 2):
        return False
    shape, dtype = value
    whole = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    return whole and isinstance(dtype, torch.dtype)


def _check_sendable(value: Any, what: str) -> None:
    """Refuses inputs that cannot be sent, because that would be our fault and not the candidate's."""
    try:
        tensors = flatten(value)[1]
    except UnsendableError as error:
        raise PostludeError(f"{what} is or holds {error}, which cannot be sent to a candidate.") from None
    for tensor in tensors:
        name = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or name not in DTYPES:
            raise PostludeError(f"{what} is a {tensor.layout} tensor of {name}, which cannot be sent to a candidate.")
        if overlaps_itself(tensor.shape, tensor.stride()):
            raise PostludeError(f"{what} is a tensor that overlaps itself, which cannot be sent to a candidate.")

"""Inside the candidate's process: its model, and the tensors that outlive a request."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from postlude.check.isolation.results import RefusedError, settled
from postlude.check.isolation.turns import settle_heap, view_at
from postlude.check.isolation.wire import UnsendableError, distinct_part, flatten, laid_out, rebuild
from postlude.errors import first_line

CLASS_NAME, SEED = "ModelNew", 0  # the reference is built under the same seed
CACHE_BYTES = 64 << 20
LEAST_BLOCK = 1 << 12


def set_switches(device: str, precision: str) -> None:
    """Sets PyTorch's switches as for the reference: in fp32 a convolution must not use TF32.

    By the older interface, because a file may read it, which raises once the newer one has been set.
    """
    if device.startswith("cuda") and precision in ("fp32", "tf32"):
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"


class Host:
    """The model, and the tensors that outlive a request."""

    def __init__(self) -> None:
        self.model: Any = None
        self.device = "cpu"
        self.live: dict[tuple[Any, ...], list[Tensor]] = {}
        self.turns: list[Any] = []
        self.kept: Any = None
        self.last: list[tuple[torch.Size, torch.dtype, torch.device]] = []

    def start(self, path: str, args: list[Any], kwargs: dict[str, Any], device: str, precision: str) -> None:
        sys.argv = [path]
        self.device = device
        set_switches(device, precision)
        model_class = load_class(Path(path))
        tree, tensors = flatten([args, kwargs])
        given = rebuild(tree, [tensor.clone() for tensor in tensors])  # the model may keep them
        torch.manual_seed(SEED)
        try:
            self.model = model_class(*given[0], **given[1]).to(device)
        except Exception as error:
            raise RefusedError(f"{CLASS_NAME}.__init__ raises {first_line(error)}") from error

    def state_keys(self) -> dict[str, Any]:
        return {key: (list(tensor.shape), tensor.dtype) for key, tensor in self._state().items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        own = self._state()
        if own.keys() != state.keys():
            raise RefusedError("the candidate's state_dict has other keys than the state that it is given")
        for key, tensor in own.items():
            # In place and without a version change, so that a cache keyed on either is exposed.
            tensor.data.copy_(state[key])

    def read_state(self) -> dict[str, Tensor]:
        return self._state()

    def forward(
        self,
        inputs: list[Any],
        training: bool,
        seed: int,
        cotangents: list[Any] | None,
        keep: bool,
        wants: str,
        interrupted: bool,
        unaligned: bool,
    ) -> dict[str, Any]:
        tree, sent = flatten(inputs)
        leaves = self._refreshed(sent, unaligned)
        follows = wants in ("all", "inputs")
        used = [leaf.requires_grad_(follows and _has_gradient(leaf)) for leaf in (leaf.detach() for leaf in leaves)]
        self.model.train(training)
        self._poison()
        torch.manual_seed(seed)
        found: dict[str, Any] = {"inputs": [], "parameters": {}}
        with torch.set_grad_enabled(wants != "none"), _frozen(self.model if wants == "inputs" else None):
            outputs = self.model(*rebuild(tree, used))
            if interrupted:
                self._call_in_between(tree, used)
            if cotangents is not None:
                found.update(self._gradients(outputs, used, cotangents))
        found["outputs"] = outputs
        for place, leaf in zip(sent, leaves):
            distinct_part(place).copy_(distinct_part(leaf))  # so that the verifier sees changes
        if keep:
            self.kept = found
        self.last = [(one.shape, one.dtype, one.device) for one in _tensors(outputs) if one.is_floating_point()]
        return found

    def prepare(self, inputs: list[Any], forms: list[Any], places: Tensor, training: bool) -> None:
        """Lays out the inputs of a window's calls, in the same memory as those of the last window.

        Tensors with a form, which is a shape and strides, are pools: each call reads another place of them.
        """
        tree, sent = flatten(inputs)
        parts = list(zip(self._refreshed(sent), forms))
        self.turns = [
            rebuild(tree, [own if form is None else view_at(own, form[0], form[1], place) for own, form in parts])
            for place in places.tolist()
        ]
        self.model.train(training)
        settle_heap()
        _synchronise()

    def window(self, signal: Tensor) -> None:
        """Calls the model on every prepared input and keeps the result of one call, which the verifier's signal picks.

        The signal comes at a random time while the calls run. The result before it is kept: it existed when nobody
        could know that it would be. Without a signal it is the last one.
        """
        self.kept, collecting = None, gc.isenabled()
        gc.disable()
        try:
            with torch.no_grad():
                self.kept = self._called(self.turns, ctypes.c_ubyte.from_address(signal.data_ptr()))
                _synchronise()
        finally:
            self.turns = []
            if collecting:
                gc.enable()

    def _called(self, turns: list[Any], signal: ctypes.c_ubyte) -> dict[str, Any]:
        before = outputs = picked = None
        for index, turn in enumerate(turns):
            outputs = self.model(*turn)
            if type(outputs) is not torch.Tensor:
                outputs = settled(outputs)
            if picked is None and signal.value:
                picked = {"call": index - 1, "outputs": before} if index else {"call": 0, "outputs": outputs}
            before = outputs
        return picked or {"call": len(turns) - 1, "outputs": outputs}

    def read_kept(self) -> Any:
        return self.kept

    def _state(self) -> dict[str, Tensor]:
        return {key: value for key, value in self.model.state_dict().items() if isinstance(value, torch.Tensor)}

    def _refreshed(self, sent: list[Any], unaligned: bool = False) -> list[Any]:
        """The inputs on the device, at the same addresses as before, so that results cached by address are exposed.

        Unaligned ones begin one element behind the start of their memory, as a slice of a tensor may.
        """
        key = (unaligned, *((tuple(leaf.shape), leaf.stride(), leaf.dtype) for leaf in sent))
        if key not in self.live:
            self.live = {key: [laid_out(leaf, self.device, int(unaligned)) for leaf in sent]}
        for leaf, new in zip(self.live[key], sent):
            distinct_part(leaf.data).copy_(distinct_part(new))
        return self.live[key]

    def _poison(self) -> None:
        """Leaves NaN in memory that the next results are likely to reuse, so that unwritten elements are exposed."""
        try:
            scratch = [torch.full(shape, torch.nan, dtype=dtype, device=at) for shape, dtype, at in self.last]
            scratch += _filled_cache() if torch.cuda.is_initialized() else []
            del scratch
        except RuntimeError:  # no room for it, or no NaN of that dtype
            pass

    def _call_in_between(self, tree: Any, leaves: list[Any]) -> None:
        """Calls the model on the same values in reverse order; its state is then what it was before.

        What a call saves for its backward pass must outlast other calls, as with shared weights or two losses.
        """
        state = {key: value.clone() for key, value in self._state().items()}
        # Integers, which may be indices or offsets, stay.
        others = [leaf.detach().flatten().flip(0).view(leaf.shape) if _has_gradient(leaf) else leaf for leaf in leaves]
        self.model(*rebuild(tree, [other.requires_grad_(leaf.requires_grad) for other, leaf in zip(others, leaves)]))
        self.load_state(state)

    def _gradients(self, outputs: Any, leaves: list[Any], cotangents: list[Any]) -> dict[str, Any]:
        produced = _tensors(outputs)
        if len(produced) != len(cotangents):
            raise RefusedError(f"the candidate returns {len(produced)} tensors where {len(cotangents)} are expected")
        roots = [(root, weight) for root, weight in zip(produced, cotangents) if root.requires_grad]
        if not roots:
            raise RefusedError("the output has no gradient")
        if any(weight is None or weight.shape != root.shape for root, weight in roots):
            raise RefusedError("an output of the candidate has another shape than expected")
        named = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        wanted = [*(leaf for leaf in leaves if leaf.requires_grad), *named.values()]
        weights = [laid_out(weight, str(root.device)).to(root.dtype) for root, weight in roots]
        before = [weight.clone() for weight in weights]
        found = iter(torch.autograd.grad([root for root, _ in roots], wanted, weights, allow_unused=True))
        if not all(map(torch.equal, before, weights)):
            raise RefusedError("the candidate's backward pass writes to the gradient that it is given")
        of_inputs = [next(found) if leaf.requires_grad else None for leaf in leaves]
        return {"inputs": of_inputs, "parameters": dict(zip(named, found))}


@contextlib.contextmanager
def _frozen(model: Any) -> Iterator[None]:
    """None of the model's parameters needs a gradient inside; without a model, nothing changes."""
    trained = [] if model is None else [one for one in model.parameters() if one.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def load_class(path: Path) -> Any:
    try:
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise RefusedError(f"syntax error in line {error.lineno}: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise RefusedError(f"it cannot be compiled ({first_line(error)})") from error
    module = types.ModuleType("candidate_" + re.sub(r"\W", "_", path.stem))
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # inspect, pickle and Triton look modules up there
    sys.path.append(str(path.parent))  # at the end, so that a neighbouring file cannot hide an installed package
    try:
        exec(code, module.__dict__)
    except Exception as error:
        what = "an import fails" if isinstance(error, ImportError) else "running the file fails"
        raise RefusedError(f"{what}: {first_line(error)}") from error
    found = getattr(module, CLASS_NAME, None)
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
        raise RefusedError(f"it has no class {CLASS_NAME} that is a torch.nn.Module")
    return found


def _filled_cache() -> list[Tensor]:
    """All memory that PyTorch's allocator has cached on the GPU, and some more, as tensors of NaN."""
    taken, size = [torch.full((CACHE_BYTES // 4,), torch.nan, device="cuda")], CACHE_BYTES
    while size >= LEAST_BLOCK:
        idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if idle < size:
            size //= 2
            continue
        reserved = torch.cuda.memory_reserved()
        block = torch.full((size // 4,), torch.nan, device="cuda")
        taken.append(block)
        if torch.cuda.memory_reserved() > reserved:  # only smaller pieces are left in the cache
            size //= 2
    return taken


def _synchronise() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _tensors(value: Any) -> list[Any]:
    """The tensors of a result. What cannot be sent is refused later."""
    try:
        return flatten(value)[1]
    except UnsendableError:
        return []


def _has_gradient(tensor: Any) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())

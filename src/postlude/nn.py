"""`FusedChain`: a sequence of modules that runs as one chain."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from postlude.errors import PostludeError
from postlude.graph.capture import HOOKS, capture_function, hooks_of_all_modules
from postlude.graph.match import Match, match
from postlude.graph.rows import has_row_axes
from postlude.graph.tidy import functionalise
from postlude.plan import Settings
from postlude.run.execute import check_precision, is_transformed
from postlude.run.site import Site

__all__ = ["FusedChain", "Mean"]
_COUNT = torch.ops.aten.add_.Tensor
_PLAIN = frozenset((bool, int, float, str))
_OWN = frozenset(vars(nn.Module()))  # nn.Module's own attributes: dictionaries of hooks, tensors and modules
_REMEMBERED = 64  # chains per module before the cache is cleared
_Read = tuple[Site, tuple[str | None, ...], tuple[str, ...]]  # names of the slots' tensors, and of call counters
_EXAMPLE = 32  # the size of an example along each spatial axis: larger than any kernel


class Mean(nn.Module):
    """`x.mean(dim)` as a module. By default the mean is over everything but the batch of a 3-D volume.

    Args:
        dim: The axes to average over.
        keepdim: Whether they stay, with size 1.
    """

    def __init__(self, dim: tuple[int, ...] = (1, 2, 3, 4), keepdim: bool = False) -> None:
        super().__init__()
        self.dim, self.keepdim = tuple(dim), keepdim

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=self.dim, keepdim=self.keepdim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, keepdim={self.keepdim}"


class FusedChain(nn.Sequential):
    """An `nn.Sequential` whose forward runs as one fused chain, with the same modules and `state_dict` keys.

        FusedChain(nn.Conv3d(3, 24, 3), nn.GroupNorm(8, 24), Mean())

    The modules are read at the first call for each dtype and mode, and again when a module or one of its settings
    changes. If they do not form one chain, the call raises an error that says why. While a module inside has a hook,
    this runs as a plain `nn.Sequential`. A compiler reads the settings when it compiles. The result is not checked
    against float64; `postlude.optimize` does that for a plain `nn.Sequential`.

    Args:
        *modules: The modules in order.
        precision: "fp32" or "tf32"; "auto" follows PyTorch's own switches.
    """

    def __init__(self, *modules: nn.Module, precision: str = "auto") -> None:
        super().__init__(*modules)
        self.precision = precision
        self._read: dict[Any, _Read] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self._is_watched() or (not torch.compiler.is_compiling() and is_transformed()):
            return super().forward(x)  # type: ignore[no-any-return, no-untyped-call]
        device = x.device.type
        is_autocast = device != "meta" and torch.is_autocast_enabled(device)  # PyTorch raises for "meta"
        autocast = torch.get_autocast_dtype(device) if is_autocast else None
        if torch.compiler.is_compiling():
            return self._as_operator(x, device, autocast)
        key = self._key(x.dtype, x.dim(), device, autocast)
        read = self._read.get(key)
        if read is None:
            check_precision(self.precision, device)
            read = self._remember(key, x)
        site, names, counters = read
        for name in counters:
            self._tensor(name).add_(1)
        return site(*(x if name is None else self._tensor(name) for name in names))  # type: ignore[no-any-return]

    def _is_watched(self) -> bool:
        """Whether a hook needs to see the input or output of a module inside."""
        inside = (module for module in self.modules() if module is not self)
        return hooks_of_all_modules() or any(getattr(module, kind) for module in inside for kind in HOOKS)

    def _key(self, *call: Any) -> tuple[Any, ...]:
        """Everything that the chain depends on: the call's properties and the modules' current settings."""
        return (*call, *_settings(self))

    def _remember(self, key: Any, example: Tensor) -> _Read:
        if len(self._read) >= _REMEMBERED:
            self._read.clear()
        read = self._read[key] = self._read_chain(example)
        return read

    def _as_operator(self, x: Tensor, device: str, autocast: torch.dtype | None) -> Tensor:
        """The forward pass for compilers: one registered operator, without a graph break."""
        modes = tuple(module.training for module in self.modules())  # read here, so that the compiler guards on them
        text, names, moved, counters = self._text(x.dtype, x.dim(), device, autocast, modes)
        held = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        for name in counters:
            held[name].add_(1)
        tensors = [x if name is None else held[name] for name in names]
        result: Tensor = torch.ops.postlude.chain(tensors, [held[name] for name in moved], text, self.precision)
        return result

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _text(
        self, dtype: torch.dtype, dims: int, device: str, autocast: torch.dtype | None, modes: tuple[bool, ...]
    ) -> tuple[str, tuple[str | None, ...], tuple[str, ...], tuple[str, ...]]:
        """The chain, the names of its tensors, of its running statistics, and of call counters.

        The chain is read with an example that is made here, because a compiler's tensors have no values.
        """
        key = self._key(dtype, dims, device, autocast, modes)
        read = self._read.get(key)
        if read is None:
            check_precision(self.precision, device)
            held = next((tensor.device for tensor in (*self.parameters(), *self.buffers())), device)
            example = torch.zeros((2, self._channels(), *[_EXAMPLE] * (dims - 2)), dtype=dtype, device=held)
            with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
                read = self._remember(key, example)
        site, names, counters = read
        moved = [names[slot] for slot in site.chain.moved]
        still = tuple(name for slot, name in enumerate(names) if slot not in site.chain.moved)
        return site.chain.dumps(), still, tuple(name for name in moved if name is not None), tuple(counters)

    def _tensor(self, name: str) -> Tensor:
        """The current parameter or buffer of this name."""
        path, _, own = name.rpartition(".")
        tensor: Tensor = getattr(self.get_submodule(path), own)
        return tensor

    def _channels(self) -> int:
        for module in self:
            for name in ("in_channels", "num_channels", "num_features"):
                if isinstance(found := getattr(module, name, None), int):
                    return found
        raise PostludeError("this FusedChain has neither a convolution nor a norm: there is nothing to fuse.")

    def _read_chain(self, x: Tensor) -> _Read:
        """The chain, the names of its tensors (None: the input), and of the counters that each call increments."""
        names = [name for name, _ in (*self.named_parameters(), *self.named_buffers())]
        plain = nn.Sequential(*self)

        def call(x: Tensor, *values: Tensor) -> Any:
            return torch.func.functional_call(plain, dict(zip(names, values)), (x,))

        if any(_counts_itself(m) for m in self.modules()):
            raise PostludeError(
                "a batch_norm with momentum=None reads its counter in its forward, which a chain cannot do; "
                "give it a momentum."
            )
        graph = capture_function(call, [x, *map(self._tensor, names)])
        functionalise(graph)
        found, declined = match(graph)
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        result = graph.graph.output_node().args[0]
        if len(found) != 1 or found[0].nodes[-1] is not result or found[0].tensors[0] is not placeholders[0]:
            reasons = "; ".join(f"{item.what}: {item.reason}" for item in declined) or _why_not_one(found)
            raise PostludeError(
                f"these modules are not one chain ({reasons}); use nn.Sequential and postlude.optimize."
            )
        if has_row_axes(found[0].chain, x):
            raise PostludeError(
                "a FusedChain with a linear layer takes matrices; use nn.Sequential and postlude.optimize."
            )
        by_node = dict(zip(placeholders, [None, *names]))
        if not by_node.keys() >= set(found[0].tensors):
            raise PostludeError(
                "these modules make a tensor in their forward that the chain reads, as a parametrization does; "
                "use nn.Sequential and postlude.optimize."
            )
        counted = [
            by_node.get(node.args[0]) for node in graph.graph.nodes if node.target is _COUNT and node.args[1] == 1
        ]
        site = Site(type(self).__name__, found[0].chain, Settings(self.precision))
        return site, tuple(by_node[n] for n in found[0].tensors), tuple(name for name in counted if name is not None)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_read": {}}  # type: ignore[no-untyped-call]


def _why_not_one(found: list[Match]) -> str:
    if not found:
        return "there is neither a convolution nor a norm"
    if len(found) > 1:
        return "they form more than one"
    first, last = found[0].tensors[0], found[0].nodes[-1]
    outside = first if first.op != "placeholder" else next(iter(last.users))
    return f"{str(outside.target).removesuffix('.default')} is not part of it"


def _settings(module: nn.Module) -> list[Any]:
    """What a module's forward can depend on besides tensors: numbers by value, all else by identity."""
    found: list[Any] = [id(module), type(module)]
    for name, value in vars(module).items():
        if type(value) in _PLAIN or (type(value) is tuple and all(type(item) in _PLAIN for item in value)):
            found.append(value)
        elif name not in _OWN:
            found.append(id(value))
    found += [name for name, tensor in module._parameters.items() if tensor is not None]
    found += [name for name, tensor in module._buffers.items() if tensor is not None]
    for inner in module._modules.values():
        if inner is not None:
            found += _settings(inner)
    return found


def _counts_itself(module: nn.Module) -> bool:
    """Whether a batch_norm averages over all batches so far, for which it reads its counter."""
    return (
        isinstance(module, _BatchNorm)
        and module.training
        and module.momentum is None
        and module.num_batches_tracked is not None
    )

"""A place in a model where a chain runs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from postlude.chain import Chain
from postlude.hardware import default_fp32_precision
from postlude.plan import Settings, problem_of
from postlude.run.apart import tracing_alone
from postlude.run.execute import call, call_plain, is_transformed
from postlude.run.ledger import Ledger, SiteProblem
from postlude.run.operator import LIBRARY, call_operator


class Site(nn.Module):
    """Runs one chain of a captured graph.

    It holds no parameters, which are arguments of every call, and no state: plans and verdicts are in the model's
    ledger.
    """

    def __init__(
        self,
        name: str,
        chain: Chain,
        settings: Settings | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__()
        self.name, self.chain = name, chain
        self.settings = Settings() if settings is None else settings
        self.ledger = Ledger() if ledger is None else ledger
        self._table = self.ledger.table(name, chain)
        self._detached = chain.detached

    def forward(self, *tensors: Tensor) -> Tensor:
        if is_transformed():
            return call_plain(self.chain, tensors)
        if self._detached:  # autograd then returns None for them, as in eager, where a chain's own pass returns zeros
            tensors = tuple(t.detach() if slot in self._detached else t for slot, t in enumerate(tensors))
        if torch._C._len_torch_dispatch_stack():  # a trace or a dispatch mode is active
            return self._as_operator(tensors)
        # Hashing a chain and its problem takes longer than a small layer, so the key is made of cheap tensor
        # attributes.
        grad = torch.is_grad_enabled()
        linear = self.chain.is_linear
        switch = default_fp32_precision(linear) if tensors[0].is_cuda else ""
        key = (switch, *((t.shape, t.stride(), t.dtype, t.device, grad and t.requires_grad) for t in tensors))
        entry = self._table.get(key)
        if entry is None:
            if _are_apart(tensors):  # a kernel would take an address of one device for another's
                return call_plain(self.chain, tensors)
            with tracing_alone():
                entry = self.ledger.enter(self.asked(tensors), key, tensors)
        return call(entry.runner, tensors)

    def _as_operator(self, tensors: tuple[Tensor, ...]) -> Tensor:
        is_static = all(isinstance(size, int) for tensor in tensors for size in (*tensor.shape, *tensor.stride()))
        problem = problem_of(tensors, *self.settings, has_sizes=is_static)
        return call_operator(self.chain, problem, tensors)

    def asked(self, tensors: tuple[Tensor, ...]) -> SiteProblem:
        problem = problem_of(tensors, *self.settings)
        needs = tuple(problem.needs_grad and tensor.requires_grad for tensor in tensors)
        return SiteProblem(self.name, self.chain, problem, needs)


def _are_apart(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors are on several devices, which PyTorch allows only for 0-d ones on the CPU."""
    return any(tensor.device != tensors[0].device and tensor.dim() > 0 for tensor in tensors)


@functools.lru_cache(maxsize=1024)
def _site(chain: Chain, settings: Settings) -> Site:
    return Site(str(chain), chain, settings)


def run_chain(chain: Chain, tensors: Sequence[Tensor], precision: str = "auto") -> Tensor:
    """Runs a chain on the caller's tensors, outside any model."""
    result: Tensor = _site(chain, Settings(precision))(*tensors)
    return result


_parse = functools.lru_cache(maxsize=1024)(Chain.loads)


def _run(tensors: list[Tensor], moved: list[Tensor], text: str, *settings: str) -> Tensor:
    """The operator. After its settings it takes a code, which only PyTorch's caches of compiled graphs read."""
    chain = _parse(text)
    given, running = iter(tensors), iter(moved)
    slots = [next(running if slot in chain.moved else given) for slot in range(len(chain.roles))]
    result: Tensor = _site(chain, Settings(*settings[: len(Settings._fields)]))(*slots)
    return result


LIBRARY.define(
    "chain(Tensor[] tensors, Tensor(a!)[] moved, str chain, str precision='auto', str memory='default', "
    "str convolution='auto', str hands_on='', str code='') -> Tensor"
)
LIBRARY.impl("chain", _run, "CompositeImplicitAutograd")

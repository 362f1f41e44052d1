"""Traces Dynamo's graph again at ATen level: differentiable, with parameters still as inputs and the final dtypes.

Private interfaces of PyTorch that Postlude needs for this are all in this file; `tested.py` has the versions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._dynamo.config as dynamo
import torch.fx as fx
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed, TensorifyScalarRestartAnalysis, TorchDynamoException
from torch._guards import TracingContext
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx, track_tensor_tree
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.hooks import RemovableHandle

from postlude.run.apart import tracing_alone

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # attributes of a module

# Not an error: AOTAutograd has Dynamo trace the model again, with some numbers as constants instead of symbols.
TracedAgain = TensorifyScalarRestartAnalysis

# Nodes that change how everything after them computes; no chain crosses one.
MODE_CHANGES = (_enter_autocast, _exit_autocast, torch._C._set_grad_enabled)


def capture(graph: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """Re-traces `graph` with pre-dispatch ATen operators on fake copies of `inputs`; runs nothing for real."""
    with _fresh_fakes(inputs) as fakes, fx.traceback.preserve_node_meta():
        trace = make_fx(_AtenTracer(graph).run, pre_dispatch=True, tracing_mode="real", _allow_non_fake_inputs=True)
        return trace(*fakes)


def capture_function(function: Callable[..., Any], inputs: Sequence[Any]) -> fx.GraphModule:
    """The same for a plain function of tensors, without Dynamo. `postlude.nn` traces its modules with it."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(x, static_shapes=True) if isinstance(x, torch.Tensor) else x for x in inputs]
    with tracing_alone(), mode:
        trace = make_fx(function, pre_dispatch=True, tracing_mode="real", _allow_non_fake_inputs=True)
        return trace(*fakes)


def same_shape(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether two shapes are known to be equal. Never adds a guard, as `==` on symbols would."""
    return len(left) == len(right) and all(statically_known_true(sym_eq(a, b)) for a, b in zip(left, right))


def example_of(value: Any) -> torch.Tensor | None:
    """A tensor like `value` without data. Symbolic sizes become those of the call that is being compiled."""
    if not isinstance(value, torch.Tensor):
        return None
    sizes = [_hint(size) for size in (*value.shape, *value.stride())]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return None
    with FakeTensorMode():
        return torch.empty_strided(known[: value.dim()], known[value.dim() :], dtype=value.dtype, device=value.device)


def _hint(size: Any) -> int | None:
    """The value of a symbolic size in this call. `int(size)` would add a guard."""
    return size if isinstance(size, int) else size.node.hint


@contextlib.contextmanager
def hooks_are_watched() -> Iterator[None]:
    """Makes Dynamo recompile when a module's hooks change; by default it would not notice."""
    before = dynamo.skip_nnmodule_hook_guards
    dynamo.skip_nnmodule_hook_guards = False
    try:
        yield
    finally:
        dynamo.skip_nnmodule_hook_guards = before


class HookWatch:
    """Says whether a model's modules have hooks.

    It is asked at every call and looks at the modules only if a hook has been registered somewhere since. Dynamo's
    guards on the hooks of every module take 70 µs of each call of MONAI's UNet, and 110 µs of resnet50's.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.registered, self.found = model, -1, False

    def sees_hooks(self) -> bool:
        if self.found or self.registered != RemovableHandle.next_id:
            self.registered = RemovableHandle.next_id
            self.found = any(getattr(module, kind) for module in self.model.modules() for kind in HOOKS)
        return self.found


def graph_breaks() -> int:
    """How many there were in this process so far."""
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def hooks_of_all_modules() -> bool:
    """Whether global module hooks (`register_module_forward_hook` and the like) exist. Dynamo never notices those."""
    return bool(_has_any_global_hook())


@contextlib.contextmanager
def modes_left_as_found() -> Iterator[None]:
    """Restores autocast and grad mode on exit, even if tracing stopped between the nodes that switch them."""
    kinds = ("cuda", "cpu")
    before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        try:
            yield
        finally:
            for kind, enabled, dtype in before:
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, dtype)


def fakes_of(values: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """The mode that a graph's fake tensors belong to."""
    modes = [value.fake_mode for value in values if isinstance(value, FakeTensor)]
    return modes[0] if modes else contextlib.nullcontext()


def is_traced() -> bool:
    """Whether this runs inside torch.compile, torch.export, torch.jit.trace or FX, or beside a thread that traces:
    PyTorch knows FX for the whole process, and raises where a compiled function is called meanwhile."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    return fx._symbolic_trace.is_fx_symbolic_tracing()


def is_untraceable(error: Exception) -> bool:
    """Whether Dynamo failed on the code that it traces. A backend that failed is another matter."""
    return isinstance(error, TorchDynamoException) and not isinstance(error, BackendCompilerFailed)


@contextlib.contextmanager
def _fresh_fakes(inputs: Sequence[Any]) -> Iterator[list[Any]]:
    # Dynamo's own fake tensors belong to an older mode ("Mixing fake modes"), and AOTAutograd memoises the context's
    # mode. So we make a mode of our own over Dynamo's ShapeEnv, with which it shares symbols and guards.
    context = TracingContext.get()
    old = context.fake_mode
    mode = FakeTensorMode(shape_env=old.shape_env if old else None, allow_non_fake_inputs=True)
    context.fake_mode = mode

    def fake(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x  # SymInts pass through
        symbolic = context.tensor_to_context.get(x)
        source = getattr(symbolic, "tensor_source", None)
        return mode.from_tensor(x, symbolic_context=symbolic, source=source, static_shapes=symbolic is None)

    try:
        with mode:
            yield [fake(x) for x in inputs]
    finally:
        context.fake_mode = old


class _AtenTracer(fx.Interpreter):
    """Runs Dynamo's graph under make_fx, and handles the kinds of nodes that make_fx gets wrong."""

    def run_node(self, n: fx.Node) -> Any:
        if n.target is _enter_autocast:
            # make_fx records this call but does not enter autocast: every dtype in the region would be wrong.
            region = torch.amp.autocast(*n.args)  # type: ignore[arg-type]
            region.__enter__()  # records the node as well
            return region
        if n.target is _exit_autocast:
            return self.env[n.args[0]].__exit__(None, None, None)  # type: ignore[index]
        if isinstance(n.target, HigherOrderOperator):
            return self._copy_untouched(n)
        if n.target is torch._C._autograd._get_data_attr:  # type: ignore[attr-defined]
            return self._read_data(n)
        return super().run_node(n)

    def _read_data(self, node: fx.Node) -> Any:
        # make_fx takes the result of `tensor.data` for a constant: what the model writes to it would be lost.
        (tensor,), _ = self.fetch_args_kwargs_from_env(node)
        tracer = _tracer()
        call = tracer.create_proxy("call_function", node.target, (tracer.unwrap_proxy(tensor),), {})
        with disable_proxy_modes_tracing():
            return track_tensor_tree(tensor.data, call, constant=None, tracer=tracer)  # it shares the tensor's memory

    def _copy_untouched(self, node: fx.Node) -> Any:
        # Tracing through autograd_function_apply loses the input's gradient; tracing through a checkpoint raises.
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        tracer = _tracer()

        def proxy(item: Any) -> Any:
            if isinstance(item, torch.nn.Module):
                name = f"body_{len(tracer.root._modules)}"
                tracer.root.add_module(name, item)
                return tracer.create_proxy("get_attr", name, (), {})
            return tracer.unwrap_proxy(item) if isinstance(item, (torch.Tensor, torch.SymInt)) else item

        proxied = tree_map(proxy, (tuple(args), dict(kwargs)))
        call = tracer.create_proxy("call_function", node.target, *proxied)
        with disable_proxy_modes_tracing():
            out = tree_map_only(
                torch.Tensor,
                lambda v: torch.empty_strided(v.size(), v.stride(), dtype=v.dtype, device=v.device),
                node.meta["example_value"],
            )
        return track_tensor_tree(out, call, constant=None, tracer=tracer)


def _tracer() -> Any:
    """The tracer of the make_fx that is running."""
    return torch._ops._get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY).tracer

"""`postlude.optimize`: find a model's chains, fuse them in place, check each one, and be able to undo it."""

from __future__ import annotations

import contextlib
import fnmatch
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from postlude import hardware
from postlude.chain import Chain
from postlude.check.verdict import combine
from postlude.errors import PostludeError
from postlude.graph.backend import Backend, check_memory
from postlude.graph.capture import graph_breaks, hooks_of_all_modules
from postlude.graph.compiled import give_frames, has_frame, install, misses_layers, uninstall
from postlude.graph.fusion import LEFT_OUT
from postlude.graph.match import Match
from postlude.optimized import Optimized, SiteReport, remember, result_of
from postlude.run.execute import check_precision
from postlude.run.ledger import Ledger
from postlude.shown import shown
from postlude.site_check import check_site

log = logging.getLogger("postlude")
OPTIONS = frozenset({"precision", "rest", "memory", "convolution", "layout", "verify"})  # of the torch.compile backend
NOTHING_CAPTURED = "PyTorch's compiler captured none of the model's layers: it is disabled, or it gave up on this code"
Only = Callable[[str, Chain], bool] | Iterable[str] | str | None


def optimize(
    model: nn.Module,
    inputs: Any,
    *,
    precision: str = "auto",
    memory: str = "default",
    convolution: str = "auto",
    rest: str = "auto",
    layout: str = "auto",
    mode: str | None = None,
    only: Only = None,
    verify: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Optimized:
    """Fuses the chains of `model` in place and checks each against float64.

    Parameters, `state_dict`, hooks and class stay; a copy of the model is a plain model again. The model runs once on
    `inputs`; buffers, random state and gradients are left as they were. Calls go through `nn.Module.compile`.

    Args:
        model: The model, in the mode (training or evaluation) in which it will be used first.
        inputs: One call's arguments: a tensor, a tuple, or a dict of keyword arguments.
        precision: "fp32" or "tf32"; "auto" follows PyTorch's own switches.
        memory: "lean" saves only moments between a forward and a backward pass and recomputes the rest.
        convolution: "pytorch" keeps PyTorch's convolutions, bit for bit, and fuses what follows them.
        rest: What runs the rest: "inductor", as torch.compile does, or "eager", which starts faster; "auto" chooses.
        layout: "keep" leaves layouts alone; "auto" makes values channels-last between convolutions if that is faster.
        mode: A mode of torch.compile, for Inductor.
        only: The chains to fuse: names with wildcards (`"decoder.*"`), or a function of a chain's name and the chain.
        verify: Whether to check every plan before its first use, including those for later shapes and modes.
        progress: A function that is called with a sentence at each step; by default a terminal shows it.

    Returns:
        What was found and done: the sites, what was declined, and the verdict. `undo()` restores the model.
    """
    args, kwargs = _call_arguments(inputs)
    _check_request(model, precision, memory, args, kwargs)
    chosen, inductor = _filter(only), _inductor_settings(mode, {})

    def make() -> Backend:
        ledger = Ledger(check_site if verify else None)
        return Backend(precision, rest, chosen, memory, convolution, ledger, inductor, layout)

    backend, run = _first_call(model, make, lambda: model(*args, **kwargs), progress)
    return remember(_optimized(model, backend), run)


def _first_call(
    model: nn.Module, make: Callable[[], Backend], call: Callable[[], Any], progress: Callable[[str], None] | None
) -> tuple[Backend, Callable[..., Any]]:
    """The backend that captured the model, and the function that calls the model through it."""

    def captured() -> tuple[Backend, Callable[..., Any]]:
        backend = make()
        run, ledger = install(model, backend), backend.ledger
        with _left_as_found(model), shown(progress) as ledger.progress:
            call()
        ledger.progress = None
        return backend, run

    before = graph_breaks()
    try:
        found = captured()
        if graph_breaks() > before and misses_layers(model, found[0]):
            give_frames(model)
            found = captured()
    except BaseException:
        uninstall(model)
        raise
    return found


def _optimized(model: nn.Module, backend: Backend) -> Optimized:
    reports = tuple(_reports(backend))
    declined = tuple(item for captured in backend.captured for item in captured.declined)
    verdicts = [report.verdict for report in reports if report.verdict is not None]
    left = [item.name for item in declined if item.reason == LEFT_OUT]
    if left and not reports:
        log.warning("only= names none of the chains, which are at %s", ", ".join(left))
    failure = backend.failure or (None if _is_captured(model, backend) else NOTHING_CAPTURED)
    return Optimized(model, reports, declined, combine(verdicts), failure, backend)


def _is_captured(model: nn.Module, backend: Backend) -> bool:
    """Whether a graph has the model's layers. Where torch.nn calls them, as DDP does, its own code may be all of it."""
    if not type(model).__module__.startswith("torch.nn.") or not any(True for _ in model.parameters()):
        return bool(backend.captured)
    return any(one.sites or one.declined or one.modules for one in backend.captured)


def postlude_backend(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """The backend that `torch.compile(model, backend="postlude", options={...})` calls."""
    given = dict(options.get("options") or {})
    settings = {name: value for name, value in given.items() if name in OPTIONS}
    inductor = _inductor_settings(options.get("mode"), {name: given[name] for name in given.keys() - OPTIONS})
    ledger = Ledger(check_site if settings.pop("verify", True) else None)
    return Backend(**settings, ledger=ledger, inductor=inductor)(graph, inputs)


def _inductor_settings(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Inductor's options: those of a torch.compile mode, and those in `options` that are not ours."""
    if mode in (None, "default") and not options:
        return {}
    import torch._inductor as inductor

    modes = list(dict.fromkeys(("default", *inductor.list_mode_options())))
    if mode is not None and mode not in modes:
        raise PostludeError(f"mode={mode!r} is unknown; use one of {', '.join(modes)}.")
    unknown = options.keys() - set(inductor.list_options())
    if unknown:
        takes = ", ".join(sorted(OPTIONS))
        raise PostludeError(
            f"unknown option {', '.join(sorted(unknown))}; the backend takes {takes}, and Inductor's options."
        )
    return {**(inductor.list_mode_options(mode) if mode not in (None, "default") else {}), **options}


def _reports(backend: Backend) -> Iterator[SiteReport]:
    for site in (site for captured in backend.captured for site in captured.sites):
        entry = backend.ledger.latest.get((site.name, site.chain))
        if entry is not None:
            yield SiteReport(site.name, site.chain, entry.problem, entry.outcome, entry.verdict)


def _call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, dict):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def _check_request(
    model: nn.Module, precision: str, memory: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if not isinstance(model, nn.Module):
        raise PostludeError(f"optimize needs an nn.Module, not {type(model).__name__}.")
    if _is_scripted(model):
        raise PostludeError("optimize needs the nn.Module from which TorchScript made this one.")
    check_memory(memory)
    tensors = [item for item in (*args, *kwargs.values()) if isinstance(item, Tensor)]
    device = tensors[0].device.type if tensors else hardware.default_device()
    if memory == "lean" and device != "cuda":
        raise PostludeError(f"memory='lean' is for training on a GPU, not on {device}; leave it out.")
    check_precision(precision, device)
    if (earlier := result_of(model)) is not None:
        earlier.undo()
    if model._compiled_call_impl is not None and not has_frame(model):
        raise PostludeError("the model is already compiled; call postlude.optimize before model.compile().")
    if hooks_of_all_modules():
        raise PostludeError("a global module hook is registered, and models run unfused while it is; remove it.")


def _filter(only: Only) -> Callable[[str, Match], bool] | None:
    if only is None:
        return None
    if callable(only):
        keep = only
        return lambda name, found: keep(name, found.chain)
    patterns = [only] if isinstance(only, str) else list(only) if isinstance(only, Iterable) else [only]
    wrong = [type(item).__name__ for item in patterns if not isinstance(item, str)]
    if wrong:
        raise PostludeError(f"only= takes names with wildcards, or a function of name and chain, not {wrong[0]}.")
    return lambda name, _: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _is_scripted(module: nn.Module) -> bool:
    """Whether TorchScript holds the module's buffers, in which it only writes."""
    return isinstance(module, torch.jit.ScriptModule)


@contextlib.contextmanager
def _left_as_found(model: nn.Module) -> Iterator[None]:
    """Restores random state, buffers and parameters on exit. Gradients and mode are never touched."""
    devices = sorted(
        {t.device.index for t in model.parameters() if t.device.type == "cuda" and t.device.index is not None}
    )
    # A forward may write to parameters too: the codebooks of a VQ-VAE are moving averages.
    tensors = [t for t in (*model.parameters(), *model.buffers()) if not is_lazy(t)]
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
    # A forward may assign a new tensor to a buffer instead, as some moving averages do.
    assigned = [(module._buffers, dict(module._buffers)) for module in model.modules() if not _is_scripted(module)]
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for buffers, before in assigned:
                buffers.update(before)
            with torch.no_grad():
                for tensor, value in kept:
                    # A write that changes nothing would still spoil graphs that wait for their backward pass.
                    if not tensor.is_meta and not torch.equal(tensor, value):
                        tensor.copy_(value)

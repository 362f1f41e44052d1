"""One chain as text: its kernels, its launcher, and the autograd function around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from postlude.chain import Chain
from postlude.export.autograd import class_name, kept_class, recomputing_class, rest_lines
from postlude.export.cuda import COMPILE
from postlude.export.device_text import Kernel
from postlude.export.few_channels import gives_result, result_lines, result_source
from postlude.export.layout import call, docstring, fold
from postlude.export.program_text import ProgramText
from postlude.plan import Plan
from postlude.plan.calls import Buffer, CudaCall, Descriptor, KernelCall, Program
from postlude.plan.types import Moments
from postlude.run.record import record_inference, record_training

RESERVED = ("ctx", "tensors", "needs", "torch", "triton", "tl", "F", "nn")


@dataclass(frozen=True)
class ChainText:
    name: str  # of its launcher
    chain: Chain
    plan: Plan
    given: tuple[Buffer, ...]  # what the kernels were cut for, one per slot
    kernels: tuple[Kernel, ...]
    functions: Mapping[str, str]  # the launcher and what stands around it, by name, in order
    imports: frozenset[str]
    launches: int
    called: str  # what the model calls: the autograd function, or one around it
    trains: bool  # its backward pass has kernels of its own
    is_aligned: bool  # a tensor that is given is read through a descriptor: it must begin where those may
    shapes_name: str = "SHAPES"
    sources: Mapping[str, str] = field(default_factory=dict)  # CUDA C++, by the name of its constant


def chain_text(
    chain: Chain, plan: Plan, name: str, names: Mapping[int, str], tensors: Sequence[Tensor], training: bool
) -> ChainText:
    """`names` has a word for each slot; `training` writes the backward pass that the library runs."""
    # Chains of which only moments are kept differentiate those by autograd, which is no list of calls.
    training = training and (plan.few_gradient is not None or not isinstance(plan.passes[-1].sink, Moments))
    if training:
        program = record_training(plan, tensors, [tensor.is_floating_point() for tensor in tensors])
    else:
        program = record_inference(plan, chain, tensors)
    text = ProgramText(program, names, RESERVED)
    sources, launches = dict(text.sources), text.launches
    called = f"{class_name(name)}.apply"
    if training:
        functions = kept_class(plan.chain, name, names, text)
        if len(plan.chain.steps) < len(chain.steps):
            called = name
            functions |= _continued(chain, plan, name, names, tensors, program.result)
    elif gives_result(plan):
        sources, launches = {"SOURCE": result_source(plan)}, 2
        functions = _direct_launcher(chain, plan, name, names, tensors) | recomputing_class(chain, name, names, tensors)
    else:
        functions = _launcher(chain, name, names, text) | recomputing_class(chain, name, names, tensors)
    kernels = () if gives_result(plan) and not training else tuple(text.functions.values())
    return ChainText(
        name,
        chain,
        plan,
        program.given,
        kernels,
        {**({"compiled": COMPILE} if sources else {}), **functions},
        _imports(program),
        launches,
        called,
        training,
        _reads_given_by_descriptor(program),
        sources=sources,
    )


def _launcher(chain: Chain, name: str, names: Mapping[int, str], text: ProgramText) -> dict[str, str]:
    body = text.forward_lines()
    return _function(chain, name, names, [*body, f"    return {text.words[text.program.result.number]}"])


def _direct_launcher(
    chain: Chain, plan: Plan, name: str, names: Mapping[int, str], tensors: Sequence[Tensor]
) -> dict[str, str]:
    """By the kernels that give the result at once; PyTorch's functions do what follows it."""
    lines = [f"    {line}" for line in result_lines(plan, names)]
    value = torch.empty(plan.input.shape[0], dtype=tensors[0].dtype, device="meta")
    rest = rest_lines(chain, plan.passes[-1].last + 2, names, tensors, value, "value")
    return _function(chain, name, names, [*lines, *rest, "    return value"])


def _continued(
    chain: Chain, plan: Plan, name: str, names: Mapping[int, str], tensors: Sequence[Tensor], result: Buffer
) -> dict[str, str]:
    """The chain with its last steps, which the kernels leave out, by PyTorch and with its gradients."""
    dtype = getattr(torch, result.dtype)
    value = torch.empty_strided(result.shape, result.strides, dtype=dtype, device="meta")
    rest = rest_lines(chain, len(plan.chain.steps), names, tensors, value, "value")
    given = ", ".join(names[slot] for slot in range(len(chain.roles)))
    first = f"    value = {class_name(name)}.apply({given})"
    return _function(chain, name, names, [first, *rest, "    return value"])


def _function(chain: Chain, name: str, names: Mapping[int, str], body: Sequence[str]) -> dict[str, str]:
    arguments = [f"{names[slot]}: Tensor" for slot in range(len(chain.roles))]
    head = call(f"def {name}", arguments, after=" -> Tensor:", indent=0)
    return {name: fold("\n".join([*head, *docstring(f"{chain}, by kernels."), *body]) + "\n")}


def _imports(program: Program) -> frozenset[str]:
    calls = (*program.forward, *program.backward)
    found = {"CUDA_HOME"} if any(isinstance(item, CudaCall) for item in calls) else set()
    arguments = [argument for item in calls if isinstance(item, KernelCall) for argument in item.arguments]
    return frozenset(found | ({"TensorDescriptor"} if any(isinstance(a, Descriptor) for a in arguments) else set()))


def _reads_given_by_descriptor(program: Program) -> bool:
    storages = {buffer.storage for buffer in program.given}
    calls = [item for item in (*program.forward, *program.backward) if isinstance(item, KernelCall)]
    return any(isinstance(a, Descriptor) and a.buffer.storage in storages for item in calls for a in item.arguments)

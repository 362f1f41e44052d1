"""One chain's plan as text: its kernels, its launcher, and what it takes to be launched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from postlude.chain import Cast, Chain, Value, values_of
from postlude.export.channels import finish_channels
from postlude.export.direct import direct
from postlude.export.direct_gradient import direct_trainer
from postlude.export.direct_result import direct_result, gives_result
from postlude.export.kernels import Kernel, with_helpers
from postlude.export.layout import call, docstring
from postlude.export.parts import Draft
from postlude.export.passes import finish, finish_moments, library_convolution, moments_pass
from postlude.export.plain import renamed_steps
from postlude.export.product import product
from postlude.export.training import class_name, trainer_text, why_untrained
from postlude.plan import Plan
from postlude.plan.few_channels import FewChannels
from postlude.plan.gemm import Gemm
from postlude.plan.types import Moments

MOST_CHANNELS = 256  # of a value whose moments one program finishes


@dataclass(frozen=True)
class ChainText:
    name: str  # of its launcher
    plan: Plan
    kernels: tuple[Kernel, ...]
    helpers: Mapping[str, str]
    constants: Mapping[str, str]
    imports: frozenset[str]
    launcher: str
    launches: int
    shared_bytes: int
    cuda: str  # CUDA C++ that the file holds, or nothing
    trainer: str  # the class for gradients, or nothing


def unwritable(plan: Plan, others: Iterable[ChainText]) -> str | None:
    """Why a plan has no text beside the others of its file, as a remark for readers of it."""
    chain, dtypes = plan.chain, {plan.input.dtype, plan.value.dtype, plan.result_dtype}
    if plan.input.layout != "contiguous" or plan.value.layout != "contiguous":
        return "channels-last kernels are not written to files"
    if any(isinstance(step, Cast) for step in chain.steps) or len(dtypes) > 1 or "float64" in dtypes:
        return "it changes dtypes on the way, or is float64"
    if "row" in chain.roles:
        return "kernels that read one number per sample and channel are not written to files"
    if isinstance(plan.passes[-1].sink, Moments) and plan.value.shape[1] > MOST_CHANNELS:
        return f"it has more than {MOST_CHANNELS} channels"
    first = next(iter(others), None)
    if first is not None and (first.plan.chain.dims, first.plan.input.dtype) != (chain.dims, plan.input.dtype):
        return "the file's kernels are for tensors of another number of axes or another dtype"
    last = plan.passes[-1].last
    after = enumerate(chain.steps[last:], last)
    if any(values_of(step) != (Value(number),) for number, step in after):
        return "steps after its last kernel read more than one value"
    return None


def chain_text(plan: Plan, name: str, names: Mapping[int, str], training: bool = False) -> ChainText:
    """`names` has a word for each slot of the chain; `training` adds what gradients need, where it can be had."""
    draft = Draft(plan, names)
    last = plan.passes[-1].last
    trains = training and why_untrained(plan) is None
    chunks, result = "tiles", "value"
    is_done = gives_result(plan)
    if isinstance(plan.own, Gemm):
        product(draft, plan.own)
    elif isinstance(plan.own, FewChannels) and is_done:
        last = direct_result(draft, plan.own)
    elif isinstance(plan.own, FewChannels):
        direct(draft, plan.own)
    else:
        library_convolution(draft)
        if isinstance(plan.passes[0].sink, Moments):
            moments_pass(draft)
            chunks = "chunks"
    if isinstance(plan.passes[-1].sink, Moments) and not is_done:
        last = finish_moments(draft, chunks)
    elif not is_done and plan.passes[-1].source != "own convolution":
        result = finish(draft, trains) if plan.channels_end is None else finish_channels(draft)
    draft.add(*renamed_steps(plan.chain, last + 1, names, result))
    trainer = _trainer(draft, name, is_done) if trains else ""
    end = f"    return {result}{', moments' if trains and is_done else ', value' if trains else ''}"
    kept = "" if not trains else "its moments" if is_done else "its first value, if kept"
    lines = [*_head(plan.chain, name, names, kept), *_read(draft.lines), end]
    kernels = with_helpers(draft.kernels)
    return ChainText(
        name,
        plan,
        tuple(kernels),
        draft.helpers,
        draft.constants,
        frozenset(draft.imports),
        "\n".join(lines) + "\n",
        draft.launches,
        draft.shared_bytes,
        draft.cuda,
        trainer,
    )


def _trainer(draft: Draft, name: str, is_done: bool) -> str:
    """The class for gradients; what it calls joins the draft."""
    if not is_done:
        return trainer_text(draft.plan.chain, name, draft.names)
    trainer, helpers, samples = direct_trainer(draft.plan, name, class_name(name))
    draft.helpers |= helpers
    draft.constant("SAMPLES", samples, "taken at a time by the gradients of input and weight")
    return trainer


def _read(lines: list[str]) -> list[str]:
    """Without the number of positions where no launch asks for it."""
    text = "\n".join(lines)
    return [line for line in lines if not (line.strip().startswith("positions = ") and text.count("positions") == 1)]


def _head(chain: Chain, name: str, names: Mapping[int, str], kept: str) -> list[str]:
    """`kept`: what it gives besides the result, for gradients."""
    arguments = [f"{names[slot]}: Tensor" for slot in range(len(chain.roles))]
    result, words = "Tensor", f"{chain}, of tensors that fit."
    if kept:
        result, words = "tuple[Tensor, Tensor]", f"{chain}, of tensors that fit; and {kept}."
    if "if kept" in kept:
        arguments.append("keep: bool = False" if chain.producer is not None else "keep: bool = True")
    return [*call(f"def {name}", arguments, after=f" -> {result}:", indent=0), *docstring(words)]

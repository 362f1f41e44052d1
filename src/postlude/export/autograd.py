"""The autograd function around a launcher.

In an ordinary file the backward pass runs the replaced calls again and lets PyTorch differentiate them. In a file for
training it is the library's own backward pass, from what the forward pass kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from postlude.chain import Chain
from postlude.export.program_text import ProgramText
from postlude.export.syntax.layout import WIDTH, docstring, fold, laid_out
from postlude.plan.program import Program, TorchCall, buffers_in, made_by
from postlude.stages.program import plain_program, rest_program

_RECOMPUTING = '''\
class {Name}(torch.autograd.Function):
    """The {what} forward; backward, PyTorch's derivative of the calls they replace."""

    @staticmethod
    def forward(ctx, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward({kept})
        return {name}(*tensors)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
{backward}'''
_BY_VJP = "        return torch.func.vjp({name}_by_pytorch, *ctx.saved_tensors)[1](grad)\n"
# Running statistics move on before the backward pass, which does not read them: they are None in it.
_BY_GRAD = """\
        needs = ctx.needs_input_grad
        with torch.enable_grad():
            tensors = [t if t is None else t.view_as(t) for t in ctx.saved_tensors]
            result = {name}_by_pytorch(*tensors)
        wanted = [t for t, needed in zip(tensors, needs) if needed]
        twice = torch.is_grad_enabled()  # the gradients are to be differentiated again
        grads = iter(torch.autograd.grad(result, wanted, grad, create_graph=twice))
        return tuple(next(grads) if needed else None for needed in needs)
"""


def class_name(function: str) -> str:
    return "".join(word.capitalize() for word in function.split("_"))


def recomputing_class(
    chain: Chain, name: str, names: Mapping[int, str], tensors: Sequence[Tensor], what: str
) -> dict[str, str]:
    """The chain by PyTorch's functions, and the class whose backward pass differentiates it. `what` runs forward."""
    moved = chain.moved  # running statistics are updated before the backward pass, which does not read them
    kept = f"*(None if n in {moved} else t for n, t in enumerate(tensors))" if moved else "*tensors"
    is_by_vjp = not moved and all(tensor.is_floating_point() for tensor in tensors)  # a mask is not
    text = _RECOMPUTING.replace("{backward}", _BY_VJP if is_by_vjp else _BY_GRAD).replace("{kept}", kept)
    text = text.replace("{Name}", class_name(name)).replace("{name}", name).replace("{what}", what)
    plain = f"{name}_by_pytorch"
    return {plain: plain_function(chain, plain, names, tensors), class_name(name): fold(text)}


def returning(lines: Sequence[str], result: str) -> list[str]:
    """The statements and a return of the result, which the last of them may have made."""
    *body, last = lines
    end = last.removeprefix(f"    {result} = ")
    return [*body, *([f"    return {end}"] if end != last else [last, f"    return {result}"])]


def function_text(chain: Chain, name: str, names: Mapping[int, str], body: Sequence[str], how: str) -> str:
    """A function of the chain's tensors that computes it, as its docstring says."""
    arguments = [f"{names[slot]}: Tensor" for slot in range(len(chain.roles))]
    head = laid_out(f"def {name}", arguments, after=" -> Tensor:", indent=0)
    return fold("\n".join([*head, *docstring(f"{chain}, by {how}."), *body]) + "\n")


def plain_function(chain: Chain, name: str, names: Mapping[int, str], tensors: Sequence[Tensor]) -> str:
    return function_text(chain, name, names, returning(*_by_pytorch(plain_program(chain, tensors), names)), "PyTorch")


def rest_lines(
    chain: Chain, first: int, names: Mapping[int, str], tensors: Sequence[Tensor], value: Tensor
) -> list[str]:
    """Statements for the steps after step `first`, by PyTorch, on the value of this name."""
    slots = {0: "value", **{slot + 1: name for slot, name in names.items()}}
    lines, result = _by_pytorch(rest_program(chain, first, value, tensors), slots, joins=False)
    return [*lines, *([] if result == "value" else [f"    value = {result}"])]


def _by_pytorch(program: Program, slots: Mapping[int, str], joins: bool = True) -> tuple[list[str], str]:
    """The statements of a program of PyTorch's calls, and its result's name. If it is straight, all values have one
    name."""
    text = ProgramText(program, slots, joins=joins)
    if _is_straight(program):
        text.words |= dict.fromkeys((buffer.number for buffer in made_by(program.forward)), "value")
    return text.forward_lines(), text.words[program.result.number]


def _is_straight(program: Program) -> bool:
    """Whether each call reads only the value before it, so that all values can have one name."""
    given, previous = {b.number for b in program.given}, -1
    for item in program.forward:
        read = {b.number for b in buffers_in(item)} - given
        made = item.results if isinstance(item, TorchCall) else ()
        if len(made) != 1 or made[0] is None or (read and read != {previous}):
            return False
        previous = made[0].number
    return True


def kept_class(chain: Chain, name: str, names: Mapping[int, str], text: ProgramText) -> dict[str, str]:
    """The class whose forward and backward pass are the library's own; it saves what the backward pass reads."""
    program, slots = text.program, [names[slot] for slot in range(len(chain.roles))]
    assert program.gradient is not None
    text.indent = 8
    forward, backward = text.forward_lines(program.kept), text.backward_lines()
    words, grad = [text.words[buffer.number] for buffer in program.kept], text.words[program.gradient.number]
    grads = [None if grad is None else text.words[grad.number] for grad in program.gradients]
    guarded = "\n".join(backward)
    optional = [word for slot, word in enumerate(grads[:2]) if word is not None and f"if needs[{slot}]" in guarded]
    layout = "" if program.gradient.is_contiguous else f"memory_format=torch.channels_last{'_3d' * (chain.dims == 3)}"
    lines = [
        f"class {class_name(name)}(torch.autograd.Function):",
        *docstring(f"{chain}: kernels both ways, the second from what the first kept."),
        "",
        "    @staticmethod",
        *laid_out("def forward", ["ctx", *(f"{slot}: Tensor" for slot in slots)], after=" -> Tensor:"),
        *forward,
        *laid_out("ctx.save_for_backward", words, indent=8),
        f"        return {text.words[program.result.number]}",
        "",
        "    @staticmethod",
        "    @once_differentiable",
        f"    def backward(ctx, {grad}: Tensor) -> tuple[Tensor | None, ...]:",
        *(["        needs = ctx.needs_input_grad"] if "needs[" in guarded else []),
        *_unpacked(words),
        f"        {grad} = {grad}.contiguous({layout})",
        *([f"        {' = '.join(optional)} = None"] if optional else []),
        *backward,
        *_returned([str(grad) for grad in grads]),
    ]
    return {class_name(name): fold("\n".join(lines) + "\n")}


def _returned(words: Sequence[str]) -> list[str]:
    line = f"        return {', '.join(words)}{',' * (len(words) == 1)}"
    return [line] if len(line) <= WIDTH else laid_out("", words, "return ", indent=8)


def _unpacked(words: Sequence[str]) -> list[str]:
    line = f"        {', '.join(words)}{',' * (len(words) == 1)} = ctx.saved_tensors"
    if len(line) <= WIDTH or not words:
        return [line] if words else []
    return ["        (", *(f"            {word}," for word in words), "        ) = ctx.saved_tensors"]

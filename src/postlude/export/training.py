"""The autograd function of an exported chain: its kernels forward; backward, PyTorch from the stored convolution."""

from __future__ import annotations

from collections.abc import Mapping

from postlude.chain import Chain, Convolution, Value, values_of
from postlude.export.direct_gradient import can_train
from postlude.export.layout import call
from postlude.export.plain import plain_steps
from postlude.plan import Plan
from postlude.plan.types import Store

NEEDS_GRAD = """\
def needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
"""


def why_untrained(plan: Plan) -> str | None:
    """Why a chain's kernels are for inference only, or None."""
    if can_train(plan):
        return None
    last = plan.passes[-1]
    if not isinstance(last.sink, Store) or last.source == "own convolution":
        return "its kernels store no convolution to start a backward pass from"
    steps = enumerate(plan.chain.steps)
    return None if all(values_of(step) == (Value(n),) for n, step in steps) else "a step reads more than one value"


def class_name(function: str) -> str:
    return "".join(word.capitalize() for word in function.split("_"))


def trainer_text(chain: Chain, function: str, names: Mapping[int, str]) -> str:
    conv = chain.producer
    first = 1 if conv is None else 2
    others = ", ".join(names[slot] for slot in range(first, len(chain.roles)))
    lines = [
        f"class {class_name(function)}(torch.autograd.Function):",
        '    """The kernels forward; backward, PyTorch\'s operators from what they stored."""',
        "",
        "    @staticmethod",
        "    def forward(ctx: Any, *tensors: Tensor) -> Tensor:",
        f"        result, {'value' if conv else '_'} = {function}(*tensors, keep=True)",
        f"        ctx.save_for_backward({'value, *tensors' if conv else '*tensors'})",
        "        return result",
        "",
        "    @staticmethod",
        "    @once_differentiable",
        "    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:",
        f"        value, {'x, weight, ' if conv else ''}*others = ctx.saved_tensors",
        "        with torch.enable_grad():",
        "            leaves = [t.detach().requires_grad_() for t in (value, *others)]",
        f"            value, {others} = leaves" if others else "            (value,) = leaves",
    ]
    if conv is not None and conv.has_bias:
        lines.append(f"            value = value + bias.view(-1{', 1' * chain.dims})")
    lines += [f"            {line}" for line in plain_steps(chain, 1, names)]
    if conv is None:
        return "\n".join([*lines, "        return torch.autograd.grad(value, leaves, grad)", ""])
    lines += [
        "        grad, *grads = torch.autograd.grad(value, leaves, grad)",
        *_convolution_backward(conv),
        "        return x_grad, weight_grad, *grads",
    ]
    return "\n".join([*lines, ""])


def _convolution_backward(conv: Convolution) -> list[str]:
    sizes = [conv.stride, conv.padding, conv.dilation, conv.transposed, conv.output_padding, conv.groups]
    return [
        "        wanted = (*ctx.needs_input_grad[:2], False)",
        *call("", [str(size) for size in sizes], "settings = ", indent=8),
        *call(
            "torch.ops.aten.convolution_backward",
            ["grad", "x", "weight", "None", "*settings", "wanted"],
            "x_grad, weight_grad, _ = ",
            indent=8,
        ),
    ]

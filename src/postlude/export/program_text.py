"""A program as the statements of a function: allocations, launches and calls of PyTorch, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from postlude.export.buffer_names import BACKWARD, KERNELS, remark, words_for
from postlude.export.cuda import cuda_text, launch_lines
from postlude.export.device.kernels import CutKernel, cut_kernel, written_places
from postlude.export.device.library import Kernel
from postlude.export.device.sizes import common
from postlude.export.syntax.layout import WIDTH, comment, laid_out
from postlude.export.torch_text import VIEWS, TorchText
from postlude.plan.program import (
    Buffer,
    Call,
    CppCall,
    CudaCall,
    Descriptor,
    KernelCall,
    Program,
    TorchCall,
    buffers_in,
    live,
)

_SHORT = 32  # characters of an expression that may be part of another


@dataclass
class ProgramText:
    """Text of a program's forward and backward pass, and the device functions that they launch."""

    program: Program
    slots: Mapping[int, str]
    reserved: tuple[str, ...] = ()
    indent: int = 4
    joins: bool = True  # an expression of PyTorch that is read once, directly afterwards, becomes part of its reader
    functions: dict[str, Kernel] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # CUDA C++, by the name of its constant
    source: str = "SOURCE"  # with which those names begin

    def __post_init__(self) -> None:
        self.words = words_for(self.program, self.slots, self.reserved)
        self.cuts: dict[int, tuple[CutKernel, str]] = {}
        self.source_names: dict[int, str] = {}
        forward = self._cut(self.program.forward, is_backward=False)
        backward = self._cut(self.program.backward, is_backward=True)
        self.program = replace(self.program, forward=forward, backward=backward, also_kept=())

    def forward_lines(self, kept: Sequence[Buffer] = ()) -> list[str]:
        """The forward pass: up to the result and what is kept for the backward pass."""
        return self._lines(self.program.forward, [self.program.result, *kept], self.program.given[0])

    def backward_lines(self) -> list[str]:
        """The backward pass. What only the gradient of input or weight needs is computed only if that is needed."""
        assert self.program.gradient is not None
        found = {slot: grad for slot, grad in enumerate(self.program.gradients) if grad is not None}
        guards = self._guards(live(self.program.backward, found.values()), found)
        return self._lines(self.program.backward, list(found.values()), self.program.gradient, guards)

    def _guards(self, calls: Sequence[Call], found: Mapping[int, Buffer]) -> dict[int, str]:
        """By a call's identity: the condition under which a needed gradient depends on it."""
        needed: dict[int, set[int]] = {}  # by storage, the slots whose gradient depends on it
        for slot, grad in found.items():
            needed.setdefault(grad.storage, set()).add(slot)
        guards = {}
        for call in reversed(calls):
            slots = set[int]().union(*(needed.get(buffer.storage, set()) for buffer in self._written(call)))
            for buffer in buffers_in(call):
                needed.setdefault(buffer.storage, set()).update(slots)
            if slots and slots <= {0, 1}:
                guards[id(call)] = " or ".join(f"needs[{slot}]" for slot in sorted(slots))
        return guards

    def _written(self, call: Call) -> list[Buffer]:
        if isinstance(call, TorchCall):
            changed = list(buffers_in(call.arguments[:1])) if call.changes_its_argument else []
            return [*changed, *(buffer for buffer in call.results if buffer is not None)]
        if isinstance(call, CudaCall):
            return list(call.arguments[3:])
        cut, _ = self.cuts[id(call)]
        places = written_places(cut.kernel)
        return [a for n, a in enumerate(cut.arguments) if isinstance(a, Buffer) and n in places]

    def _cut(self, calls: Iterable[Call], is_backward: bool) -> tuple[Call, ...]:
        """The calls with specialised kernels and only the arguments that these read."""
        made: list[Call] = []
        for call in calls:
            if isinstance(call, KernelCall):
                name = KERNELS.get(call.kernel, call.kernel)
                cut = cut_kernel(call, self.words, self.slots, name)
                cut = self._without_clash(cut, BACKWARD.get(call.kernel, name) if is_backward else name)
                call = replace(call, arguments=cut.arguments, parameters=cut.kernel.parameters)
                self.cuts[id(call)] = (cut, cut.kernel.name)
            if isinstance(call, CudaCall):
                name = f"{self.source}{'_GRADIENT' * is_backward}"
                before = self.sources.get(name, "")
                self.sources[name] = "\n".join(filter(None, [before, cuda_text(call, before)]))
                self.source_names[id(call)] = name
            made.append(call)
        return tuple(made)

    def _without_clash(self, cut: CutKernel, other: str) -> CutKernel:
        """The kernel, renamed if the file has a different function of that name; equal functions are shared."""
        for place, name in enumerate(function.name for function in cut.functions):
            word = other if name == cut.kernel.name else name
            for new in (name, word, *(f"{word}_{n}" for n in range(2, 99))):
                made = cut if new == name else cut.renamed(name, new)
                one = self.functions.setdefault(new, made.functions[place])
                if one == made.functions[place]:
                    cut, self.functions[new] = made, common(one, made.functions[place])
                    break
        return cut

    def _lines(
        self, calls: Sequence[Call], ends: Sequence[Buffer], first: Buffer, guards: Mapping[int, str] | None = None
    ) -> list[str]:
        calls, guards = live(calls, ends), guards or {}
        uses = Counter(buffer.number for call in calls for buffer in buffers_in(call))
        uses.update(buffer.number for buffer in ends)
        text = TorchText(self.words, first)
        lines: list[str] = []
        guard, pad = "", self.indent
        for call, after in zip(calls, [*calls[1:], None]):
            if isinstance(call, TorchCall) and self._is_inlined(text, call, after, uses, ends):
                assert call.results[0] is not None
                text.words[call.results[0].number] = text.expression(call)
                continue
            before, guard = guard, guards.get(id(call), "")
            if guard and guard != before:
                lines.append(f"{' ' * pad}if {guard}:")
            self.indent = pad + 4 if guard else pad
            if isinstance(call, TorchCall):
                lines += self._torch(text, call, uses)
            else:
                assert not isinstance(call, CppCall)  # exported files are for GPUs
                lines += [line for words in [remark(call)] if words for line in comment(words, self.indent)]
                lines += self._launch(text, call)
        self.indent = pad
        return lines

    def _is_inlined(
        self, text: TorchText, call: TorchCall, after: Call | None, uses: Mapping[int, int], ends: Sequence[Buffer]
    ) -> bool:
        """Whether a value is written where it is read: if read once, and as a view or part of a short expression."""
        result, name = call.results[0], call.function.rpartition(".")[2]
        if len(call.results) != 1 or result is None or call.changes_its_argument:
            return False
        if uses[result.number] != 1 or result in ends:
            return False
        if name in VIEWS:
            return True
        if not self.joins or call.function in ("torch.empty", "torch.zeros", "torch.empty_like"):
            return False
        is_next = isinstance(after, TorchCall) and not after.changes_its_argument and result in buffers_in(after)
        return is_next and len(text.expression(call)) <= _SHORT

    def _torch(self, text: TorchText, call: TorchCall, uses: Mapping[int, int]) -> list[str]:
        expression = text.expression(call)
        pad = " " * self.indent
        if call.changes_its_argument:
            return [f"{pad}{expression}"]
        words = [text.words[b.number] if b is not None and uses[b.number] else "_" for b in call.results]
        if words[1:] == ["_"]:  # the values of a pair
            return [f"{pad}{words[0]} = {expression}.values"]
        return [f"{pad}{', '.join(words)} = {expression}"]

    def _launch(self, text: TorchText, call: KernelCall | CudaCall) -> list[str]:
        if isinstance(call, CudaCall):
            name, words = self.source_names[id(call)], [text.value(buffer) for buffer in call.arguments]
            return [f"{' ' * self.indent}{line}" for line in launch_lines(call, name, words, text.value(text.first))]
        cut, name = self.cuts[id(call)]
        arguments = []
        made: dict[tuple[str, ...], dict[str, str]] = {}  # descriptors by what they have in common
        for word, value in zip(cut.kernel.parameters, call.arguments):
            if isinstance(value, Descriptor):
                common = tuple(str(list(part)) for part in (value.shape, value.strides, value.block))
                made.setdefault(common, {})[word] = text.value(value.buffer)
            arguments.append(word if isinstance(value, Descriptor) else text.value(value))
        lines = [line for common, words in made.items() for line in self._descriptors(words, common)]
        grid = call.grid
        while len(grid) > 1 and grid[-1] == 1:
            grid = grid[:-1]
        warps = [f"num_warps={call.warps}"] if call.warps != 4 else []
        return [*lines, *laid_out(f"{name}[{text.value(grid)}]", [*arguments, *warps], indent=self.indent)]

    def _descriptors(self, words: Mapping[str, str], common: Sequence[str]) -> list[str]:
        """Descriptors that differ only in their tensor, by their names."""
        if len(words) > 1:
            each, given = ", ".join(["plane", *common]), ", ".join(words.values())
            line = f"{' ' * self.indent}{', '.join(words)} = (TensorDescriptor({each}) for plane in ({given}))"
            if len(line) <= WIDTH:
                return [line]
        made = [("TensorDescriptor", [value, *common], f"{word} = ") for word, value in words.items()]
        return [line for name, parts, before in made for line in laid_out(name, parts, before, indent=self.indent)]

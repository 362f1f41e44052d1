"""Problem files in KernelBench's format: `Model`, `get_inputs()`, `get_init_inputs()`.

A candidate has `ModelNew` instead of `Model`. A file that cannot be used raises a `ProblemFileError` of one sentence.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from postlude.errors import ProblemFileError, first_line

T = TypeVar("T")
_numbers = itertools.count()


@dataclass(frozen=True)
class ProblemFile:
    """A file that was executed and has the model class; nothing in it has been called yet."""

    path: Path
    module: types.ModuleType
    model_class: type[nn.Module]

    def build(self, device: str = "cpu", *, seed: int = 0, like: ProblemFile | None = None) -> nn.Module:
        """The model, with parameters drawn under `seed`. A candidate is built with the arguments of `like`."""
        args, kwargs = (like or self).init_arguments(seed)
        what = f"{self.model_class.__name__}.__init__"
        with _seeded(seed):
            return self._call(what, lambda: self.model_class(*args, **kwargs).to(device))

    def inputs(self, device: str = "cpu", *, seed: int = 0) -> tuple[Any, ...]:
        """The result of `get_inputs()` under `seed`, with tensors moved to the device."""
        made = self._function("get_inputs", seed)
        if not isinstance(made, (list, tuple)):
            raise self._error(f"get_inputs() must return a list or a tuple, not {_a(type(made))}.")
        if not any(isinstance(item, Tensor) for item in made):
            raise self._error("get_inputs() returns no tensor.")
        move = lambda item: item.to(device) if isinstance(item, Tensor) else item  # noqa: E731
        return self._call("moving the inputs to the device", lambda: tuple(map(move, made)))

    def with_sizes(self, **sizes: int) -> ProblemFile:
        """The same file with other values for its module-level sizes (`batch_size`, `depth`, …)."""
        for name, size in sizes.items():
            if not hasattr(self.module, name):
                raise self._error(f"it has no size named {name}.")
            setattr(self.module, name, size)
        return self

    def run(self, model: nn.Module, inputs: tuple[Any, ...], takes_several: bool = False) -> Tensor:
        """One forward pass without gradients, which must return one tensor; or several, of which this is the first."""
        name = type(model).__name__
        with torch.no_grad(), _seeded(0):
            result = self._call(f"{name}.forward", lambda: model(*inputs))
        if isinstance(result, Tensor):
            return result
        first = next((item for item in tree_leaves(result) if isinstance(item, Tensor)), None)
        if takes_several and first is not None:
            return first
        size = f" of {len(result)}" if isinstance(result, (tuple, list, dict)) else ""
        raise self._error(f"{name} returns {_a(type(result))}{size}; this command takes models that return one tensor.")

    def init_arguments(self, seed: int = 0) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of the model's constructor, positional and by name."""
        if not hasattr(self.module, "get_init_inputs"):
            return [], {}
        made = self._function("get_init_inputs", seed)
        if isinstance(made, dict):
            return [], made
        if not isinstance(made, (list, tuple)):
            raise self._error(f"get_init_inputs() must return a list or a tuple, not {_a(type(made))}.")
        is_pair = len(made) == 2 and isinstance(made[0], (list, tuple)) and isinstance(made[1], dict)
        if is_pair and not self._takes(*made):  # KernelBench passes the items of the list, whatever they are
            return list(made[0]), made[1]
        return list(made), {}

    def _takes(self, *args: Any) -> bool:
        """Whether the model can be built with these; tried without memory."""
        try:
            with _seeded(0), torch.device("meta"):
                self.model_class(*args)
        except Exception:  # the file's own code may raise anything
            return False
        return True

    def _function(self, name: str, seed: int) -> Any:
        function = getattr(self.module, name, None)
        if not callable(function):
            raise self._error(f"it has no function {name}().")
        with _seeded(seed):
            return self._call(f"{name}()", function)

    def _call(self, what: str, function: Callable[[], T]) -> T:
        try:
            return function()
        except (Exception, SystemExit) as error:  # the file's own code may raise anything
            raise self._error(f"{what} raises {first_line(error)}.") from error

    def _error(self, sentence: str) -> ProblemFileError:
        return ProblemFileError(f"{self.path}: {sentence}")


def load(path: str | Path, class_name: str = "Model") -> ProblemFile:
    """Executes the file as a module and finds `class_name` in it."""
    path = Path(path)
    module = _execute(path, _compile(path, _read(path)))
    model_class = getattr(module, class_name, None)
    if model_class is None:
        raise ProblemFileError(f"{path}: it has no class {class_name} ({_classes_of(module)}).")
    if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
        raise ProblemFileError(f"{path}: {class_name} is not a subclass of torch.nn.Module.")
    if class_name == "Model" and not callable(getattr(module, "get_inputs", None)):
        raise ProblemFileError(f"{path}: it has no function get_inputs().")
    return ProblemFile(path, module, model_class)


def check_candidate(path: str | Path) -> None:
    """Raises if something is obviously wrong with a candidate's file, without running any of it."""
    path = Path(path)
    source = _read(path)
    _compile(path, source)
    tree = ast.parse(source)
    names = {name for node in ast.walk(tree) for name in _bound_by(node)}
    if not names & {"ModelNew", "*"}:
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        has = f"it has {', '.join(classes)}" if classes else "it has no classes at all"
        raise ProblemFileError(f"{path}: it has no class ModelNew ({has}).")


def _bound_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(alias.asname or alias.name) for alias in node.names]
    return []


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds random numbers, and restores the caller's state afterwards, without initializing CUDA."""
    started = torch.cuda.is_initialized()
    devices = range(torch.cuda.device_count()) if started else ()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def _read(path: Path) -> str:
    try:
        if path.is_dir():
            raise ProblemFileError(f"{path}: this is a directory, not a Python file.")
        if path.exists() and not path.is_file():
            raise ProblemFileError(f"{path}: this is not a regular file.")
        data = path.read_bytes()
    except FileNotFoundError:
        raise ProblemFileError(f"{path}: there is no such file.") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise ProblemFileError(f"{path}: it cannot be read ({getattr(error, 'strerror', None) or error}).") from None
    if not data.strip():
        raise ProblemFileError(f"{path}: the file is empty.")
    if b"\0" in data:
        raise ProblemFileError(f"{path}: the file is binary, not Python source.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ProblemFileError(f"{path}: the file is not UTF-8 text (line {line}).") from None


def _compile(path: Path, source: str) -> types.CodeType:
    try:
        return compile(source, str(path.resolve()), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise ProblemFileError(f"{path}: syntax error in line {error.lineno}: {error.msg}.") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ProblemFileError(f"{path}: it cannot be compiled ({first_line(error)}).") from error


def _execute(path: Path, code: types.CodeType) -> types.ModuleType:
    stem = re.sub(r"\W", "_", path.stem)
    module = types.ModuleType(f"postlude_problem_{next(_numbers)}_{stem}")
    module.__file__ = code.co_filename
    sys.modules[module.__name__] = module  # inspect, pickle and Triton look modules up there
    folder = str(Path(code.co_filename).parent)
    sys.path.append(folder)  # at the end, so that a neighbouring file cannot hide an installed package
    try:
        exec(code, module.__dict__)
    except (Exception, SystemExit) as error:  # the file's own code may raise anything
        del sys.modules[module.__name__]
        what = "an import fails" if isinstance(error, ImportError) else "running the file fails"
        where = _line_in(code.co_filename, error)
        raise ProblemFileError(f"{path}: {what}{where}: {first_line(error)}.") from error
    finally:
        if folder in sys.path:
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(folder)]
    return module


def _line_in(filename: str, error: BaseException) -> str:
    """The last line of the file itself in the error's traceback."""
    lines, trace = [], error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == filename:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f" in line {lines[-1]}" if lines else ""


def _classes_of(module: types.ModuleType) -> str:
    found = [
        name for name, item in vars(module).items() if isinstance(item, type) and item.__module__ == module.__name__
    ]
    return f"it has {', '.join(found)}" if found else "it has no classes at all"


def _a(kind: type) -> str:
    return "None" if kind is type(None) else f"{'an' if kind.__name__[0] in 'aeio' else 'a'} {kind.__name__}"

"""Runs exported files where Postlude cannot be imported: a program for a process of its own.

    python alone.py FOLDER

FOLDER has cases.pt: for each case its file, state, inputs, result and tolerance. Everything wrong is printed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any


class Blocked:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] == "postlude":
            raise ImportError("an exported file must not import postlude")


sys.meta_path.insert(0, Blocked())  # type: ignore[arg-type]
import torch  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1]))
import interpreter  # noqa: E402

sys.path.pop(0)


def load(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def use_host_kernels(module: types.ModuleType, libraries: dict[str, str]) -> None:
    """The CUDA C++ of a file as it was compiled for the host, in place of a card's."""

    def compiled(source: str, name: str, shared_bytes: int, device: int | None) -> Any:
        run = ctypes.CDLL(libraries[name]).launch

        def kernel(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...], shared: int = 0) -> None:
            values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
            slots = (ctypes.c_int64 * len(values))(*values)
            assert run(*grid[:2], block[0], slots, len(values)) == 0

        return kernel

    module.compiled = compiled  # type: ignore[attr-defined]


def check(case: dict[str, Any], folder: Path) -> list[str]:
    module = load(folder / case["file"])
    model = module.ModelNew(*case["arguments"]).to(case["inputs"][0].dtype)
    if case["is_last"]:
        model = model.to(memory_format=torch.channels_last)
    model.load_state_dict(case["state"])
    wrong = compared("PyTorch's operators", model(*case["inputs"]), case)
    launched: list[str] = []
    module.fits = lambda *tensors: launched.append("") is None  # type: ignore[attr-defined]
    if case["libraries"]:
        use_host_kernels(module, case["libraries"])
    model.load_state_dict(case["state"])  # running statistics have moved
    wrong += check_gradients(model, case)
    wrong += [
        f"{name} has become something else" for name, value in case["after"].items() if not same(model, name, value)
    ]
    if len(launched) != case["chains"]:
        wrong.append(f"{len(launched)} chains asked whether their tensors fit, not {case['chains']}")
    if case["is_quick"]:
        model.load_state_dict(case["state"])
        with torch.no_grad():
            wrong += compared("its kernels without gradients", model(*case["inputs"]), case)
        wrong += check_some_gradients(model, case) + check_twice(model, case)
    return [f"{case['file']}: {sentence}" for sentence in wrong]


def same(model: torch.nn.Module, name: str, value: torch.Tensor) -> bool:
    return torch.allclose(model.get_buffer(name).double(), value.double(), rtol=1e-2, atol=1e-4)


def compared(name: str, result: torch.Tensor, case: dict[str, Any]) -> list[str]:
    error = float((result.double() - case["result"]).abs().max())
    if result.shape != case["result"].shape or not error <= case["tolerance"]:
        return [f"{name}: an error of {error:.1e}, allowed are {case['tolerance']:.1e}"]
    return []


def check_gradients(model: torch.nn.Module, case: dict[str, Any]) -> list[str]:
    """The kernels under autograd: the result's sum of squares sends back twice the result."""
    model.zero_grad()
    leaves = [item.detach().clone().requires_grad_() for item in case["inputs"]]
    result = model(*leaves)
    wrong = compared("its kernels", result, case)
    result.square().sum().backward()
    found = {**{str(n): leaf.grad for n, leaf in enumerate(leaves)}, **{n: p.grad for n, p in model.named_parameters()}}
    largest = max(float(expected.abs().max()) for expected in case["gradients"].values())  # some are 0 before a norm
    for name, expected in case["gradients"].items():
        if found[name] is None:
            wrong.append(f"the gradient of {name} is missing")
            continue
        error = float((found[name].double() - expected).abs().max()) / largest
        if not error <= 10 * case["tolerance"]:
            wrong.append(f"the gradient of {name}: an error of {error:.1e}")
    return wrong


def check_some_gradients(model: torch.nn.Module, case: dict[str, Any]) -> list[str]:
    """Where only parameters need a gradient, and where only the input does."""
    wrong = []
    for is_input in (False, True):
        model.zero_grad()
        model.requires_grad_(not is_input)
        leaves = [item.detach().clone().requires_grad_(is_input) for item in case["inputs"]]
        model(*leaves).square().sum().backward()
        found = {"0": leaves[0].grad} if is_input else {n: p.grad for n, p in model.named_parameters()}
        for name, grad in found.items():
            expected = case["gradients"][name]
            error = float((grad.double() - expected).abs().max() / expected.abs().max().clamp(min=1.0))
            if not error <= 10 * case["tolerance"]:
                wrong.append(f"the gradient of {name}, where not all are wanted: an error of {error:.1e}")
    model.requires_grad_(True)
    return wrong


def check_twice(model: torch.nn.Module, case: dict[str, Any]) -> list[str]:
    """The gradient of a gradient: PyTorch's where the file's backward pass is PyTorch's, else a clear error."""
    leaf = case["inputs"][0].detach().clone().requires_grad_()
    (first,) = torch.autograd.grad(model(leaf).square().sum(), leaf, create_graph=True)
    try:
        first.square().sum().backward()
    except RuntimeError as error:
        is_clear = case["trains"] and "once_differentiable" in str(error)
        return [] if is_clear else [f"a second gradient raises {error}"]
    if case["trains"] or leaf.grad is None:
        return ["a second gradient raises nothing"]
    error = float((leaf.grad.double() - case["second"]).abs().max() / case["second"].abs().max())
    return [] if error <= 1e-3 else [f"the second gradient: an error of {error:.1e}"]


if __name__ == "__main__":
    interpreter.make_fast()
    where = Path(sys.argv[1])
    cases = torch.load(where / "cases.pt", weights_only=True)
    print(*[sentence for case in cases for sentence in check(case, where)], sep="\n", end="")
    assert not any(name.split(".")[0] == "postlude" for name in sys.modules)

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

    def compiled(name: str, device: int | None) -> Any:
        run = ctypes.CDLL(libraries[name]).launch

        def kernel(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...], shared: int = 0) -> None:
            values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
            slots = (ctypes.c_int64 * len(values))(*values)
            assert run(*grid[:2], block[0], slots, len(values)) == 0

        return kernel

    module.compiled = compiled  # type: ignore[attr-defined]
    module.moments_kernel = lambda device: compiled("few_channels_moments", device)  # type: ignore[attr-defined]
    torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(multi_processor_count=2)


def check(case: dict[str, Any], folder: Path) -> list[str]:
    module = load(folder / case["file"])
    model = module.ModelNew(*case["arguments"]).to(case["inputs"][0].dtype)
    model.load_state_dict(case["state"])
    wrong = []
    results = {"PyTorch's operators": model(*case["inputs"])}
    results["PyTorch's operators"].float().sum().backward()
    if any(parameter.grad is None for parameter in model.parameters()):
        wrong.append("a parameter has no gradient")
    model.load_state_dict(case["state"])  # running statistics have moved
    launched: list[str] = []
    module.fits = lambda *tensors: launched.append("") is None  # type: ignore[attr-defined]
    if case["libraries"]:
        use_host_kernels(module, case["libraries"])
    with torch.no_grad():
        results["its kernels"] = model(*case["inputs"])
    if case["gradients"]:
        wrong += check_gradients(model, case)
    if len(launched) != case["chains"] * (2 if case["gradients"] else 1):
        wrong.append(f"{len(launched)} chains asked whether their tensors fit, not {case['chains']}")
    for name, result in results.items():
        error = float((result.double() - case["result"]).abs().max())
        if result.shape != case["result"].shape or not error <= case["tolerance"]:
            wrong.append(f"{name}: an error of {error:.1e}, allowed are {case['tolerance']:.1e}")
    return [f"{case['file']}: {sentence}" for sentence in wrong]


def check_gradients(model: torch.nn.Module, case: dict[str, Any]) -> list[str]:
    """The kernels under autograd: the result's sum of squares sends back twice the result."""
    model.zero_grad()
    leaves = [item.detach().requires_grad_() for item in case["inputs"]]
    model(*leaves).square().sum().backward()
    found = {**{str(n): leaf.grad for n, leaf in enumerate(leaves)}, **{n: p.grad for n, p in model.named_parameters()}}
    wrong = []
    largest = max(float(expected.abs().max()) for expected in case["gradients"].values())  # some are 0 before a norm
    for name, expected in case["gradients"].items():
        error = float((found[name].double() - expected).abs().max()) / largest
        if not error <= 10 * case["tolerance"]:
            wrong.append(f"the gradient of {name}: an error of {error:.1e}")
    return wrong


if __name__ == "__main__":
    where = Path(sys.argv[1])
    cases = torch.load(where / "cases.pt", weights_only=True)
    print(*[sentence for case in cases for sentence in check(case, where)], sep="\n", end="")
    assert not any(name.split(".")[0] == "postlude" for name in sys.modules)

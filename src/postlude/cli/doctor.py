"""`postlude doctor`: checks whether this machine is set up well, and says what to change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from postlude import hardware
from postlude.cli.frame import DONE, NO, Answer, Settings
from postlude.cli.output import say, show_table, working
from postlude.cli.session import machine_data
from postlude.errors import PostludeError, first_line
from postlude.pipeline import optimize
from postlude.report import words
from postlude.run import cache

OLDEST_TORCH = (2, 11)
TUNED_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}


@dataclass(frozen=True)
class Finding:
    what: str
    found: str
    state: str  # "good", "note" (could be better) or "bad"
    advice: str = ""


def doctor(settings: Settings, clear: bool = False) -> Answer:
    if clear:
        return _clear()
    with working("Looking at this machine and running a self-test"):
        findings = [*_software(), *_machine(settings), *_torch_compile(settings), _self_test(settings)]
    show_table(["", "found", "", "what to change"], [[f.what, f.found, f.state, f.advice] for f in findings])
    bad = [finding.what for finding in findings if finding.state == "bad"]
    say(f"Bad: {', '.join(bad)}." if bad else "All well.", "bold")
    data = {"findings": [asdict(finding) for finding in findings]}
    return Answer(NO if bad else DONE, {**machine_data(settings), **data})


def _clear() -> Answer:
    folder = hardware.cache_folder()
    try:
        files, size = cache.clear_cache()
    except OSError as error:
        raise PostludeError(f"the cache in {folder} could not be cleared: {error.strerror}.") from error
    say(
        f"Deleted {files} compiled kernels and tables of tiles ({words.size(size)}) from {folder}."
        if files
        else "There was nothing to clear."
    )
    return Answer(DONE, {"cleared": {"folder": str(folder), "files": files, "bytes": size}})


def _software() -> Iterator[Finding]:
    found = hardware.versions()
    for name in ("postlude", "python", "system"):
        yield Finding(name, found[name], "good")
    release = tuple(int(part) for part in found["torch"].split("+")[0].split(".")[:2])
    old = release < OLDEST_TORCH
    advice = f"install torch {'.'.join(map(str, OLDEST_TORCH))} or newer" if old else ""
    yield Finding("torch", found["torch"], "bad" if old else "good", advice)


def _machine(settings: Settings) -> Iterator[Finding]:
    yield Finding("cpu", hardware.cpu_name(), "good")
    yield Finding("last-level cache", words.size(hardware.last_level_cache_bytes()), "good")
    yield _threads()
    if settings.device == "cuda":
        yield from _gpu()
        yield _tiles()
        return
    tuned = hardware.malloc_is_tuned()
    export = " ".join(f"{name}={value}" for name, value in TUNED_MALLOC.items())
    yield Finding(
        "malloc",
        "tuned" if tuned else "the system's",
        "good" if tuned else "note",
        "" if tuned else f"eager and Postlude are both faster under: export {export}",
    )


def _threads() -> Finding:
    threads = hardware.machine_for("cpu").threads
    cores = hardware.usable_cores()
    if threads > cores:
        return Finding("threads", f"{threads} on {cores} cores", "bad", f"set OMP_NUM_THREADS={cores}")
    return Finding("threads", f"{threads} on {cores} cores", "good")


def _gpu() -> Iterator[Finding]:
    name, card = hardware.versions()["gpu"], hardware.machine_for("cuda").card
    if not card.is_served:
        yield Finding("gpu", name, "bad", "Postlude needs an NVIDIA card of Ampere or newer; use --device cpu")
        return
    yield Finding("gpu", name, "good")
    advice = "" if card.is_measured else "`postlude tune FILE.py` measures the tiles of your model on this card"
    yield Finding("card", str(card), "good" if card.is_measured else "note", advice)


def _tiles() -> Finding:
    found = hardware.found_tiles()
    rows = len(found.table.rows)
    tuned = f"{rows} tuned on this card" if rows else "as shipped"
    if found.problem is None:
        return Finding("tiles", tuned, "good")
    return Finding("tiles", f"{tuned}; of tuned ones, {found.problem}", "note", hardware.TILES_ADVICE)


def _torch_compile(settings: Settings) -> Iterator[Finding]:
    compiler = hardware.cpp_compiler()
    needs = settings.device == "cpu"
    advice = (
        "install g++ or clang++: Postlude then compiles its CPU kernels, twice as fast on norms, in training as well"
    )
    state = "note" if compiler is None and needs else "good"
    yield Finding("C++ compiler", compiler or "none", state, advice if state == "note" else "")
    yield _triton(settings)
    listed = "postlude" in torch.compiler.list_backends(exclude_tags=())
    advice = "" if listed else "install the package (pip install .) so that torch finds the backend by its name"
    state = "good" if listed else "bad"
    yield Finding('torch.compile(backend="postlude")', "registered" if listed else "unknown to torch", state, advice)


def _triton(settings: Settings) -> Finding:
    version = hardware.versions()["triton"]
    if settings.device != "cuda" or hardware.can_compile():
        return Finding("Triton", version, "good")
    if not hardware.has_triton():
        return Finding("Triton", version, "bad", "pip install 'postlude[gpu]'")
    advice = "install gcc or clang, or name a C compiler in CC: Triton builds what launches its kernels with it"
    return Finding("Triton", f"{version}, without a C compiler", "bad", advice)


class _Tiny(nn.Module):
    """A chain of the kind that Postlude fuses, small enough for any machine."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv3d(3, 8, 3), nn.GroupNorm(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.relu(self.conv(x)))  # type: ignore[no-any-return]


def _self_test(settings: Settings) -> Finding:
    name = "self-test"
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = _Tiny().to(settings.device)
        inputs = (torch.randn(2, 3, 8, 8, 8, device=settings.device),)
        try:
            result = optimize(model, inputs, rest="eager")
        except Exception as error:  # any error is a finding
            return Finding(name, first_line(error), "bad", "run postlude doctor --debug and report what it prints")
    if result.failure is not None:
        return Finding(name, f"not captured: {result.failure}", "bad", "report this with the versions above")
    if not result.sites:
        return Finding(name, "no chain was found", "bad", "report this with the versions above")
    verdict = result.verdict
    if verdict is not None and not verdict.right:
        return Finding(name, str(verdict), "bad", "report this with the versions above")
    return Finding(name, "a chain was found and is right" if verdict else "a chain was found", "good")

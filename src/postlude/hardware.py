"""The only file that queries the machine. Every answer is lazy and cached; nothing is queried at import."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from postlude.cards import NO_CARD, Card, card_for
from postlude.code_hash import kernel_hash
from postlude.host_memory import available_host_bytes
from postlude.tile_table import NO_TILES, Key, TileTable, read_tables
from postlude.tile_table import Found as FoundTiles


@dataclass(frozen=True)
class Machine:
    """The facts that planning needs, as a value, so that a plan can be tested for any machine."""

    device: str  # torch's device type
    threads: int  # multiprocessors on a GPU
    cache_bytes: int  # last-level cache
    has_triton: bool
    has_onednn: bool = False
    maps_large_buffers: bool = True  # the allocator returns large buffers to the system and maps them again
    # Norms and pools whose result is channels-last if their input is.
    keeping_layout: frozenset[str] = frozenset({"group_norm", "batch_norm", "max_pool2d", "max_pool3d", "avg_pool2d"})
    card: Card = NO_CARD  # of a GPU; `machine_on` makes the machine of a card
    has_nvrtc: bool = False
    compiles_cpp: bool = False  # kernels in C++ for the CPU
    tiles: TileTable = NO_TILES  # tuned by the user on this card


def machine_on(card: Card, *, has_triton: bool = True, has_nvrtc: bool = True, **facts: Any) -> Machine:
    """A machine with this card, which need not be present."""
    sizes = (card.multiprocessors, card.l2_bytes)
    return Machine("cuda", *sizes, has_triton=has_triton, has_nvrtc=has_nvrtc, card=card, **facts)


def machine_for(device: torch.device | str) -> Machine:
    """The facts about a device. Each GPU of a machine has its own; "cuda" is the current one."""
    where = torch.device(device)
    if where.type != "cuda":
        return _machine(where.type, 0)
    return _machine("cuda", torch.cuda.current_device() if where.index is None else where.index)


@functools.cache
def _machine(device_type: str, index: int) -> Machine:
    if device_type == "cuda":
        return machine_on(
            _card(torch.cuda.get_device_properties(index)),
            has_triton=has_triton(),
            has_nvrtc=has_nvrtc(),
            keeping_layout=keeping_layout(f"cuda:{index}"),
            tiles=tuned_tiles(index),
        )
    if device_type != "cpu":
        return Machine(device_type, 0, 0, has_triton=False)  # nothing of ours runs there, so nothing is queried
    facts = (torch.get_num_threads(), last_level_cache_bytes(), has_triton(), has_onednn(), not malloc_is_tuned())
    return Machine(device_type, *facts, keeping_layout(device_type), compiles_cpp=why_no_cpp() is None)


def _card(found: Any) -> Card:
    # Clocks are in kHz, and memory transfers two words per cycle. Old drivers report 0.
    clock, memory = (getattr(found, name, 0) * 1e3 for name in ("clock_rate", "memory_clock_rate"))
    shared = int(getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block))
    sizes = (found.multi_processor_count, shared, found.L2_cache_size)
    bandwidth = 2 * memory * getattr(found, "memory_bus_width", 0) / 8
    return card_for(str(getattr(found, "name", "")), _architecture(found), sizes, clock, bandwidth)


def _architecture(card: Any) -> str:
    """The architecture's name. ROCm also calls its devices "cuda" and numbers them (9.4), so its own name is used."""
    if torch.version.hip is not None:
        return str(getattr(card, "gcnArchName", "an AMD card")).split(":")[0]
    return f"sm_{card.major}{card.minor}"


def keeping_layout(device: str) -> frozenset[str]:
    """The operators that keep channels-last. It differs by device and version, so each runs once on a small tensor."""
    x = torch.ones(2, 4, 4, 4, 4, device=device).to(memory_format=torch.channels_last_3d)
    pools = {"2d": x[:, :, 0].contiguous(memory_format=torch.channels_last), "3d": x}
    results = {
        "group_norm": F.group_norm(x, 2),
        "instance_norm": F.instance_norm(x),
        "batch_norm": F.batch_norm(x, None, None, training=True),
        "layer_norm": F.layer_norm(x, x.shape[-1:]),
        **{f"{op}_pool{n}": getattr(F, f"{op}_pool{n}")(y, 2) for n, y in pools.items() for op in ("max", "avg")},
    }
    return frozenset(name for name, result in results.items() if not result.is_contiguous())


def available_bytes(device: torch.device | str) -> float:
    """Memory that can still be allocated: on a GPU with what PyTorch's allocator has cached, on a CPU within the limits
    of containers; infinite where the system does not say it."""
    if torch.device(device).type != "cuda":
        return available_host_bytes(Path("/proc"), Path("/sys/fs/cgroup"))
    free, _ = torch.cuda.mem_get_info(device)
    return float(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def can_compile() -> bool:
    """Whether there is a C compiler for Triton's launchers, under one of the names that Triton looks for."""
    return has_triton() and any(shutil.which(name) for name in (os.environ.get("CC", ""), "gcc", "clang", "cl") if name)


def nvrtc_libraries() -> list[str]:
    """Paths to try for NVRTC, best first: next to torch's other CUDA packages, then the system's search path."""
    cuda = torch.version.cuda
    majors = sorted(("13", "12"), key=lambda major: cuda is None or not cuda.startswith(major))
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    folders = {"13": "cu13", "12": "cuda_nvrtc"}
    packaged = [root / folders[m] / "lib" / f"libnvrtc.so.{m}" for m in majors for root in roots]
    return [str(path) for path in packaged if path.exists()] + [f"libnvrtc.so.{m}" for m in majors]


def has_nvrtc() -> bool:
    """Whether CUDA C++ can be compiled at run time. Every CUDA build of torch includes NVRTC."""
    return torch.version.cuda is not None or Path(nvrtc_libraries()[0]).exists()


def has_onednn() -> bool:
    """Whether oneDNN runs CPU convolutions and can be called directly."""
    operators = hasattr(torch, "mkldnn_convolution") and hasattr(torch.ops.mkldnn, "_convolution_pointwise_")
    return torch.backends.mkldnn.is_available() and operators


def cpu_capability() -> str:
    return torch.backends.cpu.get_cpu_capability()


def cpp_compiler() -> str | None:
    """The C++ compiler that torch.compile would call on the CPU, or None."""
    named = os.environ.get("CXX")
    return next((found for name in (named, "g++", "clang++") if name and (found := shutil.which(name))), None)


VECTORS = ("AVX2", "AVX512")  # vector instructions with which the CPU's kernels were measured


def why_no_cpp() -> str | None:
    """Why C++ kernels cannot be used on the CPU, or None."""
    if os.environ.get("POSTLUDE_CPP") == "0":
        return "POSTLUDE_CPP=0 is set"
    if cpu_capability() not in VECTORS or not has_glibc():
        return "they need AVX2 or AVX-512, on Linux"
    return None if cpp_compiler() is not None else "there is no C++ compiler"


def threads() -> int:
    """PyTorch's current number of threads."""
    return torch.get_num_threads()


@functools.cache
def last_level_cache_bytes() -> int:
    """The size of core 0's largest cache; 8 MiB if the system does not report it."""
    sizes = []
    for entry in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = entry.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * unit)
    return max(sizes, default=8 << 20)


def usable_cores() -> int:
    """Cores that this process may use; only Linux reports them, elsewhere torch's threads are counted."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else torch.get_num_threads()


def load_average() -> float | None:
    """The load average of the last minute; None if the system does not report it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def has_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"


def malloc_is_tuned() -> bool:
    """Whether the environment keeps the C library from mapping and unmapping every large buffer."""
    return "MALLOC_MMAP_THRESHOLD_" in os.environ or "jemalloc" in os.environ.get("LD_PRELOAD", "")


def cache_folder() -> Path | None:
    """The cache folder; None for a user without a home folder."""
    named = os.environ.get("POSTLUDE_CACHE_DIR")
    if named:
        return Path(named)
    with suppress(RuntimeError):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "postlude"
    return None


def tile_key(index: int | None = None) -> Key:
    """What tuned tiles of this GPU, or the current one, depend on."""
    found, here = versions(), Path(__file__).parent
    programs = [here / f"{name}.py" for name in ("expressions", "steps", "reverse", "emit")]
    kernels = kernel_hash([here / "kernels", *programs])
    card = torch.cuda.get_device_name(index) if index is not None and "gpu" in found else found.get("gpu", "")
    return Key(card, found["torch"], found["triton"], kernels)


TILES_ADVICE = "`postlude tune FILE.py` makes new ones, `postlude doctor --clear-cache` deletes the old ones"


def found_tiles(index: int | None = None) -> FoundTiles:
    """The user's tuned tiles on disk for this GPU, or the current one, and which other files are there."""
    folder = cache_folder()
    with suppress(OSError):  # an unreadable folder counts as empty
        if folder is not None and next(folder.glob("tiles-*.json"), None) is not None:
            found = read_tables(folder, tile_key(index))
            return dataclasses.replace(found, foreign=found.foreign - _for_other_cards(folder, found))
    return FoundTiles(NO_TILES, (), (), 0)


def _for_other_cards(folder: Path, found: FoundTiles) -> int:
    """How many of the files are for another GPU of this machine; those are in order."""
    count = torch.cuda.device_count() if found.foreign and torch.cuda.is_available() else 0
    keys = {tile_key(index) for index in range(count)} if count > 1 else set()
    return len({file for key in keys for file in read_tables(folder, key).files} - set(found.files))


@functools.cache
def tuned_tiles(index: int | None = None) -> TileTable:
    """The user's tuned tiles. Read once per GPU, with one warning about tables that cannot be used."""
    found = found_tiles(index)
    if found.problem is not None:
        warnings.warn(f"Tuned tiles in {cache_folder()} are not used: {found.problem}; {TILES_ADVICE}.", stacklevel=2)
    return found.table


def clock_mhz(device_type: str) -> int | None:
    """The current clock of the GPU, or the mean over the CPU's cores; None if it is not reported."""
    if device_type == "cuda":
        try:
            return int(torch.cuda.clock_rate())
        except (ModuleNotFoundError, RuntimeError):  # NVML's Python package is not installed
            return None
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    clocks = [float(line.split(":", 1)[1]) for line in lines if line.startswith("cpu MHz")]
    return round(sum(clocks) / len(clocks)) if clocks else None


def default_fp32_precision(is_linear: bool = False) -> str:
    """PyTorch's current precision for fp32 convolutions, or matrix products, on a GPU: "tf32" or "fp32"."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    if hasattr(cudnn, "conv"):  # once the new switch was set, reading the old one raises
        return "tf32" if (matmul if is_linear else cudnn.conv).fp32_precision == "tf32" else "fp32"
    return "tf32" if (matmul if is_linear else cudnn).allow_tf32 else "fp32"


def has_tf32(device: torch.device | str) -> bool:
    """Whether a GPU has TF32. PyTorch's switches allow it on cards that have none as well; one that is not here counts
    as having it."""
    return not torch.cuda.is_available() or machine_for(device).card.is_served


def versions() -> dict[str, str]:
    """The versions on which a result depends, for reports and records."""
    found = {
        "postlude": _version("postlude"),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


@functools.cache
def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or 'unknown'} ({cpu_capability()})"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"

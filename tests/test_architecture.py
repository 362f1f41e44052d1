"""Who may import whom. This table and docs/layout.md say the same thing; this test keeps the listing true."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import postlude

ROOT = Path(postlude.__file__).parent

# Layer → the layers it may import. A name is a folder or a file of src/postlude.
MAY_IMPORT = {
    "amounts": set(),
    "errors": set(),
    "words": set(),
    "encoded": set(),
    "convolution": {"windows"},
    "windows": set(),
    "chain_steps": {"windows", "words"},
    "chain": {"chain_steps", "convolution", "encoded", "windows", "words"},
    "code_hash": set(),
    "tile_table": {"files"},
    "card_tiles": {"tile_table"},
    "cards": {"card_tiles"},
    "host_memory": set(),
    "hardware": {"cards", "code_hash", "host_memory", "tile_table"},
    "tested": {"hardware"},
    "files": {"errors"},
    "reference": {"chain"},
    "expressions": {"chain"},
    "steps": {"chain", "expressions"},
    "derivatives": {"chain", "expressions", "steps"},
    "reverse": {"chain", "derivatives", "expressions", "steps"},
    "emit": {"chain", "expressions", "steps"},
    "emit_cpp": {"chain", "emit", "expressions", "steps"},
    "kernels": set(),
    "export": {"cards", "chain", "errors", "graph", "hardware", "plan", "stages", "words"},
    # Not emit: nothing is decided by text. `Plan.program` is what the stages make of it.
    "plan": {"amounts", "stages", "card_tiles", "cards", "chain", "hardware", "reverse", "steps", "tile_table"},
    "moments": {"chain", "reference"},
    # Not hardware: a program is the plan's, whatever machine traces it.
    "stages": {
        "chain",
        "derivatives",
        "emit",
        "emit_cpp",
        "expressions",
        "kernels",
        "moments",
        "plan",
        "reference",
        "reverse",
        "steps",
    },
    # Not emit, reverse or steps: what runs is decided by then.
    "run": {
        "chain",
        "encoded",
        "errors",
        "files",
        "hardware",
        "kernels",
        "moments",
        "plan",
        "reference",
        "stages",
        "tile_table",
    },
    "graph": {"amounts", "chain", "code_hash", "errors", "hardware", "plan", "run", "tested", "windows", "words"},
    "check": {"chain", "code_hash", "errors", "files", "hardware", "reference", "windows"},
    "shown": set(),
    "functional": {"chain", "errors", "run"},
    "nn": {"errors", "graph", "plan", "run"},
    "report": {"chain", "check", "errors", "files", "hardware", "plan"},
    "site_check": {"chain", "check", "code_hash", "encoded", "files", "hardware", "plan", "run"},
    "optimized": {"chain", "check", "graph", "hardware", "plan", "report"},
    "pipeline": {"chain", "check", "errors", "graph", "hardware", "optimized", "run", "shown", "site_check"},
    "problem_file": {"errors", "hardware"},
    "problems": set(),
    "cli": {
        "cards",
        "chain",
        "check",
        "errors",
        "files",
        "export",
        "hardware",
        "nn",
        "optimized",
        "pipeline",
        "plan",
        "problem_file",
        "problems",
        "report",
        "run",
        "tile_table",
    },
    "__main__": {"cli"},
    "__init__": {"chain", "errors", "functional", "nn", "optimized", "pipeline"},
}


def _layer(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "postlude":
                found |= {alias.name for alias in node.names}
            elif node.module.startswith("postlude."):
                found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("postlude.")}
    return found


def _violations(files: dict[Path, set[str]]) -> list[str]:
    return [
        f"{path.name} ({_layer(path)}) imports {name}"
        for path, names in files.items()
        for name in names - {_layer(path), "__version__"}
        if name not in MAY_IMPORT[_layer(path)]
    ]


def test_imports_follow_the_table() -> None:
    files = {path: _imports(path) for path in ROOT.rglob("*.py")}
    assert {_layer(path) for path in files} == set(MAY_IMPORT)
    assert _violations(files) == []


def _beyond(package: str, text: str) -> list[str]:
    """Lines of a file in `package` that import another part of Postlude."""
    lines = (line for line in text.splitlines() if re.match(r"(from|import) postlude", line))
    return [line for line in lines if not line.startswith(f"from {package}")]


def test_work_on_syntax_trees_knows_no_kernels() -> None:
    package = "postlude.export.syntax"
    files = [*(ROOT / "export" / "syntax").glob("*.py")]
    found = [line for path in files for line in _beyond(package, path.read_text())]
    assert found == ["from postlude.plan.program import Word"]  # a constant that is put in as it stands
    assert _beyond(package, "from postlude.export.device import library") != []
    assert len(files) > 10


def _missing_from(page: str) -> list[str]:
    """Layers that a page does not name, and files that it names and nobody has."""
    layers = [layer for layer in MAY_IMPORT if not layer.startswith("__")]
    missing = [layer for layer in layers if f"`{layer}.py`" not in page and f"`{layer}/" not in page]
    return missing + [name for name in re.findall(r"`([\w/]+\.py)`", page) if not _is_there(name)]


def _is_there(name: str) -> bool:
    return (ROOT / name).exists() or (ROOT.parents[1] / name).exists() or bool(list(ROOT.rglob(f"*/{name}")))


def test_the_page_about_the_layout_names_every_layer_and_no_file_that_is_gone() -> None:
    page = (ROOT.parents[1] / "docs" / "layout.md").read_text()
    assert _missing_from(page) == []
    assert _missing_from(page.replace("`emit.py`", "`printer.py`")) == ["emit", "printer.py"]


def test_a_forbidden_import_is_seen() -> None:
    assert _violations({ROOT / "chain.py": {"hardware"}}) == ["chain.py (chain) imports hardware"]


def test_only_hardware_asks_the_machine() -> None:
    questions = (
        "cuda.is_available",
        "get_device_properties",
        "os.cpu_count",
        "get_num_threads",
        "/proc/",
        "shutil.which",
        "libc_ver",
        "sched_getaffinity",
        "get_device_capability",
        "get_device_name",
    )
    for path in ROOT.rglob("*.py"):
        if path.name != "hardware.py" and path.parent.name != "export":  # which writes files that ask for themselves
            text = path.read_text()
            assert [q for q in questions if q in text] == [], path.name


_CARDS = {"cards.py", "card_tiles.py"}
# The name of an architecture, or a comparison of one or of a compute capability.
_ARCHITECTURE = re.compile(r"sm_\d|(architecture|capability) *(==|!=|<|>)")


def _architectures(texts: dict[str, str]) -> list[str]:
    """Lines that decide by an architecture where a card's abilities should be asked; what comments say is their own."""
    return [
        f"{name}: {line.strip()}"
        for name, text in texts.items()
        for line in text.splitlines()
        if name not in _CARDS and _ARCHITECTURE.search(line.split("#")[0])
    ]


def test_only_cards_know_architectures() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.rglob("*.py")}
    exported = ["capability == ({major}, {minor})", "capability >= (8, 0)"]  # what exported files ask for themselves
    assert [line for line in _architectures(texts) if not any(part in line for part in exported)] == []


@pytest.mark.parametrize("line", ['if machine.card.architecture != "sm_90":', "if capability >= (9, 0):"])
def test_a_decision_by_an_architecture_is_seen(line: str) -> None:
    assert _architectures({"gpu.py": line, "cards.py": line}) == [f"gpu.py: {line}"]


def test_files_and_functions_stay_small() -> None:
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 320, path.name
        for node in ast.walk(ast.parse(text)):
            is_kernel = "kernels" in path.parts  # one signature of a kernel may be longer than that
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None and not is_kernel:
                assert node.end_lineno - node.lineno < 50, f"{path.name}: {node.name}"


def test_importing_postlude_is_cheap_and_touches_no_device() -> None:
    program = (
        "import sys, time, torch\n"
        "start = time.perf_counter()\n"
        "import postlude\n"
        "took = time.perf_counter() - start\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'torch._dynamo' not in sys.modules and 'triton' not in sys.modules\n"
        "print(took)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.3


def test_public_words_exist() -> None:
    for word in postlude.__all__:
        assert getattr(postlude, word) is not None
    assert callable(postlude.optimize)

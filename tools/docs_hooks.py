"""Pages of the site that do not lie in docs/: reports for the gallery, changelog, contributing, examples."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from mkdocs.structure.files import File, Files
from torch import Tensor, nn

import postlude
from postlude.check import records
from postlude.report import write
from postlude.report.recorded import from_records

ROOT = Path(__file__).parents[1]
RECORDED = {"h200": "h200.csv", "kernelbench": "h200-kernelbench.csv", "cpu": "cpu.csv"}
FROM_ROOT = ("CHANGELOG.md", "CONTRIBUTING.md")
# Links that hold in a checkout, and what they are on the site.
LINKS = ((r"\]\(\.\./examples/kernelbench\)", "](examples.md)"), (r"\]\(\.\./(\w+\.md)", r"](\1"))


class Block(nn.Module):
    """A residual block, as networks for volumes have them."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv3d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm, self.last_norm = nn.GroupNorm(4, channels), nn.GroupNorm(4, channels)
        self.pool = nn.MaxPool3d(2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.first(x)))
        return self.pool(torch.relu(self.last_norm(self.second(y)) + x))  # type: ignore[no-any-return]


def on_files(files: Files, config: Any) -> Files:
    for name in FROM_ROOT:
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=re.sub(r"\]\(docs/", "](", text)))
    files.append(File.generated(config, "examples.md", content=_examples()))
    with tempfile.TemporaryDirectory() as folder:
        for name, page in _reports(Path(folder)).items():
            files.append(File.generated(config, f"gallery/{name}.html", content=page))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    for pattern, replacement in LINKS:
        markdown = re.sub(pattern, replacement, markdown)
    return markdown


def _examples() -> str:
    parts = [
        "# Examples",
        "Files as `postlude optimize FILE.py -o OUT.py` wrote them, and a network that is trained twice.",
    ]
    for path in sorted((ROOT / "examples").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        parts.append(f"## {name}\n\n```python\n{path.read_text(encoding='utf-8').rstrip()}\n```")
    return "\n\n".join(parts)


def _reports(folder: Path) -> dict[str, str]:
    made = {}
    for name, csv in RECORDED.items():
        path = folder / f"{name}.html"
        found = from_records(records.read(ROOT / "benchmarks" / "results" / csv))
        write(path, found, title=f"Recorded: {csv}")
        made[name] = path.read_text(encoding="utf-8")
    with torch.no_grad():
        result = postlude.optimize(Block().eval(), torch.randn(4, 16, 32, 32, 32))
    result.report(folder / "block.html", title="A residual block")
    made["block"] = (folder / "block.html").read_text(encoding="utf-8")
    return made

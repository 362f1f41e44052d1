"""`postlude explain --repro SITE`: the script runs on its own and shows what it should."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cases import CHAIN_23, CHAIN_61
from cli.problem_texts import GOOD, Run, Write
from plan.test_lower import CARD, problem
from postlude.cli.repro import script_for
from postlude.optimized import SiteReport
from postlude.plan import lower

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_the_script_runs_and_shows_both_errors(
    run: Run, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(GOOD.replace("torch.rand(4, 3, 18, 34, 36)", "torch.rand(4, 3, 6, 7, 8)"))
    ran = run("explain", path, "--device", "cpu", "--repro", "conv")
    assert ran.code == 0
    assert ran.out.splitlines()[-1] == "Wrote repro_conv.py."
    done = subprocess.run([sys.executable, "repro_conv.py"], capture_output=True, text=True, check=True)
    errors = re.findall(r"seed \d: error (\S+) of the spread, PyTorch's own (\S+)", done.stdout)
    assert len(errors) == 5
    assert all(float(number) < 1e-5 for pair in errors for number in pair)


def test_a_name_that_is_none_is_one_sentence(run: Run, good: Path) -> None:
    ran = run("explain", good, "--device", "cpu", "--repro", "elsewhere")
    assert ran.code == 2
    assert ran.sentences == ["postlude: --repro elsewhere: there is no such chain; explain shows: conv."]


@pytest.mark.parametrize("chain", [CHAIN_23, CHAIN_61], ids=["23", "61"])
def test_every_chain_can_be_read_again(chain: object) -> None:
    asked = problem(chain, (2, chain.producer.in_channels, 8, 8, 8))  # type: ignore[attr-defined]
    site = SiteReport("a.b[0]", chain, asked, lower(chain, asked, CARD), None)  # type: ignore[arg-type]
    space: dict[str, object] = {}
    exec(script_for(site).split("# Shape")[0], space)
    assert space["CHAIN"] == chain

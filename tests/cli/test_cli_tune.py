"""`postlude tune` without a card: a faked machine and clock, the search's decisions, and what is kept of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import CHAIN_61
from plan.test_convolve import card
from plan.test_lower import problem
from postlude import hardware
from postlude.check.clock import Estimate
from postlude.cli import session, tune, tuning
from postlude.cli.frame import Settings
from postlude.cli.tuning import Results, UnfitError, difference, search
from postlude.plan import Plan, lower
from postlude.plan.candidates import candidates, with_row
from postlude.plan.gemm import Gemm
from postlude.plan.tile_uses import uses_of
from postlude.tile_table import NO_TILES, TileTable, read_tables

TEXT = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.ConvTranspose3d(32, 64, 3), nn.GroupNorm(8, 64)

    def forward(self, x):
        return self.norm(torch.relu(self.conv(x)))


def get_inputs():
    return [torch.randn(4, 32, 28, 28, 28)]


def get_init_inputs():
    return []
"""
GIVEN = problem(CHAIN_61, (16, 64, 32, 32, 32), device="cuda", precision="fp32")
UNTUNED = lower(CHAIN_61, GIVEN, card(90))
assert isinstance(UNTUNED, Plan)
PRODUCT = uses_of(UNTUNED, card(90))[0]
OTHERS = candidates(CHAIN_61, GIVEN, card(90), PRODUCT)


class Fake:
    """Plans that take as long as the test says, with as much noise, and give what it says."""

    def __init__(
        self, seconds: Callable[[Plan], float], noise: float = 0.001, results: Callable[[Plan], Results] | None = None
    ) -> None:
        self.seconds, self.noise, self.made = seconds, noise, results
        self.raced: list[Plan] = []

    def results(self, plan: Plan) -> Results:
        return Results([torch.ones(4)]) if self.made is None else self.made(plan)

    def race(self, plans: Mapping[str, Plan], rounds: int, min_window_s: float) -> dict[str, Estimate]:
        self.raced += plans.values()
        noises = [1 + self.noise * (-1) ** number for number in range(rounds)]
        return {
            name: Estimate.of([self.seconds(plan) * (noise if name else 2 - noise) for noise in noises])
            for name, plan in plans.items()
        }


def stages_of(plan: Plan) -> int:
    assert isinstance(plan.own, Gemm)
    return plan.own.stages


def found_by(bench: Fake) -> tuning.Found:
    return search(bench, UNTUNED, UNTUNED, OTHERS, lambda _: None)


def test_the_fastest_is_kept() -> None:
    found = found_by(Fake(lambda plan: 1.0 if stages_of(plan) == 3 else 0.5 if stages_of(plan) == 4 else 0.8))
    assert found.best is not None
    assert stages_of(found.best.plan) == 4
    assert found.gain is not None
    assert found.gain.median == pytest.approx(2.0, rel=0.01)
    assert found.tried == len(OTHERS)


@pytest.mark.parametrize(("gain", "noise"), [(1.0, 0.001), (1.009, 0.0), (1.05, 0.2)])
def test_what_is_not_better_beyond_noise_is_not_kept(gain: float, noise: float) -> None:
    assert found_by(Fake(lambda plan: 1.0 if plan == UNTUNED else 1 / gain, noise)).best is None


def test_a_candidate_with_another_result_is_never_timed() -> None:
    """However fast it is: mutants of a tile that forget some elements."""

    def results(plan: Plan) -> Results:
        wrong = stages_of(plan) == 4
        return Results([torch.tensor([1.0, 1.0, 1.0, 0.0 if wrong else 1.0])])

    bench = Fake(lambda plan: 0.1 if stages_of(plan) == 4 else 1.0, results=results)
    found = found_by(bench)
    assert found.best is None
    assert found.dropped["its result differs from the untuned tiles'"] == sum(stages_of(o.plan) == 4 for o in OTHERS)
    assert all(stages_of(plan) != 4 for plan in bench.raced)


def test_what_does_not_fit_or_spills_is_left_out() -> None:
    def results(plan: Plan) -> Results:
        if plan == UNTUNED:
            return Results([torch.ones(4)], spills=2)
        if stages_of(plan) == 4:
            raise UnfitError("does not fit this card")
        return Results([torch.ones(4)], spills=3 if stages_of(plan) == 2 else 2)

    found = found_by(Fake(lambda plan: 0.1 if stages_of(plan) != 3 else 1.0, results=results))
    assert found.best is None
    assert set(found.dropped) == {"does not fit this card", "spills registers"}
    everything = Fake(lambda _: 1.0, results=lambda plan: Results([torch.ones(4)], spills=int(plan != UNTUNED)))
    assert found_by(everything).gain is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_that_differ_in_rounding_alone_are_the_same(dtype: str) -> None:
    result = torch.randn(1000, dtype=torch.float64)
    bits = 2.0**-24 if dtype == "float32" else 2.0**-9
    assert difference([result * (1 + bits * torch.randn(1000))], [result], dtype) is None
    nothing = 1e-9 * torch.randn(8)  # a bias before a norm: all rounding, and none of it alike
    assert difference([result, nothing], [result, -nothing], dtype) is None
    one_wrong = result.clone()
    one_wrong[17] += 1.0
    assert difference([one_wrong], [result], dtype) is not None
    assert difference([result.roll(1)], [result], dtype) is not None
    assert difference([torch.where(result > 2, torch.nan, result)], [result], dtype) is not None


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Hopper card, on which nothing can be run; the folder of its tiles."""
    monkeypatch.setenv("POSTLUDE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(hardware, "machine_for", lambda device: dataclasses.replace(card(90), tiles=NO_TILES))
    monkeypatch.setattr(tune, "open_problem", lambda _, path: session.open_problem(Settings("cpu", "auto"), path))
    monkeypatch.setattr(hardware, "default_fp32_precision", lambda: "fp32")  # as --precision fp32 sets it on a card
    (tmp_path / "model.py").write_text(TEXT)
    hardware.tuned_tiles.cache_clear()
    yield tmp_path
    hardware.tuned_tiles.cache_clear()


def tuned(folder: Path, bench: Fake, **options: bool) -> dict[str, Any]:
    settings = Settings("cuda", "fp32")
    answer = tune.tune(settings, tune.Options(folder / "model.py", **options), lambda *_: bench)
    assert answer.code == 0
    json.dumps(answer.data)
    return answer.data


def test_a_better_tile_is_kept_for_later_processes(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def seconds(plan: Plan) -> float:
        assert plan.tile is not None
        return 1 / plan.tile.block

    data = tuned(machine, Fake(seconds))
    (row,) = hardware.tuned_tiles().rows
    assert (row.use.kind, row.values) == ("last pass", {"elements": 16384})
    assert row.tuned
    assert [one["settings"] for one in data["questions"]].count(None) == len(data["questions"]) - 1
    assert "kept in" in capsys.readouterr().out
    (file,) = (machine / "cache").iterdir()
    assert read_tables(machine / "cache", hardware.tile_key()).files == (file,)


def test_where_nothing_is_better_nothing_is_written(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuned(machine, Fake(lambda _: 1.0))
    assert list((machine / "cache").iterdir()) == []
    assert "nothing was kept" in capsys.readouterr().out


def test_a_dry_run_lists_and_runs_nothing(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def never(_: Plan) -> Results:
        raise AssertionError("a dry run ran something")

    data = tuned(machine, Fake(lambda _: 1.0, results=never), dry_run=True)
    text = capsys.readouterr().out
    assert "rows 64, stages 3, warps 8" in text
    assert "nothing was run" in text
    assert all(0 < len(one["candidates"]) <= 24 for one in data["questions"])


def test_training_has_more_to_tune(machine: Path) -> None:
    kinds = {
        train: {one["question"]["kind"] for one in tuned(machine, Fake(lambda _: 1.0), train=train)["questions"]}
        for train in (False, True)
    }
    assert {"input's gradient", "weight's gradient"} <= kinds[True] - kinds[False]


def test_without_a_card_there_is_nothing_to_tune(run: Any, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(TEXT)
    ran = run("tune", str(tmp_path / "model.py"))
    assert ran.code == 2
    assert ran.err.strip() == f"postlude: {tune.NO_CARD}"
    assert ran.out == ""


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("poisoned_memory")
def test_two_tiles_give_the_same_result() -> None:
    """By Triton's interpreter: a product's and a pass's, in the dtype that is timed; a mutant is told apart."""
    from cases import BY_NAME
    from postlude.check import tensors_for
    from postlude.plan import problem_of
    from postlude.plan.gpu import lower_for_gpu
    from postlude.tile_table import Row
    from tracing import run_plan

    chain = BY_NAME["61 small"].chain
    tensors = tensors_for(chain, (2, 4, 3, 4, 5), torch.float32)
    here = card(90)
    results = []
    with torch.no_grad():
        plan = lower_for_gpu(chain, problem_of(tensors), here, even_if_slower=True)
        assert isinstance(plan, Plan)
        for settings in ({}, {"product": (64, 2, 4), "last pass": (512,)}):
            for use in uses_of(plan, here):
                if use.kind in settings:
                    names = tuning_names(use.kind)
                    row = Row(use, tuple(zip(names, settings[use.kind])), tuned="2026-01-01")
                    here = with_row(here, row)
            tried = lower_for_gpu(chain, problem_of(tensors), here, even_if_slower=True)
            assert isinstance(tried, Plan)
            assert (tried == plan) == (not settings)
            results.append(run_plan(tried, tensors))
    assert difference([results[0]], [results[1]], "float32") is None
    assert difference([results[0].roll(1, 0)], [results[1]], "float32") is not None


def tuning_names(kind: str) -> list[str]:
    from postlude.tile_table import SETTINGS

    return list(SETTINGS[kind])


@pytest.mark.gpu
def test_one_small_chain_is_tuned_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    monkeypatch.setenv("POSTLUDE_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "model.py").write_text(TEXT.replace("4, 32, 28, 28, 28", "4, 32, 64, 64, 64"))
    hardware.tuned_tiles.cache_clear()
    hardware._machine.cache_clear()
    ran = run("tune", str(tmp_path / "model.py"), "--json", str(tmp_path / "out.json"))
    assert ran.code == 0, ran.err
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["questions"]
    assert all("another result" not in reason for one in data["questions"] for reason in one["left_out"])
    hardware.tuned_tiles.cache_clear()
    hardware._machine.cache_clear()
    kept = [one for one in data["questions"] if one["settings"] is not None]
    assert len(hardware.tuned_tiles().rows) == len(kept)
    assert isinstance(hardware.machine_for("cuda").tiles, TileTable)
    explained = run("explain", str(tmp_path / "model.py"))
    assert explained.code == 0, explained.err
    assert ("tuned on this card" in explained.out) == bool(kept)
    hardware.tuned_tiles.cache_clear()
    hardware._machine.cache_clear()

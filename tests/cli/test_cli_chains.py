"""`postlude optimize` and `postlude explain`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from cases import CHAIN_23, CHAIN_61, Builder, conv
from cli.problem_texts import GOOD, NOTHING, RESULT, Run, Write
from plan.test_convolve import card
from plan.test_lower import CARD, problem
from postlude import cards, hardware
from postlude.cli import session
from postlude.cli.card_plans import _card
from postlude.cli.chains import _show_cards, explain_site
from postlude.hardware import machine_on
from postlude.optimized import SiteReport
from postlude.plan import Refusal, lower

CHAIN = "conv3d(3→8, k3) → group_norm(4) → relu"
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_good_problem_is_fused_and_right(run: Run, good: Path) -> None:
    ran = run("optimize", good, "--device", "cpu")
    assert ran.code == 0
    assert CHAIN in ran.out
    assert "right: error" in ran.out
    assert ran.out.splitlines()[-1] == "1 of 1 chain fused, and right."
    assert ran.sentences == []
    assert "\x1b" not in ran.out + ran.err


def test_json_holds_what_was_found(run: Run, good: Path) -> None:
    path = good.parent / "out.json"
    path.write_text("old")
    assert run("optimize", good, "--device", "cpu", "--precision", "fp32", "--json", path).code == 0
    data = json.loads(path.read_text(encoding="utf-8"))
    assert (data["command"], data["exit_code"], data["device"], data["precision"]) == (
        "optimize",
        0,
        "cpu",
        "fp32",
    )
    assert data["versions"]["torch"]
    (site,) = data["sites"]
    assert (site["name"], site["chain"], site["plan"]["fused"]) == ("conv", CHAIN, True)
    assert site["inputs"][0] == {"shape": [4, 3, 18, 34, 36], "dtype": "float32", "layout": "contiguous"}
    assert site["plan"]["moved_bytes"] < site["plan"]["eager_bytes"]
    assert data["verdict"]["outcome"] == "right"
    assert {entry.name for entry in good.parent.iterdir()} == {"problem.py", "out.json"}


@pytest.mark.parametrize("command", ["optimize", "explain"])
def test_a_model_may_return_several_tensors(run: Run, write: Write, command: str) -> None:
    ran = run(command, write(GOOD.replace(RESULT, f"{{'first': {RESULT}, 'rest': [x]}}")), "--device", "cpu")
    assert ran.code == 0
    assert CHAIN in ran.out


def test_explains_a_plan_for_a_card_that_is_not_here(run: Run, write: Write) -> None:
    """At full size: nothing is run."""
    large = write(GOOD.replace("torch.rand(4, 3, 18, 34, 36)", "torch.rand(512, 3, 64, 256, 256)"))
    ran = run("explain", large, "--card", "h200", "--precision", "tf32")
    assert ran.code == 0
    assert "as it is planned for H200: its rates and tiles were measured; nothing was run." in ran.out
    assert f"{CHAIN}\n  input 512×3×64×256×256, float32, contiguous, on cuda" in ran.out
    assert "  in order: " in ran.out
    path = large.parent / "out.json"
    assert run("explain", large, "--card", "A100", "--train", "--json", path).code == 0
    data = json.loads(path.read_text(encoding="utf-8"))
    assert (data["card"], data["sites"][0]["plan"]["fused"]) == ("A100", True)


@pytest.mark.parametrize("name", ["RTX 4090", "rtx4090", "RTX-4090"])
def test_a_cards_name_may_be_written_without_spaces(name: str) -> None:
    assert _card(name) is cards.RTX_4090


def test_chains_for_a_card_are_told_apart_and_refusals_are_listed(run: Run, write: Write) -> None:
    """Two chains of one shape have the names of their modules; chains that are too small are no error."""
    layers = "nn.Conv3d(8, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU()"
    text = GOOD.replace("self.norm = nn.GroupNorm(groups, channels)", f"self.more = nn.Sequential({layers})")
    text = text.replace("self.conv = nn.Conv3d(3, channels, 3)", f"self.first = nn.Sequential({layers})")
    text = text.replace(RESULT, "self.more(self.first(x))")
    shapes = {"torch.rand(64, 8, 32, 64, 64)": True, "torch.rand(1, 8, 4, 4, 4)": False}
    for shape, fused in shapes.items():
        path = write(text.replace("torch.rand(4, 3, 18, 34, 36)", shape))
        ran = run("explain", path, "--card", "H200", "--precision", "fp32", "--json", path.parent / "out.json")
        assert ran.code == 0
        assert "\nfirst.0: conv3d(8→8" in ran.out
        assert "\nmore.0: conv3d(8→8" in ran.out
        assert ran.out.count("runs through PyTorch's own operators\n  why: ") == 2 * (not fused)
        sites = json.loads((path.parent / "out.json").read_text(encoding="utf-8"))["sites"]
        assert [site["plan"]["fused"] for site in sites] == [fused] * 2


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--card", "GTX 480"), "--card GTX 480 is unknown; use H200, H100, A100"),
        (("--card", "H200", "--device", "cpu"), "takes neither --device nor --repro"),
    ],
)
def test_a_card_that_cannot_be_planned_for_is_one_sentence(
    run: Run, good: Path, more: tuple[str, ...], sentence: str
) -> None:
    ran = run("explain", good, *more)
    assert ran.code == 2
    assert sentence in ran.sentences[-1]


def test_nothing_to_fuse(run: Run, write: Write) -> None:
    ran = run("optimize", write(NOTHING), "--device", "cpu")
    assert ran.code == 1
    assert ran.out == "Nothing to fuse: the model runs as it did.\n"
    assert run("explain", write(NOTHING), "--device", "cpu").out.startswith("There is no convolution and no norm")


def test_what_is_declined_has_a_reason(run: Run, write: Write) -> None:
    ran = run("explain", write(GOOD.replace(RESULT, "self.conv(x).cumsum(2)")), "--device", "cpu")
    assert ran.code == 0
    assert "Left to PyTorch:" in ran.out
    assert "cumsum" in ran.out


def test_explain_shows_passes_traffic_and_reasons(run: Run, good: Path) -> None:
    ran = run("explain", good, "--device", "cpu")
    assert ran.code == 0
    for words in (
        CHAIN,
        "input 4×3×18×34×36, float32, contiguous, on cpu",
        "pass 1: ",
        "why: ",
        "checked: right",
    ):
        assert words in ran.out
    assert "precision: fp32 (auto)" in ran.out
    assert "predicted memory traffic: " in ran.out
    assert " MB (eager PyTorch: " in ran.out


def test_wrong_and_doubtful_sites_are_not_sold_as_fused(run: Run, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from postlude.check.verdict import Verdict
    from postlude.pipeline import optimize

    for verdict, code in ((Verdict("wrong", ("output: off",)), 1), (Verdict("cannot tell", ("flat",)), 2)):

        def judged(*args: object, _verdict: Verdict = verdict, **kwargs: object) -> object:
            result = optimize(*args, **kwargs)  # type: ignore[arg-type]
            return replace(result, sites=tuple(replace(site, verdict=_verdict) for site in result.sites))

        monkeypatch.setattr(session, "optimize_model", judged)
        ran = run("optimize", good, "--device", "cpu")
        assert ran.code == code
        assert verdict.reasons[0] in ran.out
        assert "fused, and right" not in ran.out


def test_model_that_cannot_be_captured(run: Run, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no trace\nof it")

    monkeypatch.setattr("postlude.graph.backend.capture", fail)
    out = good.parent / "out.json"
    ran = run("optimize", good, "--device", "cpu", "--json", out)
    assert ran.code == 2
    assert len(ran.sentences) == 1
    assert "cannot be captured and runs as it was (RuntimeError: no trace)" in ran.sentences[0]
    assert not out.exists()


def test_noise_of_libraries_stays_out(run: Run, write: Write) -> None:
    noise = "import logging, warnings\nwarnings.warn('noise')\nlogging.getLogger('torch').error('noise')\n"
    path = write(noise + NOTHING)
    assert "noise" not in run("optimize", path, "--device", "cpu").err
    with pytest.warns(UserWarning, match="noise"):
        run("optimize", path, "--device", "cpu", "--debug")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (" ", "the file is empty."),
        ("class Model(:\n", "syntax error in line 1"),
        ("import no_such_module_at_all\n", "an import fails in line 1"),
        (GOOD.replace("Model", "Net"), "it has no class Model (it has Net)."),
        (GOOD.replace("get_inputs", "inputs"), "it has no function get_inputs()."),
        (GOOD.replace("rand(4, 3", "rand(4, 5"), "Model.forward raises RuntimeError"),
        (GOOD.replace(RESULT, "None, 3"), "Model returns a tuple of 2"),
    ],
)
@pytest.mark.parametrize("command", ["optimize", "explain", "bench"])
def test_bad_file_is_one_sentence(run: Run, write: Write, command: str, text: str, sentence: str) -> None:
    path = write(text)
    ran = run(command, path, "--device", "cpu", "--json", path.parent / "out.json")
    assert (ran.code, ran.out) == (2, "")
    assert len(ran.sentences) == 1
    assert sentence in ran.sentences[0]
    assert "Traceback" not in ran.err
    assert list(path.parent.iterdir()) == [path]


def test_a_gpu_plan_is_explained_by_its_launches(capsys: pytest.CaptureFixture[str]) -> None:
    for chain, shape in ((CHAIN_61, (16, 64, 32, 32, 32)), (CHAIN_23, (128, 3, 24, 32, 32))):
        given = problem(chain, shape, device="cuda")
        explain_site(SiteReport("layer", chain, given, lower(chain, given, CARD), None))
    said = " ".join(capsys.readouterr().out.split())
    assert "tiles of 128 × 128 × 64" in said
    assert "6 launches of Postlude's kernels; a value of" in said
    assert "2 launches of Postlude's kernels; nothing of the convolution's size is stored" in said
    assert "why: our own convolution" in said
    assert "precision: fp32 (auto)" in said
    assert "tiles of the product (2 planes, 64→128 channels): shipped for sm_90, measured on an H200" in said


def test_cards_are_named_once_each(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Names both cards of a model on two GPUs, and none on a CPU."""
    known = {"cuda:0": card(90), "cuda:1": card(80)}
    monkeypatch.setattr(hardware, "machine_for", lambda place: known[place])
    sites = []
    for device, index in (("cuda", 0), ("cuda", 1), ("cuda", 0), ("cpu", 0)):
        given = dataclasses.replace(problem(CHAIN_61, (16, 64, 32, 32, 32), device=device), index=index)
        sites.append(SiteReport("layer", CHAIN_61, given, lower(CHAIN_61, given, CARD), None))
    _show_cards(sites)
    said = [line for line in capsys.readouterr().out.splitlines() if line]
    assert said == [
        "cuda:0 is planned for as H200: its rates and tiles were measured.",
        "cuda:1 is planned for as A100: its rates come from published figures, not measured.",
    ]


def test_a_plan_of_training_says_what_it_keeps_and_whose_gradients_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    flat = Builder(2, conv(2, (64, 64), padding=1)).op("relu").chain()
    dilated = Builder(3, conv(3, (32, 64), dilation=2)).norm(8).op("silu").chain()
    norm = Builder(3).norm(8).op("silu").chain()
    shapes = {
        CHAIN_61: (16, 64, 32, 32, 32),
        CHAIN_23: (128, 3, 24, 32, 32),
        flat: (64, 64, 128, 128),
        dilated: (4, 32, 64, 64, 64),
        norm: (4, 32, 64, 64, 64),
    }
    said = []
    for chain, shape in shapes.items():
        given = problem(chain, shape, device="cuda", needs_grad=True, precision="fp32")
        explain_site(SiteReport("layer", chain, given, lower(chain, given, card(90)), None))
        said.append(" ".join(capsys.readouterr().out.split()))
    assert "keeps the convolution's result for its gradients" in said[0]
    assert "gradient of the input: ours, matrix product of float16 in two planes, scaled" in said[0]
    assert "gradient of the weight: ours, matrix product over positions of float16 in two planes" in said[0]
    assert "keeps nothing of the convolution's size for its gradients" in said[1]
    assert "gradients of input and weight: one kernel of Postlude's" in said[1]
    assert "keeps nothing but the result for its gradients" in said[2]
    assert "gradient of the input: PyTorch's gradient of the weight: PyTorch's" in said[3]
    assert "keeps the input for its gradients" in said[4]


@pytest.mark.parametrize("number", [75, 80])
def test_tf32_is_named_only_for_cards_that_have_it(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = (
        machine_on(cards.estimated("T4", "sm_75", (40, 64 << 10, 4 << 20), 1.6e9, 320e9)) if number == 75 else card(80)
    )
    monkeypatch.setattr(hardware, "machine_for", lambda _: machine)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given = problem(CHAIN_61, (2, 64, 8, 8, 8), device="cuda", allows_tf32=True)
    explain_site(SiteReport("layer", CHAIN_61, given, Refusal(("as asked",)), None))
    has_tf32 = "precision: tf32 where PyTorch chooses it (auto)" in capsys.readouterr().out
    assert has_tf32 == (number == 80)


def test_explain_of_training_on_a_cpu_says_that_pytorch_trains(run: Run, good: Path) -> None:
    ran = run("explain", good, "--device", "cpu", "--train")
    assert ran.code == 0
    assert "why: gradients are needed, and the fused passes for cpu devices have no backward pass" in ran.out

"""A report with every part filled, for tests; the numbers are made up."""

from __future__ import annotations

import dataclasses

from postlude.report import model

NASTY = '<script>console.error("run")</script>"\'&'


def _ratio(median: float) -> model.Interval:
    return model.Interval(median, 0.96 * median, 1.05 * median, 0.95)


def _race(direction: str, cache: str, factor: float = 1.0) -> model.Race:
    seconds = {"eager": 17.54e-3, "torch.compile": 17.09e-3, "postlude": 1.862e-3}
    entries = [
        model.Entry(
            name,
            model.Interval(*(factor * time * part for part in (1, 0.98, 1.03)), 0.95),
            None if name == "eager" else _ratio(seconds["eager"] / time),
            None if name != "postlude" else _ratio(seconds["torch.compile"] / time),
        )
        for name, time in seconds.items()
    ]
    return model.Race(direction, cache, tuple(entries), 20)


RIGHT = model.Judgement(
    model.RIGHT,
    (),
    "fp32",
    (
        model.Quantity(
            "output",
            "right",
            model.Errors(1.27e-7, 2.27e-6),
            model.Errors(7.1e-7, 1.9e-5),
            model.Errors(1.56e-7, 2.23e-6),
            5,
        ),
    ),
)
SITE = model.Site(
    "conv",
    "conv_transpose3d(64→128, k3) → relu → group_norm(8)",
    ("16×64×32×32×32 float32, contiguous",),
    True,
    (
        model.Pass("conv_transpose3d(64→128, k3)", 456_000_000),
        model.Pass("relu", 644_000_000),
        model.Pass("group_norm(8)", 644_000_000),
    ),
    (model.Pass("conv_transpose3d(64→128, k3) → store, moments per channel"), model.Pass("slab → relu → store")),
    1_744_000_000,
    1_420_000_000,
    3,
    6,
    "launches",
    ("our own convolution", "the steps before the norm are computed twice rather than stored"),
    RIGHT,
)
FULL = model.Report(
    title="61_ConvTranspose3d_ReLU_GroupNorm.py",
    subject="postlude",
    judgement=RIGHT,
    precision="fp32",
    device="a card",
    made="2026-11-15T09:00:00+00:00",
    shape="16×64×32×32×32 float32",
    races=(_race("forward", "warm"), _race("forward", "flushed", 1.02), _race("training step", "warm", 2.2)),
    variants=(
        model.Variant("eager", "PyTorch as it is", peak_bytes=968_000_000, saved_bytes=900_000_000, launches=7),
        model.Variant("torch.compile", peak_bytes=645_000_000, launches=4),
        model.Variant("postlude", "1 of 1 chains fused", RIGHT, True, 490_000_000, 322_000_000, 6),
    ),
    roofline=model.Roofline(
        232_000_000_000,
        457_000_000,
        4.25e12,
        51e12,
        (model.RooflinePoint("eager", 17.54e-3, 0.259), model.RooflinePoint("postlude", 1.862e-3, 2.44)),
    ),
    histograms=(
        model.Histogram("eager", (-9.0, -8.0, -7.0, -6.0, -5.0), (10, 400, 800, 60), 50, 2.2e-6),
        model.Histogram("postlude", (-9.0, -8.0, -7.0, -6.0, -5.0), (20, 500, 700, 40), 60, 2.3e-6),
    ),
    sites=(SITE,),
    declined=(model.Declined("head", "conv3d(128→2, k1)", "nothing follows it"),),
    findings=("the host's clock and CUDA events disagree by 14 % on postlude",),
    questions=("postlude computes 125 TFLOP/s where a matrix product in fp32 reached 51: which arithmetic is that?",),
    left_out=("max-autotune: not asked for",),
    environment={"torch": "2.11.0+cu130", "GPU clock": "1965 to 1980 MHz"},
)


def hostile() -> model.Report:
    """The same with a name from a stranger's file in every place that holds text."""
    return dataclasses.replace(
        FULL,
        title=NASTY,
        device=NASTY,
        precision=NASTY,
        shape=NASTY,
        judgement=model.Judgement(model.WRONG, (NASTY, NASTY), NASTY),
        races=tuple(
            dataclasses.replace(
                race, direction=NASTY, entries=(*race.entries, dataclasses.replace(race.entries[1], variant=NASTY))
            )
            for race in FULL.races
        ),
        variants=(*FULL.variants, model.Variant(NASTY, NASTY)),
        histograms=(dataclasses.replace(FULL.histograms[0], variant=NASTY),),
        sites=(
            dataclasses.replace(
                SITE, name=NASTY, chain=NASTY, inputs=(NASTY,), before=(model.Pass(NASTY),), reasons=(NASTY,)
            ),
        ),
        declined=(model.Declined(NASTY, NASTY, NASTY),),
        findings=(NASTY,),
        questions=(NASTY,),
        left_out=(NASTY,),
        environment={NASTY: NASTY},
    )

"""A report as one HTML file: no network, no script, everything escaped."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from postlude.report import groups, model, plots, suite, words

TEMPLATES = Path(__file__).parent / "templates"


def render(reports: Sequence[model.Report], title: str = "") -> str:
    """One page: a single problem, or a summary of several with a section for each."""
    if not reports:
        raise ValueError("there is nothing to report")
    summary = suite.summary(reports) if len(reports) > 1 else None
    name = title or (reports[0].title if len(reports) == 1 else f"{len(reports)} problems")
    template = _environment().get_template("page.html")
    return template.render(title=name, reports=reports, summary=summary)


@functools.cache
def _environment() -> jinja2.Environment:
    # Names come from strangers' files: everything is escaped, and no template may say otherwise (a test looks).
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    helpers: dict[str, Any] = {
        "ms": words.milliseconds,
        "time_range": words.time_range,
        "times": words.times,
        "ratio_range": words.ratio_range,
        "error": words.error,
        "size": words.size,
        "rate": words.rate,
        "percent": words.percent,
        "counted": words.counted,
        "rounds": words.rounds,
    }
    environment.filters.update(helpers)
    environment.globals.update(
        groups=groups,
        headline=words.headline,
        verdicts=words.VERDICTS,
        plots=plots,
        right=model.RIGHT,
        eager=model.EAGER,
    )
    return environment

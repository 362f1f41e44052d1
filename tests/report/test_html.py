"""The page: it says what the data say, loads nothing, runs nothing, and Chromium opens it without a complaint."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from postlude.check import records
from postlude.report import model, words, write
from postlude.report.html import TEMPLATES, render
from postlude.report.recorded import from_records
from report import chromium
from report.sample import FULL, NASTY, hostile

H200 = Path(__file__).parents[2] / "benchmarks" / "results" / "h200.csv"


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


def _read(page: str) -> _Reader:
    reader = _Reader()
    reader.feed(page)
    return reader


def expected_texts(report: model.Report) -> list[str]:
    """Every number that the page must show, as the page writes it."""
    found = [words.headline(report), words.VERDICTS[report.judgement.outcome]]
    for race in report.races:
        for entry in race.entries:
            found += [words.milliseconds(entry.seconds.median), words.time_range(entry.seconds)]
            if entry.times_eager is not None:
                found.append(f"{words.times(entry.times_eager.median)} ({words.ratio_range(entry.times_eager)})")
            found += [words.times(entry.times_compile.median)] if entry.times_compile else []
    for variant in report.variants:
        found += [words.size(count) for count in (variant.peak_bytes, variant.saved_bytes) if count is not None]
    if report.roofline is not None:
        found += [words.percent(point.share) for point in report.roofline.points]
    for quantity in report.judgement.quantities:
        for errors in (quantity.errors, quantity.own, quantity.allowed):
            found += [words.error(errors.rms), words.error(errors.worst)] if errors else []
    for site in report.sites:
        found += [site.chain, *site.reasons] + [words.size(n) for n in (site.before_bytes, site.after_bytes) if n]
    found += [item.reason for item in report.declined]
    return [*found, *report.findings, *report.questions, *report.left_out, *report.environment.values()]


def test_the_page_shows_every_number_of_the_json() -> None:
    text = " ".join(_read(render([FULL])).text.split())
    assert [one for one in expected_texts(FULL) if one not in text] == []


def test_the_verdict_comes_before_everything_else() -> None:
    text = _read(render([FULL])).text
    assert text.index("Right in fp32") < text.index("Findings") < text.index("Speed")


def test_nothing_is_loaded_and_nothing_runs() -> None:
    reader = _read(render([FULL]))
    assert "script" not in reader.tags
    assert reader.links == []
    assert reader.handlers == []
    assert not re.search(r"https?://|@import|url\(", render([FULL]))


def test_names_from_strangers_stay_text() -> None:
    page = render([hostile()])
    reader = _read(page)
    assert "script" not in reader.tags
    assert reader.tags.count("section") == _read(render([FULL])).tags.count("section")
    assert reader.text.count(NASTY) > 20
    assert "<script" not in page


def test_no_template_switches_escaping_off() -> None:
    for path in TEMPLATES.iterdir():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\|\s*safe|autoescape|Markup", text), path.name


def test_what_is_wrong_has_no_speed_up_on_its_page() -> None:
    wrong = model.Judgement("wrong", ("output: rms error 0.3 of the spread, allowed 7e-07",), "fp32")
    races = [
        dataclasses.replace(
            race,
            entries=tuple(
                dataclasses.replace(e, times_eager=None, times_compile=None) if e.variant == "postlude" else e
                for e in race.entries
            ),
        )
        for race in FULL.races
    ]
    variants = (*FULL.variants[:2], dataclasses.replace(FULL.variants[2], judgement=wrong))
    report = dataclasses.replace(FULL, judgement=wrong, races=tuple(races), variants=variants)
    text = _read(render([report])).text
    assert "No speed-up is shown for what is not right." in text
    assert "9.42×" in _read(render([FULL])).text
    assert "9.42×" not in text
    assert "1.86" in text  # the time itself is no claim


def test_an_empty_report_is_a_page_too() -> None:
    bare = model.Report("m", "postlude", model.Judgement("not checked"), "fp32", "cpu", "2026-01-01T00:00:00+00:00")
    text = _read(render([bare])).text
    assert "Not checked" in text
    assert "Speed" not in text


def test_recorded_rows_become_one_page_with_a_summary() -> None:
    reports = from_records(records.read(H200))
    text = _read(render(reports, "H200")).text
    assert all(report.title in text for report in reports)
    assert "How many are faster" in text
    assert sum(report.entry(report.main_race, "postlude") is not None for report in reports) == len(reports)


@pytest.mark.skipif(chromium.find() is None, reason="there is no Chromium here; CHROMIUM can name one")
def test_chromium_opens_it_without_a_complaint(tmp_path: Path) -> None:
    shown = chromium.show(write(tmp_path / "full.html", FULL), tmp_path)
    assert shown.console == []
    text = " ".join(_read(shown.dom).text.split())
    assert [one for one in expected_texts(FULL) if one not in text] == []


@pytest.mark.skipif(chromium.find() is None, reason="there is no Chromium here; CHROMIUM can name one")
def test_chromium_runs_nothing_of_a_strangers_name(tmp_path: Path) -> None:
    shown = chromium.show(write(tmp_path / "hostile.html", hostile()), tmp_path)
    assert shown.console == []
    assert "script" not in _read(shown.dom).tags
    # The same check on a page that does run it, so that silence means something.
    loud = tmp_path / "loud.html"
    loud.write_text(f"<p>{NASTY}</p>")
    assert len(chromium.show(loud, tmp_path).console) == 1

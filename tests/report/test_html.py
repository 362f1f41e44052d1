"""The page: it says what the data say, loads nothing, runs nothing, and Chromium opens it without a complaint."""

from __future__ import annotations

import dataclasses
import json
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


# Where the first and the third column of the table of problems begin and end, in pixels.
LOOK = """<script>
const [, , times] = document.querySelectorAll("table.problems thead th");
const name = document.querySelector("table.problems tbody th").getBoundingClientRect();
const inner = document.documentElement.clientWidth;
document.title = JSON.stringify([inner, name.width, times.getBoundingClientRect().left]);
</script></body>"""


@pytest.mark.skipif(chromium.find() is None, reason="there is no Chromium here; CHROMIUM can name one")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_long_name_leaves_room_for_the_verdict_beside_it(width: int, tmp_path: Path) -> None:
    long = dataclasses.replace(FULL, title="12_" + "Name_without_an_end_" * 6)
    text = render([long, FULL], "two").replace("default-src 'none'", "default-src 'unsafe-inline'")
    page = tmp_path / "page.html"
    page.write_text(text.replace("</body>", LOOK), encoding="utf-8")
    dom = chromium.show(page, tmp_path, f"--window-size={width},900").dom
    found = re.search(r"<title>(\[.*?\])</title>", dom)
    assert found is not None
    inner, name, times = json.loads(found[1])
    assert name < 0.4 * inner
    assert times < inner


def _with_rounds(count: int) -> model.Report:
    """The report with so many rounds, and no interval from one."""

    def single(one: model.Interval | None) -> model.Interval | None:
        return one if one is None or count > 1 else model.Interval(*[one.median] * 3, samples=(one.median,))

    races = []
    for race in FULL.races:
        parts = [(single(e.seconds), single(e.times_eager), single(e.times_compile)) for e in race.entries]
        entries = [
            dataclasses.replace(entry, seconds=seconds or entry.seconds, times_eager=eager, times_compile=compiled)
            for entry, (seconds, eager, compiled) in zip(race.entries, parts, strict=True)
        ]
        races.append(dataclasses.replace(race, entries=tuple(entries), rounds=count))
    return dataclasses.replace(FULL, races=tuple(races))


def test_one_round_has_no_interval() -> None:
    once, often = _with_rounds(1), _with_rounds(20)
    text = _read(render([once])).text
    assert "Times of one round, which have no interval." in text
    assert "9.42×" in text
    assert "9.42–9.42" not in text
    assert words.headline(once).endswith(
        "Postlude runs at 9.42× eager (one round) and 9.18× torch.compile (one round): forward, warm."
    )
    assert "Medians of 20 rounds; the intervals hold them with 95 % confidence." in _read(render([often])).text
    assert words.ratio_range(model.Interval(2.0, 2.0, 2.0)) == ""  # a recorded one without its samples
    assert words.comparison(model.Interval(2.0, 2.0, 2.0), "It", "eager") == "It ran at 2.00× eager in the only round."


@pytest.mark.parametrize(("seconds", "text"), [(0.0001234, "0.123"), (0.0123, "12.3"), (0.987, "987"), (2.5, "2500")])
def test_milliseconds(seconds: float, text: str) -> None:
    assert words.milliseconds(seconds) == text

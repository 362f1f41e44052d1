"""The page of a network: a summary first, equal chains together, the most expensive first, nothing left out."""

from __future__ import annotations

import dataclasses

from postlude.report import model
from postlude.report.decode import decode
from postlude.report.groups import declined_by_reason, groups_of, summary_of
from postlude.report.html import render
from postlude.report.model import as_dict
from postlude.report.table import to_csv
from report.sample import FULL, NASTY, SITE

SMALL = dataclasses.replace(
    SITE,
    chain="conv3d(8→8, k3) → relu",
    is_fused=False,
    after=SITE.before,
    before_bytes=None,
    after_bytes=None,
    reasons=("too small to gain",),
)
TIMES = ((4e-3, 1e-3), (4.2e-3, 1.2e-3), (9e-3, 9e-3), (5e-3, 2e-3))
SITES = tuple(
    dataclasses.replace(site, name=f"stage.{n}", before_seconds=before, after_seconds=after)
    for n, (site, (before, after)) in enumerate(zip((SITE, SITE, SMALL, SITE), TIMES))
)
CONVERSIONS = (model.Conversion("stage.0", "channels-last", "2×8×16", 3_000_000),)
NETWORK = dataclasses.replace(FULL, sites=SITES, conversions=CONVERSIONS)


def test_equal_chains_are_one_line_and_the_most_expensive_is_first() -> None:
    small, large = groups_of(SITES)
    assert [site.name for site in small.sites] == ["stage.2"]
    assert [site.name for site in large.sites] == ["stage.0", "stage.1", "stage.3"]
    assert (small.why, large.why) == ("too small to gain", "fused: 6 launches")
    assert large.after_seconds is not None
    assert round(1e3 * large.after_seconds, 6) == 4.2
    assert small.after_bytes is None


def test_without_times_bytes_say_what_is_expensive() -> None:
    plain = [dataclasses.replace(site, before_seconds=None, after_seconds=None) for site in SITES]
    assert [group.first.chain for group in groups_of(plain)] == [SITE.chain, SMALL.chain]


def test_the_summary_counts_times_bytes_and_layouts() -> None:
    assert summary_of(NETWORK) == [
        "3 of 4 chains are fused",
        "each alone, the chains take 22.2 ms as PyTorch runs them and 13.2 ms as they run now",
        "those that are fused move 4.26 GB instead of 5.23 GB",
        "values change their layout 1 time, 3 MB in all",
    ]


def test_the_page_has_every_site_and_the_summary_before_details() -> None:
    page = render([NETWORK])
    assert all(site.name in page for site in SITES)
    places = [page.index(text) for text in ("3 of 4 chains are fused", "numbers network", "<h2>Roofline")]
    assert places == sorted(places)
    assert page.count(f"<code>{SITE.chain}</code><br>") == 2  # a line and its details
    assert "channels-last" in page
    assert "The network, chain by chain" not in render([FULL])


def test_names_from_strangers_stay_text_in_a_network() -> None:
    sites = tuple(dataclasses.replace(site, name=NASTY, chain=NASTY, reasons=(NASTY,)) for site in SITES)
    conversions = (model.Conversion(NASTY, NASTY, NASTY, 1),)
    assert "<script" not in render([dataclasses.replace(NETWORK, sites=sites, conversions=conversions)])


def test_what_is_declined_for_one_reason_is_one_line() -> None:
    items = [model.Declined(f"head.{n}", "conv3d", "nothing follows it") for n in range(3)]
    (found,) = declined_by_reason(items)
    assert found.names == ("head.0", "head.1", "head.2")


def test_json_and_csv_have_the_same_numbers() -> None:
    assert decode(as_dict(NETWORK)) == NETWORK
    text = to_csv([NETWORK])
    assert "0.0042" in text
    assert "3000000" in text

"""fast_p counts all problems, and a wrong one never as fast."""

from __future__ import annotations

from postlude.report import model
from postlude.report.suite import Row, fast, row_of, summary_of
from report.sample import FULL


def _row(outcome: str, ratio: float | None) -> Row:
    ratios = {} if ratio is None else {"eager": model.Interval(ratio, ratio, ratio)}
    return Row("p", "", outcome, {"eager": 1.0}, ratios)


def test_fast_counts_every_problem() -> None:
    rows = [_row("right", 3.0), _row("right", 1.6), _row("not checked", 1.0), _row("wrong", None)]
    assert [fast(rows, "eager", speed) for speed in (1.0, 1.5, 2.0)] == [0.5, 0.5, 0.25]
    assert fast(rows, "torch.compile", 1.0) is None


def test_what_is_not_right_is_never_fast() -> None:
    for outcome in ("wrong", "failed", "declined", "cannot tell"):
        assert fast([_row(outcome, 9.0), _row("right", 9.0)], "eager", 1.0) == 0.5


def test_a_row_is_the_reports_main_race() -> None:
    row = row_of(FULL)
    assert row.seconds["postlude"] == 1.862e-3
    assert row.ratios["eager"].median == FULL.races[0].entries[2].times_eager.median  # type: ignore[union-attr]
    assert summary_of([row]).fast["eager"] == {1.0: 1.0, 1.5: 1.0, 2.0: 1.0}

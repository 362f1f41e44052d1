"""A report on a model as one value, and that value as HTML, JSON and CSV."""

from __future__ import annotations

from postlude.report.model import Report
from postlude.report.write import read, write

__all__ = ["Report", "read", "write"]

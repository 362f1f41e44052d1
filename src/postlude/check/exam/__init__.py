"""An examination: what a candidate is asked, what the right answers are, and what became of it."""

from __future__ import annotations

from postlude.check.exam.examine import examine
from postlude.check.exam.isolated import IsolatedSide
from postlude.check.exam.rules import Rules
from postlude.check.exam.self_check import SelfCheck, self_check
from postlude.check.exam.sheet import Exam

__all__ = ["Exam", "IsolatedSide", "Rules", "SelfCheck", "examine", "self_check"]

"""An examination of a candidate's file: the questions it is asked, the right answers, and the verdict."""

from __future__ import annotations

from postlude.check.exam.exam import Exam
from postlude.check.exam.examine import examine
from postlude.check.exam.isolated import IsolatedSide
from postlude.check.exam.rules import Rules
from postlude.check.exam.self_check import SelfCheck, self_check

__all__ = ["Exam", "IsolatedSide", "Rules", "SelfCheck", "examine", "self_check"]

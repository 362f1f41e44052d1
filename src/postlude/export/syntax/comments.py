"""Comments of specialised kernels: `where FLAG` is resolved, together with its clause, and names become numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from postlude.export.syntax.analysis import UNKNOWN, value_of
from postlude.export.syntax.trees import parsed

_ONE = r'(?: (?:is not|is|==|!=|<=|>=|<|>) (?:[\w.]+|"\w*"))?'
_CONDITION = (
    rf"(?P<how>where|without) (?P<condition>(?:not )?(?P<flag>\w+){_ONE}(?: and (?:not )?[A-Z][A-Z\d_]+{_ONE})*)(?!\w)"
)
_PART = r"(?:\[[^\]]*\]|[^,;:\[\]])"  # of a clause; commas inside brackets do not end it
# "[N, C, S], or [N, S, C] where IS_CHANNELS_LAST" becomes one of the two, and so does "[N, C] where IS_OVER_SPACE, else
# [N]".
_OR = re.compile(rf"(?P<no>{_PART}*?(?:, {_PART}+?)??), or (?P<yes>{_PART}+?) {_CONDITION}")
_ELSE = re.compile(rf"(?P<yes>{_PART}+?) {_CONDITION}, else (?P<no>{_PART}+)")
# "a [N], or where FLAG b [M]" becomes "a [N]" or "b [M]", and "[N, C], out; as p_x. [N] where FLAG" is one shape.
_FIRST = re.compile(rf"(?P<no>(?:(?<=: )|^)[^:]*?), or {_CONDITION} (?P<yes>.+?)(?=, or \[|, out|$)")
_ALONE = re.compile(rf"(?P<no>\[[^\]]*\](?P<tail>[^;.]*)(?:;[^.]*)?)\. (?P<yes>\[[^\]]*\]) {_CONDITION}$")
_NO_AXIS = re.compile(r", or \[(?:[^\]]*, )?0\]")
_CLAUSE = re.compile(rf"(?P<separator>^|[,;] ?| )(?P<clause>{_PART}*?) ?\b{_CONDITION}")
_FALSE_WORDS = ("no", "none", "")  # string values that mean "off"


def decided(comment: str, known: Mapping[str, object]) -> str:
    """A comment's text without the conditions that `known` decides."""
    comment = _CLAUSE.sub(lambda m: _clause(m, known), with_one_of_two(comment, known))
    return re.sub(r"^[,;:] ?", "", comment).rstrip()


def with_one_of_two(comment: str, known: Mapping[str, object]) -> str:
    """A comment's text with the alternatives that `known` decides."""
    comment = comment.replace(" is more than ", " > ")
    for pattern in (_FIRST, _OR, _ELSE, _ALONE):
        comment = pattern.sub(lambda m: _chosen(m, known), comment)
    return comment


def _chosen(match: re.Match[str], known: Mapping[str, object]) -> str:
    truth = _truth(match, known)
    if truth is None:
        return match[0]
    first = " " if match[0].startswith(" ") else ""  # after a colon
    return first + match["yes" if truth else "no"].lstrip() + (match.groupdict().get("tail") or "") * truth


def _clause(match: re.Match[str], known: Mapping[str, object]) -> str:
    truth = _truth(match, known)
    if truth is None:
        return match[0]
    return f"{match['separator']}{match['clause']}" if truth and match["clause"].strip() else ""


def _truth(match: re.Match[str], known: Mapping[str, object]) -> bool | None:
    parts = match["condition"].split(" and ")
    truths = [_is_true(part, known) for part in parts]
    return None if None in truths else all(truths) == (match["how"] == "where")


def _is_true(condition: str, known: Mapping[str, object]) -> bool | None:
    if condition.removeprefix("not ").split(" ")[0] not in known:
        return None
    text = condition.replace(" is not ", " != ").replace(" is ", " == ")
    try:
        value = value_of(parsed(text), known)
    except SyntaxError:  # prose
        return None
    return value is UNKNOWN or (value.lower() not in _FALSE_WORDS if isinstance(value, str) else bool(value))


def with_words(text: str, words: Mapping[str, str]) -> str:
    """The text with names replaced by numbers or other names; products with 1 vanish, products of numbers are
    computed."""
    changed = re.sub(r"\b[A-Za-z_]\w*\b", lambda m: words.get(m[0], m[0]), text)
    if changed == text:
        return text
    product = re.compile(r"(?<![\w.·])(\d+)·(\d+)(?![\w.])")
    while product.search(changed):
        changed = product.sub(lambda m: str(int(m[1]) * int(m[2])), changed)
    changed = re.sub(r"(?<![\w.])1·(?=\w)", "", _NO_AXIS.sub("", changed))
    return re.sub(r"(?<=\w)·1(?![\w.])", "", changed)

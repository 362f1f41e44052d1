"""Reads a report from JSON. Every field must exist with its type; otherwise the file is not a report."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from postlude.report import model


def decode(data: Any) -> model.Report:
    """The report in `data`; raises ValueError if it is none."""
    if not isinstance(data, dict) or data.get("schema") != model.SCHEMA:
        raise ValueError(f"it is not a report of form {model.SCHEMA}")
    report = _value(data, model.Report, "report")
    assert isinstance(report, model.Report)
    return report


def _value(data: Any, kind: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _record(data, kind, where)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return None if data is None else _value(data, parts[0], where)
    if origin is tuple:
        if not isinstance(data, list):
            raise ValueError(f"{where} is not a list")
        return tuple(_value(part, parts[0], f"{where}[{place}]") for place, part in enumerate(data))
    if origin is dict:
        if not isinstance(data, dict) or not all(isinstance(part, str) for part in data.values()):
            raise ValueError(f"{where} is not a table of texts")
        return data
    return _plain(data, kind, where)


def _record(data: Any, kind: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{where} is not a record")
    kinds = typing.get_type_hints(kind)
    values = {}
    for field in dataclasses.fields(kind):
        if field.name in data:
            values[field.name] = _value(data[field.name], kinds[field.name], f"{where}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where} has no {field.name}")
    return kind(**values)


def _plain(data: Any, kind: Any, where: str) -> Any:
    if kind is float and (isinstance(data, str) or type(data) is int):
        try:
            return float(data)
        except ValueError:
            raise ValueError(f"{where} is not a number") from None
    if type(data) is not kind:
        raise ValueError(f"{where} is not of type {kind.__name__}")
    return data

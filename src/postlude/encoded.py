"""Frozen values as JSON text and back: dataclasses by their names and fields, tuples as lists."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any


def dumps(item: Any) -> str:
    return json.dumps(_encode(item), separators=(",", ":"))


def loads(text: str, classes: Mapping[str, Any]) -> Any:
    """Reads what `dumps` wrote. `classes` are the dataclasses that may be in it."""
    return _decode(json.loads(text), classes)


def _encode(item: Any) -> Any:
    if dataclasses.is_dataclass(item):
        fields = {f.name: _encode(getattr(item, f.name)) for f in dataclasses.fields(item)}
        return {"is": type(item).__name__, **fields}
    return [_encode(part) for part in item] if isinstance(item, tuple) else item


def _decode(item: Any, classes: Mapping[str, Any]) -> Any:
    if isinstance(item, dict):
        fields = dict(item)
        return classes[fields.pop("is")](**{name: _decode(part, classes) for name, part in fields.items()})
    return tuple(_decode(part, classes) for part in item) if isinstance(item, list) else item

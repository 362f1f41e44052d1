"""What a candidate's process sends is read strictly: exactly the agreed form, or refused."""

from __future__ import annotations

import copy
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postlude.check.isolation import wire
from postlude.check.isolation.buffers import Buffer, can_be_sealed
from postlude.check.isolation.wire import (
    WireError,
    check_fields,
    flatten,
    lay_out,
    parse_layout,
    parse_message,
    rebuild,
)

LIMIT = 1 << 16
TENSORS = (torch.arange(6.0).reshape(2, 3), torch.arange(24).reshape(1, 2, 3, 4).permute(0, 3, 1, 2))


def honest() -> dict[str, Any]:
    layout: dict[str, Any] = json.loads(json.dumps(lay_out(TENSORS).as_json()))
    return layout


def altered(place: str, value: Any, tensor: int = 0) -> dict[str, Any]:
    layout = honest()
    target = layout if place in ("size", "tensors") else layout["tensors"][tensor]
    target[place] = value
    return layout


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "an unknown field": (lambda: {**honest(), "more": 1}, "unknown fields"),
    "an unknown field of a tensor": (lambda: altered("pickle", "gASV"), "unknown fields"),
    "a missing field": (lambda: {"tensors": []}, "missing"),
    "a list": (list, "missing"),
    "text as size": (lambda: altered("size", "128"), "size of the wrong type"),
    "True as size": (lambda: altered("size", True), "size of the wrong type"),
    "a negative size": (lambda: altered("size", -1), "announces -1 bytes"),
    "more than allowed": (lambda: altered("size", LIMIT + 1), "announces"),
    "too many tensors": (lambda: altered("tensors", [{}] * 10_001), "announces 10001 tensors"),
    "an offset out of range": (lambda: altered("offset", 1 << 20, 1), "outside its buffer"),
    "a negative offset": (lambda: altered("offset", -64), "negative or broken"),
    "an odd offset": (lambda: altered("offset", 3), "odd offset"),
    "overlapping tensors": (lambda: altered("offset", 0, 1), "overlap"),
    "a negative dimension": (lambda: altered("shape", [-2, -3]), "negative or broken"),
    "a dimension that is text": (lambda: altered("shape", ["2", 3]), "negative or broken"),
    "a dimension that is a fraction": (lambda: altered("shape", [2.0, 3]), "negative or broken"),
    "a dimension that is True": (lambda: altered("shape", [2, True]), "negative or broken"),
    "another shape": (lambda: altered("shape", [2, 4]), "strides"),
    "too few strides": (lambda: altered("strides", [1]), "impossible shape"),
    "a stride with a gap": (lambda: altered("strides", [1 << 40, 1]), "strides"),
    "strides that overlap": (lambda: altered("strides", [0, 1]), "strides"),
    "a huge stride of one element": (lambda: {"tensors": [one_element(1 << 62)], "size": 64}, "impossible size"),
    "a huge tensor without elements": (lambda: {"tensors": [no_elements()], "size": 0}, "impossible size"),
    "too many dimensions": (lambda: altered("shape", [1] * 65), "impossible shape"),
    "an unknown dtype": (lambda: altered("dtype", "object"), "unknown dtype"),
    "a dtype that is a function": (lambda: altered("dtype", "load"), "unknown dtype"),
    "another dtype": (lambda: altered("dtype", "float64"), "bytes do not fit"),
    "other bytes": (lambda: altered("bytes", 8), "bytes do not fit"),
    "an unknown kind": (lambda: altered("kind", "pickled"), "unknown kind"),
    "a strange device": (lambda: altered("device", "cuda; x"), "unknown kind or device"),
}


def one_element(stride: int) -> dict[str, Any]:
    return {**honest()["tensors"][0], "shape": [1], "strides": [stride], "bytes": 4}


def no_elements() -> dict[str, Any]:
    return {**honest()["tensors"][0], "shape": [0, 1 << 59, 1 << 59], "strides": [1, 1, 1], "bytes": 0}


def test_an_honest_layout_is_read_back() -> None:
    assert parse_layout(honest(), LIMIT) == lay_out(TENSORS)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_layout_is_refused(name: str) -> None:
    make, reason = BAD[name]
    with pytest.raises(WireError, match=reason):
        parse_layout(make(), LIMIT)


def mutant(check: str, instead: str) -> types.ModuleType:
    source = Path(wire.__file__).read_text()
    assert source.count(check) == 1, check
    module = types.ModuleType("mutant_of_wire")
    sys.modules[module.__name__] = module  # dataclasses look it up
    exec(compile(source.replace(check, instead), "mutant", "exec"), module.__dict__)
    return module


@pytest.mark.parametrize(
    ("check", "instead", "bad"),
    [
        ("if end > size:", "if False:", "an offset out of range"),
        ("if spec.offset < end:", "if False:", "overlapping tensors"),
        ("if not 0 <= size <= limit:", "if False:", "more than allowed"),
        ("data.keys() != fields.keys()", "False", "an unknown field"),
        ('if data["bytes"] != spec.nbytes:', "if False:", "other bytes"),
        ("if offset % ALIGNMENT:", "if False:", "an odd offset"),
        ("type(data[name]) is not kind", "not isinstance(data[name], kind)", "True as size"),
    ],
)
def test_without_its_check_a_bad_layout_is_accepted(check: str, instead: str, bad: str) -> None:
    changed = mutant(check, instead)
    layout = BAD[bad][0]()
    if bad == "True as size":
        layout["tensors"] = []
    with pytest.raises(WireError):
        parse_layout(copy.deepcopy(layout), LIMIT)
    changed.parse_layout(layout, LIMIT)


def test_bytes_that_are_not_there_are_noticed_even_then() -> None:
    layout = mutant("if end > size:", "if False:").parse_layout(altered("offset", 1 << 20, 1), LIMIT)
    with Buffer(layout.size) as buffer, pytest.raises(WireError, match="lacks bytes"):
        buffer.read(layout.specs[1])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"7",
        b'{"a": 1, "a": 2}',
        b'{"a": ' + b"9" * 30 + b"}",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"\x80\x04\x95.",
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        parse_message(data)


@pytest.mark.parametrize(
    "tree",
    [
        {"tensor": 2},
        {"tensor": -1},
        {"tensor": True},
        {"tensor": "0"},
        {"dtype": "load"},
        {"list": {}},
        {"dict": [["a"]]},
        {"dict": [[None, 1]]},
        {"object": 1},
        {"list": [], "tuple": []},
        {},
        [1, 2],
    ],
    ids=str,
)
def test_a_value_of_no_known_form_is_refused(tree: Any) -> None:
    with pytest.raises(WireError):
        rebuild(tree, TENSORS)


def test_a_deep_value_is_refused() -> None:
    tree: Any = 1
    for _ in range(40):
        tree = {"list": [tree]}
    with pytest.raises(WireError, match="nested too deeply"):
        rebuild(tree, [])


def test_nested_values_come_back() -> None:
    value = {"a": [TENSORS[0], (None, True, -3, 2.5, "text")], 4: torch.float16, "t": TENSORS[1]}
    tree, tensors = flatten(value)
    back = rebuild(json.loads(json.dumps(tree)), tensors)
    assert back["a"][0] is TENSORS[0]
    assert back["t"] is TENSORS[1]
    assert back["a"][1] == (None, True, -3, 2.5, "text")
    assert back[4] == torch.float16


def test_a_truth_value_is_0_or_1() -> None:
    layout = lay_out([torch.zeros(4, dtype=torch.uint8)])
    spec = wire.Spec((4,), (1,), torch.bool, 0)
    with Buffer(layout.size) as buffer:
        buffer.write(layout, [torch.tensor([0, 1, 2, 255], dtype=torch.uint8)])
        with pytest.raises(WireError, match="neither 0 nor 1"):
            buffer.read(spec)


@pytest.mark.skipif(not can_be_sealed(), reason="this system has no sealed memory")
@pytest.mark.parametrize("size", [0, 1 << 30])
def test_a_buffer_keeps_its_size(size: int) -> None:
    with Buffer(64) as buffer, pytest.raises(PermissionError):
        os.ftruncate(buffer.descriptor, size)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda part: st.lists(part, max_size=4) | st.dictionaries(st.text(max_size=8), part, max_size=4),
    max_leaves=12,
)
SIZES = st.lists(st.integers(-2, 5) | st.integers(-(2**62), 2**62) | JSON, max_size=5)
TENSOR = st.fixed_dictionaries(
    {
        "shape": SIZES,
        "strides": SIZES,
        "dtype": st.sampled_from([*wire.DTYPES, "object", ""]),
        "offset": st.sampled_from([0, 64, 128, 1, -64, 2**40]) | JSON,
        "bytes": st.integers(-1, 200) | JSON,
        "device": st.sampled_from(["cpu", "cuda", ""]),
        "kind": st.sampled_from(["plain", "sparse", "no"]),
    }
)
LAYOUT = st.fixed_dictionaries({"tensors": st.lists(TENSOR, max_size=3), "size": st.integers(-1, LIMIT + 9) | JSON})


@settings(max_examples=300, deadline=None)
@given(LAYOUT | JSON)
def test_any_layout_is_refused_or_can_be_read_within_the_limit(data: Any) -> None:
    try:
        layout = parse_layout(data, LIMIT)
    except WireError:
        return
    with Buffer(layout.size) as buffer:
        for spec in layout.specs:
            tensor = buffer.read(spec)
            assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype)
            assert tensor.untyped_storage().nbytes() <= LIMIT


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    try:
        message = parse_message(data)
        check_fields(message, {"reply": int, "value": object, "tensors": list, "size": int})
        rebuild(message["value"], [])
    except WireError:
        return

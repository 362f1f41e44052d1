"""What crosses between the verifier and a candidate's process: JSON messages, and tensors as bytes beside them.

Both ends use this file. The candidate's end loads it by path, so it imports nothing else of Postlude. Only reading
protects the verifier: what the candidate's process sends is refused unless it has exactly the agreed form.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 4 << 20
MAX_TENSORS = 10_000
MAX_DEPTH = 32
MAX_DIMENSIONS = 64
MAX_DIGITS = 19
MAX_ELEMENTS = 1 << 60
ALIGNMENT = 64
KINDS = ("plain", "gapped", "subclass", "sparse", "quantised")  # a gapped one is a view that leaves places out
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    )
}


class WireError(Exception):
    """A message is not what was agreed; the text ends the sentence "it sent an answer that …"."""


class UnsendableError(Exception):
    """A value has no form on the wire; the text names it."""


@dataclass(frozen=True)
class Spec:
    """A tensor without its values. Those lie at `offset` as in memory, at its strides, gaps included."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    device: str = "cpu"
    kind: str = "plain"

    @property
    def nbytes(self) -> int:
        return extent_of(self.shape, self.strides) * self.dtype.itemsize

    def as_json(self) -> dict[str, Any]:
        return {
            "shape": list(self.shape),
            "strides": list(self.strides),
            "dtype": str(self.dtype).removeprefix("torch."),
            "offset": self.offset,
            "bytes": self.nbytes,
            "device": self.device,
            "kind": self.kind,
        }


@dataclass(frozen=True)
class Layout:
    """Where tensors lie in a buffer of `size` bytes."""

    specs: tuple[Spec, ...]
    size: int

    def as_json(self) -> dict[str, Any]:
        return {"tensors": [spec.as_json() for spec in self.specs], "size": self.size}


def extent_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Places from the first element to the last one."""
    return 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))


def distinct_part(tensor: Tensor) -> Tensor:
    """One element per place in memory: a dimension of stride 0 holds one value only."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor[tuple(slice(1 if stride == 0 else size) for size, stride in pairs)]


def laid_out(tensor: Tensor, device: str, offset: int = 0) -> Tensor:
    """A copy on `device` with the same strides, `offset` elements behind the start of its memory; gaps, which may hold
    other data, become zeros."""
    copy = zeros_laid_out_like(tensor, device, offset)
    distinct_part(copy).copy_(distinct_part(tensor))
    return copy


def zeros_laid_out_like(tensor: Tensor, device: torch.device | str, offset: int = 0) -> Tensor:
    storage = torch.zeros(offset + extent_of(tensor.shape, tensor.stride()), dtype=tensor.dtype, device=device)
    return storage.as_strided(tensor.shape, tensor.stride(), offset)


def flat_values(tensor: Tensor, device: str = "") -> Tensor:
    """The memory of a tensor from its first element to its last one, on `device`, else where it is. It is copied only
    if it is elsewhere, has gaps, or is conjugated or negated when it is read."""
    plain, at = tensor.detach(), device or str(tensor.device)
    as_it_is = str(plain.device) == at and not plain.is_conj() and not plain.is_neg()
    if not as_it_is or not is_dense(plain.shape, plain.stride()):
        plain = laid_out(plain, at)
    return plain.as_strided((extent_of(plain.shape, plain.stride()),), (1,))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether every place between the first and the last element is one element: a permuted row-major tensor."""
    step = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides) if size != 1):
        if stride != step:
            return False
        step *= size
    return True


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements share a place, other than all those along a dimension of stride 0."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides) if size > 1 and stride):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def lay_out(tensors: Sequence[Tensor], devices: Sequence[str] = (), kinds: Sequence[str] = ()) -> Layout:
    """One tensor after the other; `devices` and `kinds` tell what they were before they were made plain."""
    specs, end = [], 0
    for place, tensor in enumerate(tensors):
        device = devices[place] if devices else tensor.device.type
        kind = kinds[place] if kinds else "plain"
        specs.append(Spec(tuple(tensor.shape), tensor.stride(), tensor.dtype, end, device, kind))
        end += -(-specs[-1].nbytes // ALIGNMENT) * ALIGNMENT
    return Layout(tuple(specs), end)


def flatten(value: Any) -> tuple[Any, list[Any]]:
    """A nested value as JSON, and its tensors in the order in which they were met."""
    tensors: list[Any] = []
    return _flatten(value, tensors, 0), tensors


def _flatten(value: Any, tensors: list[Any], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise UnsendableError("a value nested too deeply")
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, Integral):  # NumPy's as well
        if len(str(abs(int(value)))) > MAX_DIGITS:
            raise UnsendableError("a whole number of more than 64 bits")
        return int(value)
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, dict):
        if not all(isinstance(key, (str, int)) for key in value):
            raise UnsendableError("a dict whose keys are neither text nor whole numbers")
        return {"dict": [[key, _flatten(part, tensors, depth + 1)] for key, part in value.items()]}
    if isinstance(value, (list, tuple)):
        word = "list" if isinstance(value, list) else "tuple"
        return {word: [_flatten(part, tensors, depth + 1) for part in value]}
    raise UnsendableError(f"a value of type {type(value).__name__}")


def rebuild(tree: Any, tensors: Sequence[Any], depth: int = 0) -> Any:
    """The nested value again; refuses every form that `flatten` does not make."""
    if depth > MAX_DEPTH:
        raise WireError("is nested too deeply")
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if not isinstance(tree, dict) or len(tree) != 1:
        raise WireError("holds a value of unknown form")
    ((word, content),) = tree.items()
    if word == "tensor":
        if not _is_count(content) or content >= len(tensors):
            raise WireError("names a tensor that it does not have")
        return tensors[content]
    if word == "dtype":
        return _dtype(content)
    if word not in ("list", "tuple", "dict") or not isinstance(content, list):
        raise WireError("holds a value of unknown form")
    if word == "dict":
        return dict(_item(pair, tensors, depth + 1) for pair in content)
    parts = [rebuild(part, tensors, depth + 1) for part in content]
    return parts if word == "list" else tuple(parts)


def _item(pair: Any, tensors: Sequence[Any], depth: int) -> tuple[str | int, Any]:
    if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], (str, int)):
        raise WireError("holds a value of unknown form")
    return pair[0], rebuild(pair[1], tensors, depth)


def parse_message(data: bytes) -> dict[str, Any]:
    """A message: one JSON object, without repeated keys and without overlong numbers."""
    try:
        message = json.loads(data.decode(), object_pairs_hook=_once_each, parse_int=_bounded)
    except (ValueError, RecursionError) as error:
        raise WireError("is not JSON") from error
    if not isinstance(message, dict):
        raise WireError("is not a JSON object")
    return message


def check_fields(data: Any, fields: dict[str, type]) -> dict[str, Any]:
    """Exactly these keys with values of exactly these types: True is not a whole number here."""
    if not isinstance(data, dict) or data.keys() != fields.keys():
        raise WireError("has missing or unknown fields")
    for name, kind in fields.items():
        if kind is not object and type(data[name]) is not kind:
            raise WireError(f"has a field {name} of the wrong type")
    return data


def parse_layout(data: Any, limit: int) -> Layout:
    """The layout that a candidate announces, if it is valid and fits `limit` bytes."""
    check_fields(data, {"tensors": list, "size": int})
    size, announced = data["size"], data["tensors"]
    if not 0 <= size <= limit:
        raise WireError(f"announces {size} bytes of tensors where {limit} are allowed")
    if len(announced) > MAX_TENSORS:
        raise WireError(f"announces {len(announced)} tensors where {MAX_TENSORS} are allowed")
    specs = tuple(_spec(one) for one in announced)
    end = 0
    for spec in sorted(specs, key=lambda spec: (spec.offset, spec.nbytes)):
        if spec.offset < end:
            raise WireError("has tensors that overlap")
        end = spec.offset + spec.nbytes
    if end > size:
        raise WireError("has a tensor outside its buffer")
    return Layout(specs, size)


def _spec(data: Any) -> Spec:
    kinds = {"shape": list, "strides": list, "dtype": str, "offset": int, "bytes": int, "device": str, "kind": str}
    check_fields(data, kinds)
    shape, strides, offset = tuple(data["shape"]), tuple(data["strides"]), data["offset"]
    if len(shape) != len(strides) or len(shape) > MAX_DIMENSIONS:
        raise WireError("has a tensor of an impossible shape")
    if not all(_is_count(number) for number in (*shape, *strides, offset)):
        raise WireError("has a negative or broken size, stride or offset")
    if math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS or any(s > MAX_ELEMENTS for s in strides):
        raise WireError("has a tensor of an impossible size")
    # The memory that the verifier takes is then as large as the bytes that arrive.
    if strides != row_major(shape) and (0 in shape or not is_dense(shape, strides)):
        raise WireError("has a tensor whose strides leave gaps or overlap")
    if offset % ALIGNMENT:
        raise WireError("has a tensor at an odd offset")
    if data["kind"] not in KINDS or not (data["device"].isalpha() and len(data["device"]) < 20):
        raise WireError("has a tensor of an unknown kind or device")
    spec = Spec(shape, strides, _dtype(data["dtype"]), offset, data["device"], data["kind"])
    if data["bytes"] != spec.nbytes:
        raise WireError("has a tensor whose bytes do not fit its shape")
    return spec


def _dtype(name: Any) -> torch.dtype:
    if not isinstance(name, str) or name not in DTYPES:
        raise WireError("names an unknown dtype")
    return DTYPES[name]


def _is_count(number: Any) -> bool:
    return type(number) is int and number >= 0


def _bounded(digits: str) -> int:
    if len(digits) > MAX_DIGITS + 1:
        raise ValueError("a number is too long")
    return int(digits)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found

"""Triton's interpreter without work that changes no result.

It patches the language for every launch, and once more for every device function that a kernel calls, where that is in
force already. It computes each sum and product of integers again in 64 bits, for an overflow check whose outcome only
its debug mode looks at. And for every value it makes the type, the shape and their names anew, although a kernel has a
few types in all: here types are made once, operands of one type go past the rules of promotion and broadcasting, a
number beside a tensor becomes a tensor once, and a computed one is spread over a block without a type of the
compiler's. Data of a size that their type cannot have would be an error of the interpreter, and is not looked for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any


def make_fast() -> None:
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # another version, as it is
        return
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _patch_the_language_once(interpreter)
    _make_each_type_once(interpreter)
    _skip_rules_for_equal_types(interpreter.TensorHandle)
    interpreter.TensorHandle.__post_init__ = lambda _: None


def _patch_the_language_once(interpreter: Any) -> None:
    import triton.language as tl

    honest = interpreter._patch_lang

    def patch_once(fn: Any) -> Any:
        languages = fn.__dict__.get("languages")
        if languages is None:  # as many lookups as its module has names, for every call
            languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
            fn.languages = languages
        is_patched = languages and not any(tl.core.is_builtin(language.load) for language in languages)
        return interpreter._LangPatchScope() if is_patched else honest(fn)

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        """Like Triton's, without a second dictionary per call and without the wrapper that passes `_semantic`."""
        semantic, function = interpreter.TritonSemantic(builder), getattr(member, "__wrapped__", member)

        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, called)

    interpreter._patch_lang, interpreter._patch_attr = patch_once, patch_attr


def _make_each_type_once(interpreter: Any) -> None:
    from triton.language import core

    known: dict[Any, Any] = {}
    start, plain = core.block_type.__init__, core._unwrap_if_constexpr
    unwrapped = (int, float, bool, str, type(None), core.tensor, core.dtype)

    def unwrap(value: Any) -> Any:
        kind = type(value)
        if kind in unwrapped:
            return value
        return value.value if kind is core.constexpr else plain(value)

    def block_type(cls: Any, element_ty: Any, shape: Any) -> Any:
        """Equal ones are one object, which holds the shape of its tensors."""
        key = (element_ty.name, getattr(element_ty, "address_space", None), *map(unwrap, shape))
        if key not in known:
            made = object.__new__(cls)
            start(made, element_ty, list(key[2:]))
            made.constant_shape = core.tuple([core.constexpr(size) for size in key[2:]])
            made.constant_numel = core.constexpr(made.numel)
            known[key] = made
        return known[key]

    core._unwrap_if_constexpr = unwrap
    core.block_type.__new__ = block_type
    core.block_type.__init__ = lambda *_: None
    no_shape, one = core.tuple([]), core.constexpr(1)

    def start_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        is_block = type.is_block()
        self.shape = type.constant_shape if is_block else no_shape
        self.numel = type.constant_numel if is_block else one

    core.tensor.__init__ = start_tensor
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)


def _by_name(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    found: dict[str, Any] = {}

    def cached(dtype: Any) -> Any:
        if dtype.name not in found:
            found[dtype.name] = function(dtype)
        return found[dtype.name]

    return cached


def _skip_rules_for_equal_types(handle: Any) -> None:
    import numpy as np
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    promote, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    constant, constants = TritonSemantic.scalar_constant, {}  # type: ignore[var-annotated]

    def promoted(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        if type(lhs) is core.tensor and type(rhs) is core.tensor:
            ours, theirs = lhs.type.scalar, rhs.type.scalar
            if ours is theirs and (ours.is_int() or ours.is_fp32() or ours.is_fp64()):  # 16 bits: 32 in divisions
                return broadcasted(self, lhs, rhs)
            if args[:1] == (True,) and ours.is_ptr() and theirs.is_int():  # where pointers are allowed
                return broadcasted(self, lhs, rhs)
            return promote(self, lhs, rhs, *args, **kwargs)
        return beside_a_number(self, lhs, rhs, *args, **kwargs)

    def broadcasted(self: Any, lhs: Any, rhs: Any) -> Any:
        ours, theirs = lhs.type, rhs.type
        if ours is theirs:
            return lhs, rhs
        if not ours.is_block():
            return (spread(lhs, theirs), rhs) if theirs.is_block() else (lhs, rhs)
        if not theirs.is_block():
            return lhs, spread(rhs, ours)
        return (lhs, rhs) if ours.shape.values == theirs.shape.values else broadcast(self, lhs, rhs)

    def spread(scalar: Any, block: Any) -> Any:
        data = scalar.handle.data
        full = np.full(block.shape.values, data, data.dtype)
        return core.tensor(handle(full, scalar.handle.dtype), block.with_element_ty(scalar.type))

    def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
        key = (type(value), value, dtype.name)
        if key not in constants:
            if not _can_be_found_again(value):
                return constant(self, value, dtype)
            constants[key] = constant(self, value, dtype)
        return constants[key]

    beside_a_number = _each_number_once(promote, core.tensor)
    TritonSemantic.binary_op_type_checking_impl = promoted
    TritonSemantic.broadcast_impl_value = broadcasted
    TritonSemantic.scalar_constant = scalar_constant


def _can_be_found_again(value: float) -> bool:
    """NaN equals nothing, and -0.0 equals 0.0."""
    return value == value and (value != 0 or math.copysign(1.0, value) > 0)


def _each_number_once(promote: Callable[..., Any], tensor: type) -> Callable[..., Any]:
    """`promote` with what it made of a number where the other operand stays as it is."""
    found: dict[Any, Any] = {}

    def beside_a_number(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        is_left = type(lhs) is tensor
        other, number = (lhs, rhs) if is_left else (rhs, lhs)
        if type(number) not in (int, float) or type(other) is not tensor or not _can_be_found_again(number):
            return promote(self, lhs, rhs, *args, **kwargs)
        # Types of blocks are made once; those of pointers are not, and only their names stay.
        kind = id(other.type) if other.type.is_block() else other.type.name
        key = (kind, is_left, type(number), number, args, *kwargs.items())
        if key not in found:
            both = promote(self, lhs, rhs, *args, **kwargs)
            if both[not is_left] is not other:
                return both
            found[key] = both[is_left]
        return (other, found[key]) if is_left else (found[key], other)

    return beside_a_number

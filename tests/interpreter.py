"""Triton's interpreter without work that changes no result: half of its time.

It patches the language for every launch, and once more for every device function that a kernel calls, where that is in
force already. And it computes each sum and product of integers again in 64 bits, for an overflow check whose outcome
only its debug mode looks at.
"""

from __future__ import annotations

import dataclasses
from typing import Any


def make_fast() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    builder, honest = interpreter.interpreter_builder, interpreter._patch_lang
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    def patch_once(fn: Any) -> Any:
        languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        is_patched = languages and not any(tl.core.is_builtin(language.load) for language in languages)
        return interpreter._LangPatchScope() if is_patched else honest(fn)

    interpreter._patch_lang = patch_once

"""Readability figures of a file, which a person can check by counting."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from dataclasses import dataclass


@dataclass(frozen=True)
class Figures:
    lines: int
    kernels: int
    longest_function: tuple[str, int]  # its name and its lines
    comment_share: float  # of the lines that are not blank
    widest_line: int

    def __str__(self) -> str:
        name, lines = self.longest_function
        return (
            f"{self.lines} lines, {self.kernels} kernels, the longest function {lines} lines ({name}), "
            f"{self.comment_share:.0%} of the lines with a comment or docstring, the widest line {self.widest_line}"
        )


def figures(text: str) -> Figures:
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    sizes = {node.name: (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions}
    longest = max([*sizes.items(), *_cuda_functions(text)], key=lambda item: item[1])
    filled = [number for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    kernels = len(re.findall(r"(?m)^@triton\.jit\ndef \w+_kernel\(", text)) + text.count("__global__ void")
    return Figures(
        lines=len(text.splitlines()),
        kernels=kernels,
        longest_function=longest,
        comment_share=len(_commented(text, tree) & set(filled)) / len(filled),
        widest_line=max(map(len, text.splitlines())),
    )


def _cuda_functions(text: str) -> list[tuple[str, int]]:
    """Name and lines of each function of CUDA C++, from its first word to the bracket that ends it."""
    text = re.sub(r"__launch_bounds__\([^()]*\) ", "", text)
    found = re.finditer(r'(?ms)^(?:extern "C"|DEVICE|__device__) [^;{(]*?(\w+)\(.*?^\}$', text)
    return [(match[1], match[0].count("\n") + 1) for match in found]


def _commented(text: str, tree: ast.Module) -> set[int]:
    """Lines with a comment, those of CUDA C++ and of docstrings among them."""
    found = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            first = node.body[0]
            found.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            inside = enumerate(node.value.split("\n"), node.lineno)
            found.update(number for number, line in inside if "//" in line)
    return found

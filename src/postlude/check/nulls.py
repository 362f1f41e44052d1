"""Null candidates: trivial answers. Points that would accept one of them prove nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from postlude.chain import Chain
from postlude.check.draws import draw, generator_for
from postlude.check.points import slots_of_gamma
from postlude.reference import evaluate


def null_candidates(truth: Tensor) -> dict[str, Tensor]:
    """Answers that can be guessed from the truth's statistics alone."""
    nulls = {"zeros": torch.zeros_like(truth)}
    finite = torch.isfinite(truth)
    count = int(finite.sum())
    if count > 1:
        mean = float(torch.where(finite, truth, 0.0).sum()) / count
        nulls["the mean of the truth"] = torch.full_like(truth, mean)
    if truth.dim() > 2 and truth.shape[1] > 1 and truth.numel() > truth.shape[1]:
        means = truth.mean([axis for axis in range(truth.dim()) if axis != 1], keepdim=True)
        nulls["the mean of each channel"] = means.expand_as(truth)
    return nulls


def chain_nulls(chain: Chain, tensors: Sequence[Tensor], start: Tensor, seed: int = 0) -> dict[str, dict[str, Tensor]]:
    """Answers that ignore the input, or the norm: mean(β) where a mean follows the norm. `start` is the first value in
    float64, and so are the tensors."""
    generator = generator_for(seed + 10_000, tensors[0].device)
    other = draw(tensors[0].shape, "hierarchical", generator, torch.float64)
    nulls = {
        "the answer for another input": evaluate(
            chain, [other.to(tensors[0].device), *tensors[1:]], dtype=torch.float64
        )
    }
    gammas = {slot.index for slot in slots_of_gamma(chain)}
    if gammas:
        without = [torch.zeros_like(t) if index in gammas else t for index, t in enumerate(tensors)]
        nulls["β in place of the norm"] = evaluate(chain, without, dtype=torch.float64, start=start)
    return {name: {"output": answer} for name, answer in nulls.items()}

"""How a value is upsampled, and when a gather can compute its gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

MOST = 8  # largest factor along an axis: above it, rounding may assign a result to the next position


@dataclass(frozen=True)
class Upsampling:
    """The settings of PyTorch's operator, from `small` to `large` positions along each axis."""

    small: tuple[int, ...]
    large: tuple[int, ...]
    is_linear: bool
    aligns_corners: bool = False
    is_exact: bool = False  # nearest-exact
    factors: tuple[float, ...] = ()  # scale_factor, if the caller gave it

    @property
    def scales(self) -> tuple[float, ...]:
        """Positions of the smaller value per position of the larger one."""
        return tuple(map(self._scale, self.small, self.large, self.factors or (0.0,) * len(self.small)))

    def _scale(self, small: int, large: int, factor: float) -> float:
        if self.aligns_corners:
            return (small - 1) / (large - 1) if large > 1 else 1.0
        return 1 / factor if factor else small / large

    @property
    def reach(self) -> tuple[int, ...]:
        """How many results along each axis may read one position."""
        return tuple(map(self._reach, self.scales))

    def _reach(self, scale: float) -> int:
        if self.is_linear:
            return math.ceil(2 / scale - 1e-6)
        return math.ceil(1 / scale - 1e-6) + (scale * round(1 / scale) != 1)  # rounding may move a border by one

    def in_space(self) -> Upsampling:
        """The same with three axes."""
        missing = (1,) * (3 - len(self.small))
        factors = (*missing, *self.factors) if self.factors else ()
        return replace(self, small=(*missing, *self.small), large=(*missing, *self.large), factors=factors)

    @property
    def is_served(self) -> bool:
        axes = zip(self.scales, self.small, self.large)
        return all(0 < scale <= 1 and small <= large <= MOST * small for scale, small, large in axes)

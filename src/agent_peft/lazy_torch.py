"""``torch``, imported at its first use, so that a configuration can be checked without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            import torch

            self.__dict__ = torch.__dict__
            return getattr(torch, name)

    torch, Tensor = _Torch(), Any

__all__ = ["Tensor", "torch"]

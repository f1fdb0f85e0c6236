"""GELU's tanh form as one kernel, where Transformers writes it out: seven operations, each of which reads
and writes everything.
"""

from __future__ import annotations

from torch import nn
from transformers.activations import FastGELUActivation, GELUTanh, NewGELUActivation


def fuse_activations(model: nn.Module) -> None:
    """The same function, up to rounding, in place.

    >>> model = nn.Sequential(NewGELUActivation(), nn.ReLU())
    >>> fuse_activations(model)
    >>> [type(module).__name__ for module in model]
    ['GELUTanh', 'ReLU']
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in (NewGELUActivation, FastGELUActivation):
                setattr(parent, name, GELUTanh())

"""Mamba-1 layers that continue from a state with more than one token.

transformers' selective scan always begins with a zero state, as its kernels do, so a second prefill chunk would
forget the first. Such layers take the new tokens one after the other here, which their single-token path does
right; the model's other layers still see the whole chunk.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import nn

_SCAN = "mamba_selective_scan"


def fix_continuation(net: nn.Module) -> int:
    """Wrap every mixer whose model file scans that way; how many there were."""
    fixed = 0
    for module in net.modules():
        source = sys.modules.get(type(module).__module__)
        if type(module).__name__.endswith("Mixer") and hasattr(source, _SCAN):
            module.forward = partial(_forward, module.forward)
            fixed += 1
    return fixed


def _forward(forward: Any, hidden_states: torch.Tensor, cache: Any = None, **kwargs: Any) -> torch.Tensor:
    """The mixer's output for [batch, tokens, dim]."""
    continues = cache is not None and hidden_states.shape[1] > 1 and cache.has_previous_state(_layer_of(forward))
    if not continues:
        return forward(hidden_states, cache=cache, **kwargs)
    outputs = [forward(token, cache=cache, **kwargs) for token in hidden_states.split(1, dim=1)]
    return torch.cat(outputs, dim=1)


def _layer_of(forward: Any) -> int:
    return forward.__self__.layer_idx

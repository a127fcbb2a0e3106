"""Feed-forward blocks that are replaced by one matrix and a few of their own hidden units.

Exported models contain a copy of this file. It needs only torch.
"""

import copy

import torch
from torch import nn


class LinearMLP(nn.Module):
    """y = linear_mlp(x) + units(x): an affine map, and the kept hidden units of the original block."""

    def __init__(self, d_in, d_out, rank=None, units=None, extras=-1):
        super().__init__()
        if rank is None:
            self.linear_mlp = nn.Linear(d_in, d_out)
        elif rank:
            self.linear_mlp = nn.Sequential(
                nn.Linear(d_in, rank, bias=False), nn.Linear(rank, d_out)
            )
        else:
            self.linear_mlp = Constant(d_out)
        self.units = units
        self.extras = extras  # values that the original returned beside y; -1: it returned no tuple

    def forward(self, hidden_states, *args, **kwargs):
        y = self.linear_mlp(hidden_states)
        if self.units is not None:
            y = y + self.units(hidden_states)
        return y if self.extras < 0 else (y, *[None] * self.extras)


class Constant(nn.Module):
    """The bias of a block that keeps only hidden units and has no matrix."""

    def __init__(self, d_out):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(d_out))

    def forward(self, hidden_states):
        return self.bias.expand(*hidden_states.shape[:-1], -1)


def install(model, blocks):
    """Replace each block by a LinearMLP. `blocks` is `linear_blocks` of the config:

    steps: the modules that lead from x to y; the first becomes the LinearMLP, the others nn.Identity;
    rank: rank of the matrix, None if full, 0 if there is none; units: number of hidden units kept, of
    `hidden` in the original; down: the projection that reads them.
    """
    for block in blocks:
        steps = [_reach(model, path) for path in block["steps"]]
        units = None
        if block["units"]:
            down = _reach(model, block["down"])
            kept = [_narrowed(step, down, block["units"], block["hidden"]) for step in steps]
            units = kept[0] if len(kept) == 1 else Chain(kept)
        layer = LinearMLP(block["d_in"], block["d_out"], block["rank"], units, block["extras"])
        _put(model, block["steps"][0], layer)
        for path in block["steps"][1:]:
            _put(model, path, nn.Identity())


class Chain(nn.Module):
    """Modules and functions, one after the other."""

    def __init__(self, steps):
        super().__init__()
        for i, step in enumerate(steps):
            setattr(self, f"step{i}", step)
        self.count = len(steps)

    def steps(self):
        return [getattr(self, f"step{i}") for i in range(self.count)]

    def forward(self, hidden_states):
        for step in self.steps():
            hidden_states = step(hidden_states)
        return hidden_states


def _narrowed(step, down, units, hidden):
    """The same module with projections to and from fewer hidden units."""
    if not isinstance(step, nn.Module):  # an activation function
        return step
    inputs = getattr(step, "in_features", getattr(step, "nx", None))
    outputs = getattr(step, "out_features", getattr(step, "nf", None))
    if step is down:  # the LinearMLP has the bias
        return nn.Linear(units, outputs, bias=False)
    if (
        inputs is not None and outputs is not None
    ):  # 2 x hidden where one projection holds gate and up
        return nn.Linear(inputs, outputs // hidden * units, bias=step.bias is not None)
    twin = copy.copy(step)
    twin._modules = {name: _narrowed(m, down, units, hidden) for name, m in step._modules.items()}
    return twin


def _reach(model, path):
    for name in path.split("."):
        model = getattr(model, name)
    return model


def _put(model, path, module):
    parent, _, name = path.rpartition(".")
    setattr(_reach(model, parent) if parent else model, name, module)

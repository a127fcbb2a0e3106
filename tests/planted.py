"""Rows of blocks with a known answer.

    fit, choose, report, affine = planted.samples(lambda x: x @ W.t(), d=24)

x is Gaussian unless given; y = f(x) + noise; `affine` is the closed form on the fit rows. Windows of 50
rows, so that standard errors over windows have something to be over.
"""

import math

import torch

from howlinear import Moments, fit
from howlinear.probing.samples import Sample


def samples(f, d, noise=0.3, sizes=(4000, 1000, 2000), seed=0, draw=torch.randn):
    g = torch.Generator().manual_seed(seed)
    made = []
    for n in sizes:
        x = draw(n, d, generator=g)
        y = f(x)
        y = y + noise * torch.randn(y.shape, generator=g)
        row = torch.arange(n)
        made.append(Sample(x.float(), y.float(), row // 50, row % 50))
    moments = Moments(d, made[0].y.shape[1])
    moments.update(made[0].x, made[0].y)
    return *made, fit(moments).to(made[0].x)


def bilinear(seed, d=24, rank=4, d_out=16):
    """y = Wx + A[(Ux) * (Vx)]"""
    g = torch.Generator().manual_seed(seed)
    W = torch.randn(d_out, d, generator=g) / 5
    U, V = torch.randn(2, rank, d, generator=g) / math.sqrt(d)
    A = torch.randn(d_out, rank, generator=g) / 2
    return lambda x: x @ W.t() + ((x @ U.t()) * (x @ V.t())) @ A.t()


def linear(seed, d=24, d_out=16):
    W = torch.randn(d_out, d, generator=torch.Generator().manual_seed(seed)) / 5
    return lambda x: x @ W.t()

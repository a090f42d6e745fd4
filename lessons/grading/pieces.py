"""
Define functions that the exercises of several lessons share.
"""
import math

import torch


def randn(generator, *shape):
    return torch.randn(*shape, generator=generator)


def randn64(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def same(x):
    return x


def never(y):
    """Return False, as the last property: its sentence is printed if all others hold."""
    return False


def unit_rows(x):
    """Return x (..., n) with rows of length 1. A row of zeros stays as it is."""
    length = x.norm(dim=-1, keepdim=True)
    return x / torch.where(length == 0, 1.0, length)


def silu(z):
    return z * torch.sigmoid(z)


# ---- Attention -----------------------------------------------------------------------------------

def neighboring_channels(x, n_head):
    """Split (B, T, d) into (B, H, T, d_k): each head gets neighboring channels."""
    return x.unflatten(-1, (n_head, -1)).transpose(1, 2)


def every_nth_channel(x, n_head):
    """Split into the same shape, but wrongly: a head gets every n_head-th channel."""
    return x.unflatten(-1, (-1, n_head)).permute(0, 3, 1, 2)


def side_by_side(y):
    """Join (B, H, T, d_k) to (B, T, d), the heads of a token side by side."""
    return y.transpose(1, 2).flatten(2)


def heads_one_by_one(y):
    """Join to the same shape, but wrongly: without exchanging H and T first."""
    batch, n_head, length, d_k = y.shape
    return y.reshape(batch, length, n_head * d_k)


NO_TOKEN = 10 ** 6                              # as hidden_from: further ahead than any token


def attend(q, k, v, factor, hidden_from=1, hidden_score=-math.inf):
    """Return attention's output. The mask begins hidden_from tokens ahead of the query."""
    length = q.shape[-2]
    mask = torch.ones(length, length).triu(hidden_from).bool()
    scores = (factor * q @ k.mT).masked_fill(mask, hidden_score)
    return scores.softmax(-1) @ v


def rope_tables(length, d_k):
    pairs = d_k // 2
    angles = torch.arange(length)[:, None] * 10000 ** -(torch.arange(pairs) / pairs)
    return angles.cos(), angles.sin()


def turned(x, cos, sin):
    """Rotate channel i together with channel i + pairs.

    Channels from 2 * pairs on stay as they are.
    """
    pairs = cos.shape[-1]
    a = x[..., :pairs]
    b = x[..., pairs:2 * pairs]
    rest = x[..., 2 * pairs:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), dim=-1)


def block_inputs(case):
    """Yield a block's inputs.

    case(n_head, d, length, size) returns h, the block's tensors, n_head and rope's tables. `size`
    is the size of the alphas.
    """
    h, p, *others = case(2, 8, 5)
    yield "2 heads of 4", h, p, *others
    yield "alpha_a of 0: the MLP alone", h, {**p, "alpha_a": torch.zeros(8)}, *others
    yield "alpha_m of 0: attention alone", h, {**p, "alpha_m": torch.zeros(8)}, *others
    yield "3 heads of 2", *case(3, 6, 4)
    yield "one head and one token", *case(1, 4, 1)
    yield "alphas near 1", *case(2, 4, 3, size=1.0)
    yield "3 heads and one token", *case(3, 6, 1)

"""
What references, inputs and checks of several lessons' exercises share, in elementary operations.
"""
import torch


def randn(generator, *shape):
    return torch.randn(*shape, generator=generator)


def randn64(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def same(x):
    return x


def never(y):
    """A last property: said where all before it hold."""
    return False


def unit_rows(x):
    """x (..., n) with rows of length 1; a row of zeros stays."""
    length = x.square().sum(-1, keepdim=True).sqrt()
    return x / torch.where(length == 0, 1.0, length)


def silu(z):
    return z * torch.sigmoid(z)


# Of attention

def neighbouring_channels(x, n_head):
    """(B, T, d) -> (B, H, T, d_k)"""
    return x.unflatten(-1, (n_head, -1)).transpose(1, 2)


def every_nth_channel(x, n_head):
    """The same shapes, a head with other channels."""
    return x.unflatten(-1, (-1, n_head)).permute(0, 3, 1, 2)


def side_by_side(y):
    """(B, H, T, d_k) -> (B, T, d), the heads of a token in one row"""
    return y.transpose(1, 2).flatten(2)


def heads_one_by_one(y):
    """The same shapes, and H and T have not changed places."""
    batch, n_head, length, d_k = y.shape
    return y.reshape(batch, length, n_head * d_k)


def is_later(length):
    """(T, T): whether the key, across, comes after the query."""
    return torch.ones(length, length).triu(1) > 0


def rope_tables(length, d_k):
    pairs = d_k // 2
    angles = torch.arange(length)[:, None] * 10000 ** -(torch.arange(pairs) / pairs)
    return angles.cos(), angles.sin()


def turned(x, cos, sin):
    """Channel i turned together with channel i + pairs; those behind 2 pairs are left."""
    pairs = cos.shape[-1]
    a = x[..., :pairs]
    b = x[..., pairs:2 * pairs]
    rest = x[..., 2 * pairs:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), dim=-1)

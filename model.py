"""
Six ways to normalize a GPT, each written out as its paper's equations.

  --arch       one block, h the residual stream                                       paper
  ----------   --------------------------------------------------------------------   -----------------------------
  layernorm    h <- h + Attn(LN(h));          h <- h + MLP(LN(h))                     GPT-2's form, Pre-LN
  rmsnorm      h <- h + Attn(RMS(h));         h <- h + MLP(RMS(h))                    nGPT eq. 4-5; + qk_norm: GPT+
  powernorm    h <- h + Attn(PN(h));          h <- h + MLP(PN(h))                     PowerNorm (Shen et al. 2020)
  normformer   h <- h + LN(HeadScaleAttn(LN(h))); h <- h + W2 LN(f(W1 LN(h)))         NormFormer section 2.1
  ngpt         h <- unit(h + |a|(unit(Attn(h)) - h)); the same with the MLP           nGPT eq. 10-11, 15-16, 20-21
  angpt        h <- (h + |a|(unit(Attn(h)) - h)) nu(a); the same with the MLP         anGPT Table 1

Read from top to bottom: the config, small functions, three norm layers, the blocks, GPT. Behind it stands what only makes
training and decoding faster, which a first reading can leave out.
Shapes: B sequences, T tokens, d = n_embd channels, H = n_head heads of d_k = d/H channels, V tokens in the vocabulary.

    from model import GPT, GPTConfig
    model = GPT(GPTConfig(arch="ngpt", n_layer=4, n_head=4, n_embd=128))
    logits, loss = model(idx, targets)     # idx, targets: (B, T) token ids; loss in nats per token
"""
import copy
import difflib
import functools
import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

try:
    from flash_attn import flash_attn_func
except ImportError:
    flash_attn_func = None


class ConfigError(ValueError):
    """Options that do not fit; one line that names what was given, what was expected and the nearest valid value."""


def option(default, help):
    return field(default=default, metadata={"help": help})


@dataclass
class GPTConfig:
    """What a model is. Raises ConfigError, a ValueError, where options do not fit together."""

    arch: str = option("angpt", "normalization: layernorm | rmsnorm | powernorm | normformer | ngpt | angpt")
    vocab_size: int = option(257, "tokens in the vocabulary (257: bytes and an end of text)")
    block_size: int = option(256, "context length in tokens")
    n_layer: int = option(4, "blocks")
    n_head: int = option(4, "attention heads")
    n_embd: int = option(128, "channels of the residual stream")
    mlp: str = option("swiglu", "swiglu | gelu (tanh form, as in GPT-2); both widen to 4 x n_embd")
    pos: str = option("rope", "rope | learned | sinusoidal")
    rope_fraction: float = option(1.0, "share of each head's channels that rope turns")
    bias: bool = option(False, "biases in the linear maps and in LayerNorm and PowerNorm")
    tie: bool = option(False, "one matrix for token embedding and output head")
    qk_norm: bool = option(False, "unit q and k with a learned gain; ngpt and angpt always do this")
    dropout: float = option(0.0, "on embeddings, attention weights and each branch's output")
    resid_scale: bool = option(False, "normformer: a learned scale on the second residual")
    alpha_init: float = option(0.05, "ngpt, angpt: residual step size alpha at the start")
    alpha_scale: float | None = option(None, "stored size of alpha (ngpt: 1/sqrt(n_embd); angpt: 0.01)")
    s_z_init: float = option(1.0, "ngpt, angpt: logit scale s_z at the start")
    s_z_scale: float | None = option(None, "stored size of s_z (ngpt: 1/sqrt(n_embd); angpt: 0.01)")
    pn_warmup: int = option(4000, "powernorm: steps that normalize with the batch's own statistics")

    def __post_init__(self):
        choose("arch", self.arch, ARCHS)
        choose("mlp", self.mlp, ("swiglu", "gelu"))
        choose("pos", self.pos, ("rope", "learned", "sinusoidal"))
        check(self, "vocab_size block_size n_layer n_head n_embd", lambda x: x >= 1, "at least 1")
        check(self, "rope_fraction dropout", lambda x: 0 <= x <= 1, "a number from 0 to 1")
        check(self, "alpha_init alpha_scale s_z_init s_z_scale", lambda x: 0 < x < math.inf, "more than 0")
        if self.n_embd % self.n_head:
            fit = min((n for n in range(1, self.n_embd + 1) if self.n_embd % n == 0), key=lambda n: abs(n - self.n_head))
            raise ConfigError(f"n_head={self.n_head} does not divide n_embd={self.n_embd}: the nearest that does is {fit}")
        if self.arch == "powernorm" and self.n_embd % PowerNorm.groups:
            fit = max(1, round(self.n_embd / PowerNorm.groups)) * PowerNorm.groups
            raise ConfigError(f"n_embd={self.n_embd}: powernorm needs a multiple of {PowerNorm.groups}, such as {fit}")
        if self.rotary_channels % 2:
            fit = 2 * min(math.ceil((self.rope_fraction * self.head_dim - 1) / 2), self.head_dim // 2) / self.head_dim
            raise ConfigError(f"rope_fraction={self.rope_fraction} turns {self.rotary_channels} of a head's n_embd / n_head = "
                              f"{self.head_dim} channels, which do not pair up: the nearest is {fit:g}; or take another n_head")

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def rotary_channels(self):
        return round(self.rope_fraction * self.head_dim) if self.pos == "rope" else 0


def choose(name, given, valid):
    """Raises ConfigError with the nearest valid name unless `given` is one of `valid`."""
    if given not in valid:
        near = difflib.get_close_matches(str(given).lower(), list(valid), 1, 0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{name}={given!r}: expected one of {', '.join(valid)}{hint}")


def check(config, names, holds, expected):
    """Raises ConfigError unless `holds` is true of the options of those names; None, which is not set yet, passes."""
    for name in names.split():
        value = getattr(config, name)
        if value is not None and not holds(value):
            raise ConfigError(f"{name}={value}: expected {expected}")


# ---------------------------------------------------------------------------------------------------------------------
# Small functions

def wide(x):
    """x in float32 or better."""
    return x if x.dtype.itemsize >= 4 else x.float()


def unit(x, dim=-1):
    """x / ||x||_2 along dim, computed in float32 or better; a zero vector stays zero, and so does its gradient."""
    wider = wide(x)
    norm = torch.linalg.vector_norm(wider, dim=dim, keepdim=True)
    return (wider / torch.threshold(norm, 0.0, math.inf)).type_as(x)              # where norm is 0, x / inf


def norms(x, axis):
    """||x||_2 along axis, kept 1 wide."""
    if axis == 0:                                # on CPUs torch's vector_norm takes ten times as long over columns
        return x.square().sum(0, keepdim=True).sqrt()
    return torch.linalg.vector_norm(x, dim=axis, keepdim=True)


def lerp(h, y, alpha):
    """h + alpha (y - h): alpha of the way from h to y, channel by channel."""
    return torch.lerp(h, y.type_as(h), alpha)


def rope(x, cos, sin):
    """Rotary embedding (Su et al.): turns channel pairs (i, i + r/2) of x (..., T, d_k) by position times frequency.

    cos, sin: (T, r/2), the first r channels of a head turn, the others pass. A rotation: it keeps norms, and
    the scores of rotated q and k depend on the distance between their positions only.
    """
    half = cos.shape[-1]
    if half == 0:
        return x
    if 2 * half < x.shape[-1]:
        return torch.cat((rope(x[..., :2 * half], cos, sin), x[..., 2 * half:]), dim=-1)
    a, b = x.chunk(2, dim=-1)                                                     # (..., T, r/2) each
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


ATTENTION = "auto"              # what `attend` uses, one of KERNELS; train.py's --attention sets it, and sdpa's back end
KERNELS = "auto", "plain", "flash_attn", "sdpa", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "sdpa-math"


def attention_kernel(device_type, dtype, tokens):
    """What `attend` uses: ATTENTION, or by itself flash_attn, sdpa (torch's) or plain, on CPUs faster up to 512 tokens."""
    if ATTENTION != "auto":
        return ATTENTION
    if device_type == "cpu" and tokens <= 512:
        return "plain"
    half = dtype in (torch.float16, torch.bfloat16)
    return "flash_attn" if flash_attn_func and device_type == "cuda" and half else "sdpa"


def attend(q, k, v, scale, cache=None, dropout=0.0):
    """softmax(scale q k^T + causal mask) v for q, k, v (B, H, T, d_k); the only place that knows kernels and the cache.

    With a cache, the keys and values of earlier calls come first.
    """
    q, k = q.type_as(v), k.type_as(v)            # under autocast float32 gains have widened them
    if cache is not None:
        k, v = cache.extend(k, v)
    T, S = q.shape[2], k.shape[2]                # the T queries are the last of S positions
    kernel = attention_kernel(v.device.type, v.dtype, S) if T > 1 else "sdpa"     # one query sees every key: no mask
    if kernel == "plain" or kernel != "flash_attn" and 1 < T < S:     # with T < S sdpa would let query 0 see key 0 only
        if torch.compiler.is_compiling() and T == S and not dropout:
            return CompiledAttention.apply(scale * q, k, v)
        return torch.cat([attend_plainly(part, k[:, :, :S - T + end], v[:, :, :S - T + end], scale, dropout)
                          for part, end in parts(q)], dim=2)
    if kernel == "flash_attn":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))                          # (B, T, H, d_k)
        return flash_attn_func(q, k, v, dropout_p=dropout, softmax_scale=scale, causal=True).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=T > 1, scale=scale)


PART = 128                      # 64 and 256 take 1 to 2% longer, on CPUs at 256 positions


def parts(q):
    """PART queries of q (..., T, d_k) at a time, and where they end: keys behind that are masked for all of them."""
    T = q.shape[-2]
    return zip(q.split(PART, dim=-2), [*range(PART, T, PART), T])


def attend_plainly(q, k, v, scale, dropout):
    """attend by its formula: queries (B, H, T, d_k) at the last T of the S positions of k and v (B, H, S, d_k)."""
    T, S = q.shape[2], k.shape[2]
    scores = scale * q @ k.transpose(-2, -1)                                      # (B, H, T, S)
    future = torch.full((T, S), -torch.inf, device=q.device).triu(1 + S - T)      # float32, and so is the softmax
    return F.dropout((scores + future).softmax(-1), dropout).type_as(v) @ v


class Cache:
    """Keys and values (B, H, block_size, d_k) of one layer, of which the first `length` positions are filled."""

    def __init__(self, batch, config, like):
        self.k, self.v = like.new_empty(2, batch, config.n_head, config.block_size, config.head_dim)
        self.length = 0

    def extend(self, k, v):
        start, self.length = self.length, self.length + k.shape[2]
        self.k.narrow(2, start, k.shape[2]).copy_(k)
        self.v.narrow(2, start, k.shape[2]).copy_(v)
        return self.k.narrow(2, 0, self.length), self.v.narrow(2, 0, self.length)


def gelu(x):
    """GPT-2's form, x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2; as a sigmoid it compiles to faster code."""
    if torch.compiler.is_compiling():
        return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x ** 3))
    return F.gelu(x, approximate="tanh")


def silu(x):
    """x sigmoid(x); written so, its compiled backward has one exponential in place of two."""
    return x * torch.sigmoid(x) if torch.compiler.is_compiling() else F.silu(x)


ACTIVATIONS = {"swiglu": silu, "gelu": gelu}


def scaled(s, linear, x):
    """s * linear(x), s one factor (n,) for each output, or a number; where it is less work, by the rows of the matrix."""
    if not by_matrix(linear, x):
        return s * linear(x)
    rows = s[..., None] if torch.is_tensor(s) else s
    return F.linear(x, rows * linear.weight, None if linear.bias is None else s * linear.bias)


def after_norm(linear, norm, x):
    """linear(norm(x)), the gain of a LayerNorm multiplying the matrix where `by_matrix` says so."""
    if type(norm) is not LayerNorm or hooked(norm) or not by_matrix(linear, x):
        return linear(norm(x))
    bare = F.layer_norm(wide(x), x.shape[-1:], eps=norm.eps).type_as(x)
    return F.linear(bare, linear.weight * norm.weight, linear.bias if norm.bias is None else linear(norm.bias))


def nu_activation(mlp, n_embd):
    """anGPT's nu_acf (section 4.2, Activation function) by quadrature; 3.72 for swiglu, where the paper has 3.74.

    With u, z uniform on the unit sphere of R^(4d) the entries of t = sqrt(d) z are N(0, 1/4) in high dimension, so
    ||u SiLU(t)||^2 = E[SiLU(t)^2] and, without a gate, ||GELU(t)||^2 = 4d E[GELU(t)^2].
    """
    # t in units of its deviation 1/2; on the CPU even where a model is made on the meta device, only to be counted.
    t = torch.linspace(-6, 6, 4001, dtype=torch.float64, device="cpu")
    density = torch.exp(-t.square() / 2)
    mean_square = (ACTIVATIONS[mlp](t / 2).square() * density).sum().item() / density.sum().item()
    return 1 / math.sqrt(mean_square * (1 if mlp == "swiglu" else 4 * n_embd))


# ---------------------------------------------------------------------------------------------------------------------
# Scale, and the norm layers: Norm(n, config), x (B, T, n)

class Scale(nn.Module):
    """A learned vector of n entries that starts at `init` but is stored at size `scale` (nGPT section 2.5).

    Adam moves every stored entry by about the learning rate, so the value moves by init/scale times that.
    """

    def __init__(self, n, init, scale):
        super().__init__()
        self.init, self.scale = init, scale
        self.weight = nn.Parameter(torch.full((n,), float(scale)))

    def forward(self):
        return self.weight * (self.init / self.scale)


class LayerNorm(nn.Module):
    """weight * (x - mean(x)) / sqrt(var(x) + eps) + bias, mean and population variance over the n channels."""
    eps = 1e-5

    def __init__(self, n, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.bias = nn.Parameter(torch.zeros(n)) if config.bias else None

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps), mean over the n channels; nothing is subtracted, nothing added."""
    eps = 1e-6

    def __init__(self, n, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class PowerScale(torch.autograd.Function):
    """x / psi forward; backward as PowerNorm publishes it: dL/dx = (g - nu xhat) / psi with g = dL/dxhat.

    psi and nu are constants here. `probe`, all zeros, has no part in the value: its gradient is the mean of
    g * xhat over tokens, which the running nu needs, and autograd sums it over micro-batches by itself.
    """

    @staticmethod
    def forward(ctx, x, inv_psi, nu, probe):
        xhat = x * inv_psi
        ctx.save_for_backward(xhat, inv_psi, nu)
        return xhat

    @staticmethod
    def backward(ctx, g):
        xhat, inv_psi, nu = ctx.saved_tensors
        return (g - nu * xhat) * inv_psi, None, None, (g * xhat).mean((0, 1))


class PowerNorm(nn.Module):
    """weight * x / sqrt(psi2 + eps) + bias, psi2 a running mean of x^2 per channel (Shen et al. 2020, Algorithm 2).

    Before it comes GroupScaling1D: each token is divided by the root mean square of each of its 4 channel groups.
    psi2 and the gradient statistic nu are those of the step before, moved by `update_` (GPT.project_ calls it):

        psi2 <- 0.9 psi2 + 0.1 mean(x^2)        nu <- nu (1 - 0.1 mean(xhat^2)) + 0.1 mean(g xhat)

    The means run over all tokens of a step, on every rank. For the first pn_warmup steps x^2 is averaged over the
    current batch itself, so a token is normalized with later tokens: in that phase the training loss sees the
    future. Later in training, and always in evaluation, the running psi2 is used and nothing leaks.
    """
    eps, groups, decay = 1e-5, 4, 0.9

    def __init__(self, n, config):
        super().__init__()
        self.warmup = config.pn_warmup
        self.weight = nn.Parameter(torch.ones(n))
        self.bias = nn.Parameter(torch.zeros(n)) if config.bias else None
        self.register_buffer("psi2", torch.ones(n))
        self.register_buffer("nu", torch.zeros(n))
        self.register_buffer("steps", torch.zeros(()))
        # This step's sums over micro-batches: mean x^2, mean xhat^2, and how many.
        self.register_buffer("sums", torch.zeros(3, n), persistent=False)
        self.register_buffer("probe", torch.zeros(n, requires_grad=True), persistent=False)

    def group_scale(self, x):
        groups = x.unflatten(-1, (self.groups, -1))                               # (B, T, 4, n/4)
        return F.rms_norm(groups, groups.shape[-1:], eps=self.eps).flatten(-2)

    def forward(self, x):
        x = self.group_scale(x)
        if self.training:
            moment = mean_over_ranks(x.detach().square().mean((0, 1)))            # (n,)
            psi2 = torch.where(self.steps < self.warmup, moment, self.psi2)
            self.sums += torch.stack((moment, moment / (psi2 + self.eps), torch.ones_like(moment)))
            xhat = PowerScale.apply(x, (psi2 + self.eps).rsqrt(), self.nu, self.probe)
            x = xhat * self.weight
        else:
            x = self.constants() * x
        return x if self.bias is None else x + self.bias

    def constants(self):
        return self.weight * (self.psi2 + self.eps).rsqrt()

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)                        # .to() and .double() leave a probe that gathers no gradient
        self.probe = self.probe.detach().requires_grad_()
        return self

    @torch.no_grad()
    def update_(self):
        """Moves the running statistics by one optimizer step, if gradients came, and forgets the step's sums."""
        if self.probe.grad is not None:
            moment, gamma, _ = self.sums / self.sums[2]
            self.psi2.lerp_(moment, 1 - self.decay)
            self.nu.mul_(1 - (1 - self.decay) * gamma)
            self.nu.add_(mean_over_ranks(self.probe.grad / self.sums[2]), alpha=1 - self.decay)
            self.steps += 1
        self.probe.grad = None
        self.sums.zero_()


def mean_over_ranks(x):
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return x
    from torch.distributed import _functional_collectives as collectives         # unlike dist.all_reduce, it compiles
    return collectives.all_reduce(x, "sum", dist.group.WORLD) / dist.get_world_size()


# ---------------------------------------------------------------------------------------------------------------------
# Blocks: h (B, T, d) -> h (B, T, d)

class Block(nn.Module):
    """The linear maps that all blocks share, and the splitting of their outputs. Subclasses write `forward`.

    A subclass also says what the model ends with (`ending`) and which weights are constrained (`axes`, `constrain_`);
    as they stand here: nothing but the head, and none.
    """
    axes = {}                      # matrix -> axis along which `constrain_` takes the norm

    def __init__(self, config):
        super().__init__()
        d = config.n_embd
        self.d, self.n_head, self.d_k = d, config.n_head, config.head_dim
        self.sqrt_d = d ** 0.5
        self.gated = config.mlp == "swiglu"
        self.f = ACTIVATIONS[config.mlp]
        self.dropout = config.dropout
        self.drop = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        # weight shape (out, in); norm along: ngpt axis, angpt axis (1: each row is a unit, or bounded, vector)
        self.w_qkv = nn.Linear(d, 3 * d, bias=config.bias)                           # (3d, d)   ngpt 1, angpt 1
        self.w_o = nn.Linear(d, d, bias=config.bias)                                 # (d, d)    ngpt 0, angpt 1
        self.w_up = nn.Linear(d, (8 if self.gated else 4) * d, bias=config.bias)     # (8d, d) or (4d, d); 1, 1
        self.w_down = nn.Linear(4 * d, d, bias=config.bias)                          # (d, 4d)   ngpt 0, angpt 1

    def heads(self, qkv):
        """(B, T, 3d) -> q and k (2, B, H, T, d_k), stacked for one rope and one norm, and v (B, H, T, d_k)"""
        B, T, _ = qkv.shape
        qkv = qkv.view(B, T, 3, self.n_head, self.d_k).permute(2, 0, 3, 1, 4)        # (3, B, H, T, d_k)
        qk, v = qkv.split((2, 1))
        return qk, v.squeeze(0)

    def attend(self, q, k, v, scale, cache):
        return attend(q, k, v, scale, cache, self.dropout if self.training else 0.0)

    def join(self, y):
        """(B, H, T, d_k) -> (B, T, d)"""
        return y.transpose(1, 2).flatten(-2)

    def branches(self, uz):
        """W_up h -> u, z (B, T, 4d) of MLP(h) = W_down (u * f(z)): swiglu's two halves; gelu has no gate, so u is 1."""
        return uz.chunk(2, dim=-1) if self.gated else (1.0, uz)

    @staticmethod
    def constrain_(weight, axis):
        """Puts `weight` back where the architecture wants it, in place."""

    def ending(self, config):
        """What the GPT has behind its last block: norm_f, a norm before the head, or s_z, a Scale of the logits."""
        return {}


class PreNormBlock(Block):
    """layernorm, rmsnorm, powernorm. The residual adds to h itself, never to N(h). (nGPT eq. 4, 5, 12-14, 17-19)"""

    def __init__(self, config, Norm):
        super().__init__(config)
        self.Norm = Norm
        self.norm1 = Norm(self.d, config)
        self.norm2 = Norm(self.d, config)
        self.g = nn.Parameter(torch.tensor(self.d_k ** 0.5)) if config.qk_norm else None
        self.scale = 1.0 if config.qk_norm else self.d_k ** -0.5

    def qk_norm(self, qk):
        if self.g is None:
            return qk.unbind(0)
        q, k = unit(qk).unbind(0)
        return self.g * q, k                                                         # anGPT Table 1, GPT+

    def forward(self, h, cos, sin, cache=None):
        qk, v = self.heads(self.w_qkv(self.norm1(h)))                                # (12)
        q, k = self.qk_norm(rope(qk, cos, sin))
        y = self.attend(q, k, v, self.scale, cache)                                  # (13)
        h = h + self.drop(self.w_o(self.join(y)))                                    # (14, 4)
        u, z = self.branches(self.w_up(self.norm2(h)))                               # (17)
        return h + self.drop(self.w_down(u * self.f(z)))                             # (18, 19, 5)

    def ending(self, config):
        return {"norm_f": self.Norm(self.d, config)}


class NormFormerBlock(PreNormBlock):
    """Pre-LN with three more operations (NormFormer section 2.1); head_scale comes before w_o, as in the paper."""

    def __init__(self, config):
        super().__init__(config, LayerNorm)
        self.head_scale = nn.Parameter(torch.ones(self.n_head))                      # gamma_i
        self.norm_attn = LayerNorm(self.d, config)
        self.norm_ffn = LayerNorm(4 * self.d, config)
        self.resid_scale = nn.Parameter(torch.ones(self.d)) if config.resid_scale else 1.0   # lambda_resid, section 3

    def forward(self, h, cos, sin, cache=None):
        qk, v = self.heads(self.w_qkv(self.norm1(h)))
        q, k = self.qk_norm(rope(qk, cos, sin))
        y = self.attend(q, k, v, self.scale, cache)                                  # h_i
        y = self.gamma() * y                                                         # gamma_i h_i
        h = h + self.drop(self.norm_attn(self.w_o(self.join(y))))                    # NormScaledMHA
        u, z = self.branches(self.w_up(self.norm2(h)))
        return self.resid_scale * h + self.drop(after_norm(self.w_down, self.norm_ffn, u * self.f(z)))   # NormFFN

    def gamma(self):
        return self.head_scale.view(-1, 1, 1)


class NGPTBlock(Block):
    """Every vector on the unit sphere; the block walks on it (nGPT sections 2.2-2.4, equation numbers are its)."""
    axes = dict(w_qkv=1, w_o=0, w_up=1, w_down=0)                                    # the axis on h's side: section 2.6

    def __init__(self, config):
        super().__init__(config)
        self.small = self.d ** -0.5                                                  # stored size: section 2.6, steps 3-6
        self.s_qk = Scale(self.d, 1.0, self.small)
        self.s_u = Scale(4 * self.d, 1.0, 1.0)
        self.s_v = Scale(4 * self.d, 1.0, 1.0)
        self.alpha_a = Scale(self.d, config.alpha_init, config.alpha_scale or self.small)
        self.alpha_m = Scale(self.d, config.alpha_init, config.alpha_scale or self.small)

    def ending(self, config):
        return {"s_z": Scale(config.vocab_size, config.s_z_init, config.s_z_scale or self.small)}

    @staticmethod
    def constrain_(weight, axis):
        weight.div_(norms(weight, axis).clamp(min=1e-30))                            # section 2.6, step 2

    def constants(self):
        """What `forward` computes from parameters alone: |alpha| of attention and of the MLP, and the scales."""
        s_qk, s_v = self.s_qk().view(self.n_head, 1, self.d_k), self.s_v() * self.sqrt_d     # s_v, sqrt(d): (21)
        s_uz = torch.cat((self.s_u(), s_v)) if self.gated else s_v                   # one factor a row of w_up
        return self.alpha_a().abs(), self.alpha_m().abs(), s_qk, s_uz

    def branches(self, uz):
        return uz.chunk(2, dim=-1) if self.gated else (self.s_u(), uz)               # no gate: u is s_u times 1

    def forward(self, h, cos, sin, cache=None):
        a, m, s_qk, s_uz = self.constants()
        qk, v = self.heads(self.w_qkv(h))                                            # (12)
        q, k = (unit(rope(qk, cos, sin)) * s_qk).unbind(0)                           # (15, 16)
        y = self.attend(q, k, v, self.d_k ** 0.5, cache)                             # (13), section 2.3.2
        h_a = unit(self.drop(self.w_o(self.join(y))))                                # (14)
        h = unit(lerp(h, h_a, a))                                                    # (10)
        u, z = self.branches(scaled(s_uz, self.w_up, h))                             # (17, 20, 21)
        h_m = unit(self.drop(self.w_down(u * self.f(z))))                            # (18, 19)
        return unit(lerp(h, h_m, m))                                                 # (11)


class ANGPTBlock(Block):
    """nGPT without norms of h: factors nu bring it back to its size (anGPT Table 1; the README says where it leaves room).

    q, k and what a branch gives still have exact norms. Without biases those undo nu_qkv, nu_p, nu_acf and nu_d, which only
    keep what is before them near size 1.
    """
    axes = dict(w_qkv=1, w_o=1, w_up=1, w_down=1)                                    # the input axis: section 4.2

    def __init__(self, config):
        super().__init__(config)
        d, d_h, d_f = self.d, self.d_k, 4 * self.d
        self.small = 0.01                                                            # stored size: Table F.2
        self.nu_qkv, self.nu_p = (d / d_h) ** 0.5, (d_h / d) ** 0.5                  # section 4.3
        self.nu_uz, self.nu_d = (d / d_f) ** 0.5, (d_f / d) ** 0.5
        self.nu_acf = nu_activation(config.mlp, d)
        self.g = nn.Parameter(torch.tensor(d_h ** 0.5))                              # shape and start: README
        self.alpha_a = Scale(d, config.alpha_init, config.alpha_scale or self.small)
        self.alpha_m = Scale(d, config.alpha_init, config.alpha_scale or self.small)

    def nu(self, alpha):
        return (1 - 2 * alpha + 2 * alpha ** 2).rsqrt()                              # section 4.2, Residual update

    def constants(self):
        """As nGPT's, with nu of both."""
        a, m = self.alpha_a().abs(), self.alpha_m().abs()
        return a, m, self.nu(a), self.nu(m)

    def forward(self, h, cos, sin, cache=None):
        a, m, nu_a, nu_m = self.constants()
        qk, v = self.heads(scaled(self.nu_qkv, self.w_qkv, h))                       # Table 1, MHA
        q, k = unit(rope(qk, cos, sin)).unbind(0)
        y = self.attend(q * self.g, k, v, 1.0, cache)                                # Table 1, MHA
        h_a = unit(self.drop(self.nu_p * self.w_o(self.join(y))))
        h = lerp(h, h_a, a) * nu_a                                                   # Table 1, Residual
        u, z = self.branches(scaled(self.nu_uz, self.w_up, h))                       # Table 1, MLP
        z = self.sqrt_d * z                                                          # nGPT (21); not in Table 1: README
        h_m = unit(self.drop(self.nu_d * self.w_down(self.nu_acf * (u * self.f(z)))))
        return lerp(h, h_m, m) * nu_m                                                # Table 1, Residual

    ending = NGPTBlock.ending                                                        # Table 1, Head

    @staticmethod
    def constrain_(weight, axis):
        weight.div_(norms(weight, axis).clamp(min=1))                                # section 4.2


# name -> what makes a block from a config. A seventh: ARCHS["mine"] = MyBlock
ARCHS = {
    "layernorm": functools.partial(PreNormBlock, Norm=LayerNorm),
    "rmsnorm": functools.partial(PreNormBlock, Norm=RMSNorm),
    "powernorm": functools.partial(PreNormBlock, Norm=PowerNorm),
    "normformer": NormFormerBlock,
    "ngpt": NGPTBlock,
    "angpt": ANGPTBlock,
}


# ---------------------------------------------------------------------------------------------------------------------

class GPT(nn.Module):
    """Token embedding, n_layer blocks, head."""
    logits_at_once = 2 ** 26        # a quarter of a GB in float32; train.compile_ may take more

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)                    # (V, d)  rows
        if config.pos == "learned":
            self.wpe = nn.Embedding(config.block_size, config.n_embd)                # (block_size, d)  rows
        self.drop = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.blocks = nn.ModuleList(ARCHS[config.arch](config) for _ in range(config.n_layer))
        for name, module in self.blocks[0].ending(config).items():                   # norm_f, or s_z
            setattr(self, name, module)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)       # (V, d)  rows
        if config.tie:
            self.lm_head.weight = self.wte.weight
        self.init_weights()
        self.init_positions()

    @torch.no_grad()
    def init_weights(self):
        """Draws every matrix and embedding (section A.6 of nGPT); gains have their first value where they are made."""
        config, constrained = self.config, bool(self.blocks[0].axes)
        self.init_std = config.n_embd ** -0.5 if constrained else 0.02
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                into_residual = not constrained and name.endswith(("w_o", "w_down"))
                nn.init.normal_(module.weight, std=self.init_std / ((2 * config.n_layer) ** 0.5 if into_residual else 1))
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)
        for weight, axis in self.constrained():
            weight.copy_(unit(weight, axis))       # anGPT too starts at norm 1, though later it only bounds

    def init_positions(self):
        """The rope tables cos, sin (block_size, r/2), and Vaswani's sinusoids (block_size, d) where asked for."""
        config, dtype = self.config, torch.get_default_dtype()
        positions = torch.arange(config.block_size, dtype=torch.float64)
        def angles(channels):
            return torch.outer(positions, 10000 ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels))
        turn = angles(config.rotary_channels)
        self.register_buffer("cos", turn.cos().to(dtype), persistent=False)
        self.register_buffer("sin", turn.sin().to(dtype), persistent=False)
        if config.pos == "sinusoidal":
            turn = angles(config.n_embd)
            table = torch.stack((turn.sin(), turn.cos()), dim=-1).flatten(1)[:, :config.n_embd]
            # As large beside the token embeddings as in Vaswani et al., who multiply those by sqrt(d).
            self.register_buffer("sinusoids", (table * self.init_std).to(dtype), persistent=False)

    def constrained(self):
        """(weight, axis) of every weight whose norm the architecture fixes or bounds."""
        axes = self.blocks[0].axes
        if axes:
            embeddings = (getattr(self, name).weight for name in ("wte", "wpe", "lm_head") if hasattr(self, name))
            yield from dict.fromkeys(embeddings, 1).items()                          # once where two are tied
        for block in self.blocks:
            yield from ((getattr(block, name).weight, axis) for name, axis in axes.items())

    @torch.no_grad()
    def project_(self):
        """To be called after every optimizer step: enforces the weight constraint on the float32 master weights.

        ngpt: norm 1, angpt: norm at most 1. The others have no constraint; powernorm moves its statistics here.
        """
        for weight, axis in self.constrained():
            self.blocks[0].constrain_(weight, axis)
        for module in self.modules():
            if isinstance(module, PowerNorm):
                module.update_()

    @torch.no_grad()
    def fold_(self):
        """For decoding only: moves gains, s_u, s_v, s_z and constant factors into the weights (anGPT section 4.3).

        What depends on parameters alone is computed here, once, and most layers are called without nn.Module's
        detours: a third of the time of a token goes there. The logits stay the same to rounding. The weights no longer
        satisfy their constraint, and `.to()` would not reach what was computed: choose the device before. A model whose
        logits would change, as with a forward of one's own, or that has hooks, stays as it is.
        """
        if any(map(hooked, self.modules())):
            return self
        idx = torch.arange(min(8, self.config.block_size), device=self.cos.device)[None] % self.config.vocab_size
        try:
            folded = copy.deepcopy(self).eval()        # not compiled, even if this model is
            logits = folded(idx, idx)[0]
            fold_parts_(folded)
            # Rounding alone makes 1e-6 of the largest logit, where GPUs may round products to TF32 far more.
            room = 1e-5 if torch.get_float32_matmul_precision() == "highest" else 5e-3
            same = torch.allclose(folded(idx, idx)[0], logits, rtol=0, atol=room * logits.abs().max().item())
        except Exception:                              # unknown blocks, or a forward that misses what has gone
            same = False
        if same:
            training, self.__dict__ = self.training, folded.__dict__
            self.train(training)
        return self

    def __getstate__(self):
        """What a copy or a pickle gets: no compiled methods (see train.compile_), which would use this model's weights."""
        compiled = "after_embedding", "loss_sum", "project_"
        return {name: x for name, x in super().__getstate__().items() if name not in compiled}

    def logits(self, h):
        """The head: h (B, T, d) -> (B, T, V), token by token."""
        return scaled(self.s_z(), self.lm_head, h) if hasattr(self, "s_z") else self.lm_head(h)     # nGPT (1, 3)

    def loss_sum(self, h, targets):
        """h (B, T, d), targets (B, T) -> logits (B, T, V), sum of the cross-entropies in nats."""
        logits = self.logits(h)
        return logits, F.cross_entropy(wide(logits).flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")

    def forward(self, idx, targets=None, caches=None, loss_only=False):
        """idx, targets (B, T) token ids -> logits, mean cross-entropy in nats per token.

        With targets the logits of all positions, (B, T, V), targets of -1 not counting; without, those of the last
        position, (B, 1, V), and None. caches: one Cache a layer, then idx continues what they hold.
        loss_only: None in place of the logits, of which only some are then made at a time.
        Raises ValueError when more than block_size positions would be used.
        """
        start = caches[0].length if caches else 0
        stop = start + idx.shape[1]
        if stop > self.config.block_size:
            raise ValueError(f"{stop} tokens given to a model whose block_size is {self.config.block_size}")
        h = self.wte(idx)                                                            # (B, T, d)
        if self.config.pos != "rope":                                                # off ngpt's sphere, until eq. 10
            h = h + (self.wpe.weight if self.config.pos == "learned" else self.sinusoids)[start:stop]
        return self.after_embedding(h, self.cos[start:stop], self.sin[start:stop], targets, caches, loss_only)

    def after_embedding(self, h, cos, sin, targets, caches, loss_only):
        """The rest of `forward`, h (B, T, d): what --compile=whole compiles; embeddings are slower compiled, on CPUs."""
        h = self.drop(h)
        for i, block in enumerate(self.blocks):
            h = block(h, cos, sin, caches[i] if caches else None)
        h = h if targets is not None else h[:, -1:]
        h = self.norm_f(h) if hasattr(self, "norm_f") else h
        if targets is None:
            return self.logits(h), None
        counted = (targets >= 0).sum()
        T, at_once = h.shape[1], max(1, self.logits_at_once // (len(h) * self.config.vocab_size))
        if not loss_only or at_once >= T:
            logits, total = self.loss_sum(h, targets)
            return None if loss_only else logits, total / counted
        least = math.ceil(T / at_once)
        pieces = next((n for n in range(least, 2 * least) if T % n == 0), least)     # equal: each size is compiled
        # The backward makes the logits of a piece anew: kept, they would outweigh all else.
        sums = [checkpoint(lambda *piece: self.loss_sum(*piece)[1], *piece, use_reentrant=False)
                for piece in zip(h.chunk(pieces, dim=1), targets.chunk(pieces, dim=1))]
        return None, sum(sums) / counted

    @torch.inference_mode()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, stop=None, generator=None):
        """Continues idx (B, T), a (B,) tensor of token ids at a time: a Python generator, with a KV cache.

        temperature 0 takes the most likely token; top_k keeps the k most likely, top_p the fewest whose
        probability reaches p. After `stop` a sequence repeats it; when all have stopped, so does the generator.
        When the window is full the cache restarts from its last block_size // 2 tokens.
        """
        block_size, training = self.config.block_size, self.training
        self.eval()
        try:
            new, seen, caches = idx[:, -block_size:], [], None
            done = torch.zeros(len(idx), dtype=torch.bool, device=idx.device)
            for _ in range(max_new_tokens):
                seen.append(new)
                if caches and caches[0].length == block_size:
                    new, caches = torch.cat(seen, dim=1)[:, -max(1, block_size // 2):], None
                caches = caches or [Cache(len(idx), self.config, self.cos) for _ in self.blocks]
                token = pick(self(new, caches=caches)[0][:, -1], temperature, top_k, top_p, generator)
                token = token if stop is None else token.masked_fill(done, stop)
                yield token
                if stop is not None and (done := done | (token == stop)).all():
                    return
                new = token[:, None]                                                 # (B, 1)
        finally:
            self.train(training)


def pick(logits, temperature, top_k, top_p, generator):
    """logits (B, V) -> token ids (B,), drawn as `GPT.generate` says."""
    logits = wide(logits)
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None:
        kept = logits.topk(min(top_k, logits.shape[-1]))        # of equal ones no more than k
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept.indices, kept.values)
    if top_p is not None:
        ordered, order = logits.softmax(-1).sort(descending=True)
        before = ordered.cumsum(-1) - ordered                   # probability of everything more likely
        drop = (before >= top_p) & (before > 0)
        logits = logits.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


# ---------------------------------------------------------------------------------------------------------------------
# Faster: a first reading can stop here.

def by_matrix(linear, x):
    """Whether a gain should multiply linear's matrix, not x or linear(x).

    That is less work where x has more tokens than channels, and the gain's gradient does not need linear(x). Not where
    somebody wants the call: a map of one's own, or one with hooks.
    """
    return type(linear) is nn.Linear and not hooked(linear) and x.shape[:-1].numel() >= x.shape[-1]


def hooked(module):
    """Whether somebody hooked into the module's call, or put another forward into it."""
    return (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
            or "forward" in vars(module))


class CompiledAttention(torch.autograd.Function):
    """attend_plainly, y = p v with p = masked softmax(q k^T), its backward by hand: compiled, that is faster on CPUs.

    Autograd would keep p in float32 and pass over T x S once more. With dp = dL/dp, the gradient before the softmax is
    p (dp - sum_j p_j dp_j), and since y = p v that sum is y . dL/dy, of d_k products in place of S (FlashAttention, Dao et
    al. 2022). Uncompiled, torch's own softmax backward is the faster one.
    """

    @staticmethod
    def forward(ctx, q, k, v):
        heads = q.shape[:2]
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))                            # (B H, T, d_k)
        ys, saved = [], []
        for q_, end in parts(q):
            q_, k_, v_ = (x.contiguous() for x in (q_, k[:, :end], v[:, :end]))   # here, or each product would copy them
            p = masked_softmax(q_ @ k_.transpose(1, 2)).type_as(v)                # (B H, PART, end)
            ys.append(p @ v_)
            saved += [q_, k_, v_, p]
        y = torch.cat(ys, dim=1)
        ctx.save_for_backward(y, *saved)
        return y.unflatten(0, heads)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        heads = g.shape[:2]
        (y, *saved), g = ctx.saved_tensors, g.flatten(0, 1)                       # (B H, T, d_k)
        sums = (wide(g) * y).sum(-1, keepdim=True)                                # (B H, T, 1), y . dL/dy
        dq, dk, dv = [], [], []
        for i, (g_, end) in enumerate(parts(g)):
            q_, k_, v_, p = saved[4 * i:4 * i + 4]
            ds = (p * (g_ @ v_.transpose(1, 2) - sums[:, end - g_.shape[1]:end])).type_as(p)    # p (dp - sum_j p_j dp_j)
            later = (0, 0, 0, g.shape[1] - end)
            dq.append(ds @ k_)
            dk.append(F.pad(ds.transpose(1, 2) @ q_, later))
            dv.append(F.pad(p.transpose(1, 2) @ g_, later))
        return tuple(x.unflatten(0, heads) for x in (torch.cat(dq, dim=1), sum(dk), sum(dv)))


def masked_softmax(scores):
    """softmax of (N, T, S) over the keys up to the query's own place, in float32 or better, for CompiledAttention.

    With its rows in one dimension it compiles to one loop, in which a row stays in the nearest cache; attend_plainly's mask of
    (T, S) makes two loops over all rows. Uncompiled, that one is faster.
    """
    N, T, S = scores.shape
    rows = torch.arange(N * T, dtype=torch.int32, device=scores.device)[:, None]
    keys = torch.arange(S, dtype=torch.int32, device=scores.device)
    seen = keys <= rows % T + S - T                            # (N T, S); int32, of which vectors hold twice as many as int64
    return torch.where(seen, wide(scores).flatten(0, 1), -torch.inf).softmax(-1).view(N, T, S)


# ---------------------------------------------------------------------------------------------------------------------
# Folding, for GPT.fold_: constant factors move into the weights. A token takes about fifty small operations a layer, each
# of about a microsecond whatever it does, so that every one less counts.

class One:
    """In place of a factor that folding has moved into a weight: One() * x is x."""

    def __mul__(self, x):
        return x


def fold_parts_(gpt):
    if hasattr(gpt, "norm_f"):
        fold_norm_(gpt.norm_f, gpt.lm_head)
    else:
        fold_rows_(gpt.lm_head, gpt.s_z())
        gpt.__dict__["s_z"] = One
    for block in gpt.blocks:
        FOLDS[type(block)](block)
    for module in (gpt, *gpt.blocks):            # Python finds what is in __dict__ before nn.Module looks for the layer
        for name, layer in module.named_children():
            if name not in ("blocks", "wpe", "s_z"):
                module.__dict__[name] = bare(layer)
    for module in gpt.modules():
        if hasattr(module, "constants"):
            module.constants = functools.partial(lambda kept: kept, module.constants())


def bare(layer):
    """layer as a function, without nn.Module's detours, and without F.linear's where there is no bias."""
    if type(layer) is not nn.Linear:
        return layer.forward
    if layer.bias is None:
        return functools.partial(torch.matmul, other=layer.weight.T)
    return functools.partial(F.linear, weight=layer.weight, bias=layer.bias)


def fold_rows_(linear, factors):
    """Has linear(x) give what factors * linear(x) gave."""
    linear.weight = nn.Parameter(linear.weight * factors[..., None])
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias * factors)


def fold_gain_(linear, gain):
    """Has linear(x) give what linear(gain * x) gave."""
    linear.weight = nn.Parameter(linear.weight * gain)


def bare_rms_norm(like, n, eps):
    """x -> F.rms_norm(x, (n,), eps=eps) / sqrt(n), on CPUs in half its time; `like` has x's dtype and device."""
    floor = like.new_tensor((n * eps) ** 0.5)
    return lambda x: x / torch.hypot(norms(x, -1), floor)


def fold_norm_(norm, linear):
    """Moves the norm's gain into the linear map behind it; LayerNorm is one operation with its gain as without."""
    if type(norm) is RMSNorm:
        n = norm.weight.numel()
        fold_gain_(linear, norm.weight * n ** 0.5)
        norm.forward = bare_rms_norm(norm.weight, n, norm.eps)
    elif type(norm) is PowerNorm and norm.bias is None:
        n = norm.weight.numel() // norm.groups
        fold_gain_(linear, norm.constants() * n ** 0.5)
        bare = bare_rms_norm(norm.weight, n, norm.eps)
        norm.group_scale = lambda x: bare(x.unflatten(-1, (norm.groups, -1))).flatten(-2)
        norm.constants = One


def fold_pre_norm_(block):
    fold_norm_(block.norm1, block.w_qkv)
    fold_norm_(block.norm2, block.w_up)
    if block.g is not None:
        block.scale = block.g.item()
        del block.g
        block.g = One()


def fold_normformer_(block):
    fold_pre_norm_(block)
    fold_gain_(block.w_o, block.head_scale.repeat_interleave(block.d_k))
    block.gamma = One
    if not isinstance(block.resid_scale, nn.Parameter):
        block.resid_scale = One()


def fold_ngpt_(block):
    a, m, s_qk, s_uz = block.constants()
    fold_rows_(block.w_up, s_uz)
    block.constants = lambda: (a, m, s_qk, One())


def fold_angpt_(block):
    u = block.w_up.weight.new_full((4 * block.d,), block.nu_uz)
    fold_rows_(block.w_up, torch.cat((u, u * block.sqrt_d)) if block.gated else u * block.sqrt_d)
    fold_rows_(block.w_qkv, block.w_qkv.weight.new_full((1,), block.nu_qkv))
    fold_gain_(block.w_down, block.nu_acf)
    block.nu_qkv = block.nu_p = block.nu_uz = block.nu_acf = block.nu_d = block.sqrt_d = One()     # norms undo nu_p, nu_d


FOLDS = {PreNormBlock: fold_pre_norm_, NormFormerBlock: fold_normformer_, NGPTBlock: fold_ngpt_, ANGPTBlock: fold_angpt_}

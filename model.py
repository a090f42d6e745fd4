"""
Six ways to normalize a GPT, each written like the equations in its paper.

  --arch       one block, h the residual stream                                paper
  layernorm    h <- h + Attn(LN(h));      h <- h + MLP(LN(h))                  GPT-2's Pre-LN
  rmsnorm      h <- h + Attn(RMS(h));     h <- h + MLP(RMS(h))                 nGPT eq. 4, 5
  powernorm    h <- h + Attn(PN(h));      h <- h + MLP(PN(h))                  Shen et al. 2020
  normformer   h <- h + LN(Attn(LN(h)));  h <- h + W_down LN(f(W_up LN(h)))    NormFormer 2.1
  ngpt         h <- unit(h + a (unit(Attn(h)) - h));    the same with the MLP  nGPT eq. 10-21
  angpt        h <- nu(a) (h + a (unit(Attn(h)) - h));  the same with the MLP  anGPT Table 1

f is the MLP's activation, unit(x) = x / ||x||, a = |alpha| is learned for each channel, and
nu(a) = (1 - 2a + 2a^2)^(-1/2).
The table leaves out learned scales, constant factors, and three more things. ngpt and angpt
normalize q and k as well, and so do the others with qk_norm; rmsnorm with qk_norm is called GPT+.
NormFormer also scales each head. And after every optimizer step ngpt normalizes its weights, and
angpt bounds their norms.

The shapes in the comments at the ends of lines use these letters: B sequences of T tokens each,
d = n_embd channels, H = n_head heads of d_k = d/H channels each, and V tokens in the vocabulary.

Reading order: the configuration, small functions, norm layers, blocks, and at the end the GPT.
"""
import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_reduce
from torch.utils.checkpoint import checkpoint

try:
    from flash_attn import flash_attn_func
except ImportError:
    flash_attn_func = None


class ConfigError(ValueError):
    """An option is unknown or has an impossible value. The message says what is expected."""


@dataclass
class GPTConfig:
    """The options of a model. Raises ConfigError if they do not fit together."""
    # Model
    arch: str = "angpt"         # layernorm | rmsnorm | powernorm | normformer | ngpt | angpt
    vocab_size: int = 257       # tokens in the vocabulary (257: all bytes and an end-of-text token)
    block_size: int = 256       # context length in tokens
    n_layer: int = 4            # number of blocks
    n_head: int = 4             # attention heads in each block
    n_embd: int = 128           # channels of the residual stream
    pos: Literal["rope", "learned"] = "rope"    # how positions are encoded
    rope_fraction: float = 1.0  # fraction of each head's channels that rope rotates
    dropout: float = 0.0        # dropout on embeddings, attention weights and branch outputs
    qk_norm: bool = False       # normalize q and k, with a learned gain; ngpt and angpt always do
    mlp: Literal["swiglu", "gelu"] = "swiglu"   # activation of the MLP; ngpt and angpt need swiglu
    bias: bool = False          # biases in a block's linear maps and in norms; not for ngpt, angpt
    tie: bool = False           # one matrix for embedding and output head; not for ngpt and angpt
    embed_std: float = 0.02     # initial standard deviation of embeddings; no effect on ngpt, angpt
    resid_scale: bool = False   # normformer: a learned scale on the second residual
    checkpoint_blocks: bool = False  # recompute activations to save memory; not for powernorm
    pn_warmup: int = 4000       # powernorm: steps that normalize with the batch's own statistics

    def __post_init__(self):
        self.check_model()

    def check_model(self):
        """Raise ConfigError if the options of the model do not fit together."""
        for name in ("block_size", "n_layer", "n_head", "n_embd"):
            self.check_option(name, getattr(self, name) >= 1, "at least 1")
        self.check_option("arch", self.arch in ARCHS, " or ".join(ARCHS))
        self.check_option("pos", self.pos in ("rope", "learned"), "rope or learned")
        self.check_option("mlp", self.mlp in ("swiglu", "gelu"), "swiglu or gelu")
        self.check_option("n_embd", self.n_embd % self.n_head == 0,
                          f"a multiple of n_head={self.n_head}")
        for name in ARCHS[self.arch].refuses:
            default = getattr(GPTConfig, name)
            self.check_option(name, getattr(self, name) == default,
                              f"{default} with arch={self.arch}")

    def check_option(self, name, condition, expected):
        """Raise ConfigError, which says what was expected, unless the condition holds."""
        if not condition:
            raise ConfigError(f"{name}={getattr(self, name)}: expected {expected}")


# ---- Small functions -----------------------------------------------------------------------------

def wide(x):
    """Return x in float32, or as it is if it has at least that precision."""
    return x if x.dtype.itemsize >= 4 else x.float()


def unit(x, dim=-1):
    """Return x / ||x||_2 along dim. The norm is computed in float32 or better.

    A zero vector stays zero, and its gradient is zero, too.
    """
    norm = torch.linalg.vector_norm(wide(x), dim=dim, keepdim=True)
    return (x / norm.masked_fill(norm == 0, math.inf)).type_as(x)


def rope(x, cos, sin):
    """Return the rotary embedding (Su et al. 2021) of x (B, H, T, d_k).

    The first r = rope_fraction * d_k channels of each head (r is rounded down to an even number)
    form the pairs (i, i + r/2), i < r/2. Each pair is rotated by an angle that grows with the
    position. The other channels stay as they are.
    """
    n = cos.shape[-1]                                          # r/2; cos, sin: (T, r/2)
    a, b, rest = x.tensor_split((n, 2 * n), -1)                # (B, H, T, r/2) twice, the rest
    return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), -1).type_as(x)


def heads(qkv, n_head):
    """Split (B, T, 3d) into the heads of q, k and v, each (B, H, T, d_k)."""
    return qkv.unflatten(-1, (3 * n_head, -1)).transpose(1, 2).chunk(3, 1)  # from (B, 3H, T, d_k)


def joined(y):
    """Join the heads (B, H, T, d_k) to (B, T, d)."""
    return y.transpose(1, 2).flatten(2)


def attend(q, k, v, scale, cache=None, dropout=0.0):
    """Return softmax(scale q k^T + causal mask) v for q, k, v (B, H, T, d_k).

    The keys and values of a cache come before k and v. There are three ways to the same result: the
    formula itself, flash_attn's kernel, and torch's own.
    """
    # The kernels below take only a number as their scale, and ours may be a learned tensor.
    # Under autocast nGPT's s_qk, a float32 vector, has made q and k float32. Return to v's dtype.
    q = (scale * q).type_as(v)
    k = k.type_as(v)
    if cache is not None:
        k, v = cache.extend(k, v)
    # The T queries are the last of S positions.
    T, S = q.shape[2], k.shape[2]

    # The formula itself is for two cases. If several queries come after a cache, torch's is_causal
    # would treat them as the first of the S positions. And for short sequences on a CPU a step with
    # torch's kernel takes a quarter longer.
    if 1 < T < S or (1 < T <= 512 and v.is_cpu):
        # With int64 positions, torch's default, a step would take a tenth longer.
        position = torch.arange(S, device=v.device, dtype=torch.int32)
        scores = q @ k.mT                                                         # (B, H, T, S)
        scores = scores.masked_fill(position > position[S - T:, None], -math.inf)
        return F.dropout(scores.softmax(-1), dropout).type_as(v) @ v

    # flash_attn needs half precision. On an H100 or B200, torch's own kernel is cuDNN's (if torch
    # is built for CUDA 13), which is faster than flash_attn's.
    half_on_gpu = v.is_cuda and v.dtype.itemsize == 2
    if flash_attn_func and half_on_gpu and T == S and not on_hopper(v.device):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))   # (B, T, H, d_k), as flash_attn has it
        y = flash_attn_func(q, k, v, dropout_p=dropout, softmax_scale=1.0, causal=True)
        return y.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=T > 1, scale=1.0)


def on_hopper(device):
    """Return whether a GPU is an H100 or newer (compute capability 9 and up)."""
    return torch.cuda.get_device_properties(device).major >= 9


class Cache:
    """The keys and values of one layer for the tokens so far: (2, B, H, length, d_k)."""
    length = 0

    def extend(self, k, v):
        new = torch.stack((k, v))
        self.kv = torch.cat((self.kv, new), 3) if self.length else new
        self.length += k.shape[2]
        return self.kv


def gelu(x):
    """Return GPT-2's GELU, x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2."""
    # (1 + tanh(y)) / 2 = sigmoid(2y), and a compiled sigmoid is faster.
    return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x ** 3))


def swiglu(x):
    """Return u SiLU(z) for x = (u, z): from (..., 8d) to (..., 4d). (nGPT eq. 18)"""
    u, z = x.chunk(2, -1)
    return u * F.silu(z)


class Scale(nn.Module):
    """n learned numbers initialized to `init`, and stored multiplied by scale / init (nGPT 2.5).

    Adam moves each stored number by about the learning rate per step, and therefore the number
    itself by learning rate * init / scale.
    """

    # init must not be 0, because forward multiplies by it. For numbers that begin at 0 use
    # nn.Parameter(torch.zeros(n)).
    def __init__(self, n, init, scale):
        super().__init__()
        self.init, self.scale = init, scale
        self.weight = nn.Parameter(scale * torch.ones(n))

    def forward(self):
        return self.weight * (self.init / self.scale)


# ---- Norm layers: Norm(n, config) normalizes (B, T, n) -------------------------------------------

class LayerNorm(nn.LayerNorm):
    """weight * (x - mean(x)) / sqrt(var(x) + eps) + bias, where mean and var divide by n."""

    def __init__(self, n, config):
        super().__init__(n, eps=1e-5, bias=config.bias)


class RMSNorm(nn.RMSNorm):
    """weight * x / sqrt(mean(x^2) + eps). Nothing is subtracted or added."""

    def __init__(self, n, config):
        super().__init__(n, eps=1e-6)


class PowerNorm(nn.Module):
    """weight * x / sqrt(psi2 + eps) + bias, where psi2 is a running mean of x^2 (Shen et al. 2020).

    Each channel has a psi2 of its own. GroupScaling1D comes first: it divides each of a token's
    four groups of channels by its root mean square.

    In the first pn_warmup steps the batch's own mean of x^2 takes the place of psi2. That mean
    includes later tokens, so the training loss then sees the future. After the warmup, and always
    in evaluation, nothing leaks.
    """
    eps = 1e-5
    groups = 4
    rate = 0.1  # update rate of the running means

    def __init__(self, n, config):
        super().__init__()
        if n % self.groups:
            raise ConfigError(f"n_embd={n}: expected a multiple of {self.groups} "
                              "with arch=powernorm")
        self.warmup = config.pn_warmup
        self.weight = nn.Parameter(torch.ones(n))
        self.bias = nn.Parameter(torch.zeros(n)) if config.bias else 0.0
        self.register_buffer("psi2", torch.ones(n))
        # nu is for the backward pass. Let psi = sqrt(psi2 + eps), xhat = x / psi, and g = dL/dxhat.
        # If psi2 were the mean of x^2 over this batch, the chain rule would give
        #     dL/dx = (g - mean(g xhat) xhat) / psi.
        # PowerNorm puts the running value nu in the place of mean(g xhat). update_() moves nu by a
        # tenth of mean(g xhat) - nu mean(xhat^2), which is the mean of (g - nu xhat) xhat. Where
        # xhat^2 has the mean 1, this makes nu a running mean of g xhat.
        # nu is not a parameter. It requires a gradient only because PowerScale's backward pass
        # returns what update_() needs in the place of nu's gradient.
        self.register_buffer("nu", torch.zeros(n, requires_grad=True))
        self.register_buffer("steps", torch.tensor(0.0))
        # These add up the moments of an optimizer step's micro-batches, and count them. (All n
        # entries of micro_steps are equal.)
        for name in ("moment", "micro_steps"):
            self.register_buffer(name, torch.zeros(n), persistent=False)

    def group_scale(self, x):
        groups = x.unflatten(-1, (self.groups, -1))  # (B, T, 4, n/4)
        return F.rms_norm(groups, groups.shape[-1:], eps=self.eps).flatten(-2)

    def forward(self, x):
        x = self.group_scale(x)
        if self.training:
            moment = mean_over_ranks(x.detach().square().mean((0, 1)))  # (n,)
            psi2 = torch.where(self.steps < self.warmup, moment, self.psi2) + self.eps
            self.moment += moment
            self.micro_steps += 1
            xhat = PowerScale.apply(x, psi2.rsqrt(), self.nu)
        else:
            xhat = x * (self.psi2 + self.eps).rsqrt()
        return self.weight * xhat + self.bias

    def _apply(self, fn, recurse=True):
        # .to() and .double() put a new tensor in nu's place, which would receive no gradient.
        super()._apply(fn, recurse)
        self.nu = self.nu.detach().requires_grad_()
        return self

    @torch.no_grad()
    def update_(self):
        """Update the running means: psi2 <- 0.9 psi2 + 0.1 x^2, nu <- nu + 0.1 (g - nu xhat) xhat.

        The second terms are means over all tokens of the step, on all ranks.
        """
        # There is no gradient yet when GPT.init_weights calls this.
        if self.nu.grad is not None:
            self.psi2.lerp_(self.moment / self.micro_steps, self.rate)
            self.nu.add_(mean_over_ranks(self.nu.grad) / self.micro_steps, alpha=self.rate)
            self.steps += 1
        self.nu.grad = None
        self.moment.zero_()
        self.micro_steps.zero_()


class PowerScale(torch.autograd.Function):
    """xhat = x / psi, with the published backward dL/dx = (g - nu xhat) / psi, where g = dL/dxhat.

    psi and nu are constants, and L is the mean loss of the tokens of all ranks.
    """

    @staticmethod
    def forward(ctx, x, inv_psi, nu):
        xhat = x * inv_psi
        ctx.save_for_backward(xhat, inv_psi, nu)
        return xhat

    @staticmethod
    def backward(ctx, g):
        xhat, inv_psi, nu = ctx.saved_tensors
        left = g - nu * xhat
        # This is not a derivative: update_ adds it to nu.
        nu_grad = (left * xhat).mean((0, 1))  # (n,)
        return left * inv_psi, None, nu_grad


def mean_over_ranks(x):
    """Return the mean of a tensor over all ranks, the processes that train together."""
    if dist.is_initialized():
        # The functional all_reduce returns a new tensor. dist.all_reduce would overwrite x.
        x = all_reduce(x, "sum", dist.group.WORLD) / dist.get_world_size()
    return x


# ---- Blocks: forward(h, cos, sin, cache) maps the residual stream h (B, T, d) to the next one ----
# cos and sin are rope's tables, and cache is this layer's Cache, or None if no text is generated.

WRITERS = ("w_o.weight", "w_down.weight")  # the matrices that write to the residual stream

# If you write a block of your own:
# - Its forward should hand `cache` to attend(), as the blocks below do. Otherwise it trains well,
#   but each token that it generates is computed without the earlier ones.
# - GPT.init_weights draws the weights of nn.Linear and nn.Embedding and zeroes their biases. (Set
#   other values in start_().) Only these weights are constrained if `sphere` is True. Your other
#   parameters keep the values that you give them. (make_optimizer in train.py applies weight decay
#   to all parameters with two or more dimensions.)
# - An option of your own is a new field of GPTConfig. (A number must be at least 0, because of
#   check_ranges in train.py.) A block that does not have the option should list it in `refuses`.
# - To train on several GPUs, each parameter must take part in the loss, and a buffer that forward
#   changes in training must get the same value on each of them (PowerNorm uses mean_over_ranks).
# - In training, forward must not use a buffer and then change it in place, for example by
#   self.mean.lerp_(...). In a compiled block the backward pass may read the changed values, and
#   then the gradients are wrong. Assign a new tensor, which must not be part of the graph:
#   self.mean = self.mean.lerp(x.detach().mean((0, 1)), 0.1). (forward runs once per micro-batch.
#   PowerNorm's forward only adds to sums that its result does not use. Its update_() changes psi2
#   and nu, once per optimizer step.)
# - With --checkpoint_blocks=true forward is called twice. A block whose forward changes a buffer
#   must refuse the option, as powernorm's does.
# - If a block's class has changed since a run, train.py says so when the run is resumed. It misses
#   changed functions and constants outside the class.


class Block(nn.Module):
    """The linear maps that all blocks have, and the class attributes that GPT and train.py read."""

    # The name of the recipe in train.py that fits this block. None stands for rmsnorm's. (The file
    # of a block of your own may add a recipe to train.RECIPES.)
    family = None
    # The norm layer. GPT puts one after the last block, and PreNormBlock two into each block.
    Norm = nn.Identity
    # Options that must keep their defaults, because this block does not support them.
    refuses = ("resid_scale",)
    # True if the weights have norms of 1, or at most 1. Then GPT initializes them with norms of 1,
    # calls constrain_ after each optimizer step, and multiplies the logits by s_z, a learned Scale
    # with this block's `scale`.
    sphere = False
    # If sphere is True, the columns of these matrices are constrained, and the rows of all others.
    # (The weight of an nn.Linear has one row for each output.)
    columns = ()

    def __init__(self, config):
        super().__init__()
        d = config.n_embd
        self.d = d
        self.n_head = config.n_head
        self.d_k = d // config.n_head
        self.dropout = config.dropout           # for attention weights
        self.drop = nn.Dropout(config.dropout)  # for the outputs of w_o and w_down
        self.w_qkv = nn.Linear(d, 3 * d, bias=config.bias)
        self.w_o = nn.Linear(d, d, bias=config.bias)
        self.w_up = nn.Linear(d, 8 * d if config.mlp == "swiglu" else 4 * d, bias=config.bias)
        self.w_down = nn.Linear(4 * d, d, bias=config.bias)

    def start_(self, layer):
        """Let a subclass change its initial weights here. `layer` counts the blocks from 1."""


class PreNormBlock(Block):
    """h <- h + Attn(Norm(h)); h <- h + MLP(Norm(h)): layernorm, rmsnorm and powernorm.

    The numbers at the ends of the lines are those of nGPT's equations.
    """
    family = "rmsnorm"

    def __init__(self, config):
        super().__init__(config)
        self.norm1 = self.Norm(self.d, config)
        self.norm2 = self.Norm(self.d, config)
        self.f = swiglu if config.mlp == "swiglu" else gelu
        self.norm_qk = unit if config.qk_norm else nn.Identity()  # GPT+ (anGPT Table 1)
        # g multiplies the scores, which should have a variance of about 1. If the entries of q and
        # k have variance 1, that of q k^T is d_k; if q and k are unit vectors, it is 1 / d_k.
        self.g = nn.Parameter(torch.tensor(self.d_k ** 0.5)) if config.qk_norm else self.d_k ** -0.5

    def forward(self, h, cos, sin, cache=None):
        q, k, v = heads(self.w_qkv(self.norm1(h)), self.n_head)              # (12)
        q = self.norm_qk(rope(q, cos, sin))
        k = self.norm_qk(rope(k, cos, sin))
        y = attend(q, k, v, self.g, cache, self.dropout * self.training)     # (13)
        h = h + self.drop(self.w_o(joined(y)))                               # (14, 4): (B, T, d)
        return h + self.drop(self.w_down(self.f(self.w_up(self.norm2(h)))))  # (17, 18, 19, 5)


class LayerNormBlock(PreNormBlock):
    family = "layernorm"
    Norm = LayerNorm


class RMSNormBlock(PreNormBlock):
    Norm = RMSNorm


class PowerNormBlock(PreNormBlock):
    family = "powernorm"
    Norm = PowerNorm
    # Computing activations twice would count a micro-batch twice, which halves nu's update.
    refuses = ("resid_scale", "checkpoint_blocks")


class NormFormerBlock(PreNormBlock):
    """Pre-LN with three more operations (NormFormer section 2.1).

    head_scale stands before w_o, as in the paper; the authors' code has it after.
    """
    family = "normformer"
    Norm = LayerNorm
    refuses = ()

    def __init__(self, config):
        super().__init__(config)
        self.head_scale = nn.Parameter(torch.ones(self.n_head))  # gamma_i
        self.norm_attn = LayerNorm(self.d, config)
        self.norm_ffn = LayerNorm(4 * self.d, config)
        self.resid_scale = 1.0
        if config.resid_scale:
            self.resid_scale = nn.Parameter(torch.ones(self.d))  # lambda_resid, section 3

    # The comments at the ends of lines give the paper's names. There h_i is the output of head i.
    def forward(self, h, cos, sin, cache=None):
        q, k, v = heads(self.w_qkv(self.norm1(h)), self.n_head)
        q = self.norm_qk(rope(q, cos, sin))
        k = self.norm_qk(rope(k, cos, sin))
        y = attend(q, k, v, self.g, cache, self.dropout * self.training)  # h_i
        y = self.head_scale.view(-1, 1, 1) * y                            # gamma_i h_i
        h = h + self.norm_attn(self.drop(self.w_o(joined(y))))            # NormScaledMHA
        h_m = self.f(self.w_up(self.norm2(h)))
        h_m = self.drop(self.w_down(self.norm_ffn(h_m)))                  # NormFFN
        return self.resid_scale * h + h_m                                 # ResScale


class NGPTBlock(Block):
    """h and the output of each branch have norm 1, and so have q and k, before s_qk scales them.

    See nGPT sections 2.2 to 2.4. The numbers at the ends of the lines are those of its equations.
    Our z is the paper's v.
    """
    family = "ngpt"
    sphere = True
    refuses = ("bias", "tie", "mlp", "resid_scale")
    # The columns of these matrices have d channels (section 2.6).
    columns = WRITERS

    def __init__(self, config):
        super().__init__(config)
        d = self.d
        self.scale = d ** -0.5  # section 2.6
        self.s_qk = Scale(d, init=1.0, scale=self.scale)
        self.s_u = Scale(4 * d, init=1.0, scale=1.0)
        self.s_v = Scale(4 * d, init=1.0, scale=1.0)  # for z
        self.alpha_a = Scale(d, init=0.05, scale=self.scale)
        self.alpha_m = Scale(d, init=0.05, scale=self.scale)

    def constrain_(self, weight, dim):
        """Divide the vectors along `dim` by their norms."""
        weight.div_(weight.norm(dim=dim, keepdim=True).clamp(min=1e-30))

    def forward(self, h, cos, sin, cache=None):
        s_qk = self.s_qk().view(self.n_head, 1, self.d_k)
        q, k, v = heads(self.w_qkv(h), self.n_head)                                # (12)
        q = unit(rope(q, cos, sin)) * s_qk                                         # (15)
        k = unit(rope(k, cos, sin)) * s_qk                                         # (16)
        y = attend(q, k, v, self.d_k ** 0.5, cache, self.dropout * self.training)  # (13), 2.3.2
        h_a = unit(self.drop(self.w_o(joined(y))))                                 # (14)
        h = unit(h + self.alpha_a().abs() * (h_a - h))                             # (10)
        u, z = self.w_up(h).chunk(2, -1)                                           # (17): (B,T,4d)
        u = u * self.s_u()                                                         # (20)
        z = z * self.s_v() * self.d ** 0.5                                         # (21)
        h_m = unit(self.drop(self.w_down(u * F.silu(z))))                          # (18, 19)
        return unit(h + self.alpha_m().abs() * (h_m - h))                          # (11)


class ANGPTBlock(Block):
    """nGPT with factors nu, which do not depend on h, in place of the norms of h (anGPT Table 1).

    Only nu(alpha) and nu_uz have an effect, because unit() cancels the other factors.
    """
    family = "angpt"
    sphere = True
    refuses = ("bias", "tie", "mlp", "resid_scale")
    scale = 0.01  # Table F.2

    def __init__(self, config):
        super().__init__(config)
        d, d_k = self.d, self.d_k
        self.nu_qkv = (d / d_k) ** 0.5                        # section 4.3
        self.nu_p = (d_k / d) ** 0.5
        self.nu_uz = 0.5                                      # sqrt(d / 4d)
        self.nu_d = 2.0                                       # sqrt(4d / d)
        # 1 / sqrt(E[SiLU(t)^2]), computed as in section 4.2, for a normal t with variance 1/4, as z
        # has it below. (Section 4.3 prints 3.74.)
        self.nu_acf = 3.72035
        # The paper gives neither the shape of g nor its initial value, so both are our choice.
        self.g = nn.Parameter(torch.tensor(d_k ** 0.5))
        self.alpha_a = Scale(d, init=0.05, scale=self.scale)
        self.alpha_m = Scale(d, init=0.05, scale=self.scale)

    def constrain_(self, weight, dim):
        """Shrink the vectors along `dim` that are longer than 1 to norm 1 (section 4.2)."""
        weight.div_(weight.norm(dim=dim, keepdim=True).clamp(min=1.0))

    def nu(self, alpha):
        return (1 - 2 * alpha + 2 * alpha ** 2).rsqrt()  # section 4.2 (4.3 lacks the power -1/2)

    def forward(self, h, cos, sin, cache=None):
        alpha_a = self.alpha_a().abs()                             # (d,)
        alpha_m = self.alpha_m().abs()
        q, k, v = heads(self.w_qkv(self.nu_qkv * h), self.n_head)  # Table 1, MHA
        q = unit(rope(q, cos, sin)) * self.g
        k = unit(rope(k, cos, sin))
        y = attend(q, k, v, 1.0, cache, self.dropout * self.training)
        h_a = unit(self.nu_p * self.drop(self.w_o(joined(y))))     # (B, T, d)
        h = self.nu(alpha_a) * (h + alpha_a * (h_a - h))           # Table 1, Residual
        u, z = self.w_up(self.nu_uz * h).chunk(2, -1)              # Table 1, MLP: (B, T, 4d)
        # In Table 1 only nGPT has this factor (nGPT (21)). It gives z the standard deviation 1/2
        # that nu_acf assumes.
        z = z * self.d ** 0.5
        h_m = unit(self.nu_d * self.drop(self.w_down(self.nu_acf * u * F.silu(z))))
        return self.nu(alpha_m) * (h + alpha_m * (h_m - h))        # Table 1, Residual


# A seventh arch is one assignment: ARCHS["mine"] = MyBlock
ARCHS = {
    "layernorm": LayerNormBlock,
    "rmsnorm": RMSNormBlock,
    "powernorm": PowerNormBlock,
    "normformer": NormFormerBlock,
    "ngpt": NGPTBlock,
    "angpt": ANGPTBlock,
}


class GPT(nn.Module):
    """An embedding, blocks, a last norm (except in ngpt and angpt) and the output head.

    Call project_() after each optimizer step.
    """
    # The most logits that the loss computes at once: a quarter of a GB in float32 on a CPU, and
    # 4 GB in bfloat16 on a GPU, where compiled code needs no copy of them in float32.
    most_logits = 2 ** 26
    most_logits_on_gpu = 2 ** 31

    def __init__(self, config):
        super().__init__()
        V, d = config.vocab_size, config.n_embd
        self.config = config
        self.wte = nn.Embedding(V, d)
        if config.pos == "learned":
            self.wpe = nn.Embedding(config.block_size, d)
        self.blocks = nn.ModuleList(ARCHS[config.arch](config) for _ in range(config.n_layer))
        block = self.blocks[0]
        self.sphere = block.sphere                  # ngpt, angpt
        self.norm_f = block.Norm(d, config)
        if self.sphere:
            self.s_z = Scale(V, init=1.0, scale=block.scale)
        self.lm_head = nn.Linear(d, V, bias=False)  # its weight is (V, d)
        if config.tie:
            self.lm_head.weight = self.wte.weight
        # Rope's tables, for all positions. Without rope they have no channels.
        pairs = int(config.rope_fraction * block.d_k / 2) if config.pos == "rope" else 0
        frequency = 10000 ** -(torch.arange(pairs).double() / pairs)      # radians per token
        angles = torch.outer(torch.arange(config.block_size), frequency)  # (block_size, pairs)
        self.register_buffer("cos", angles.cos().type_as(self.wte.weight), persistent=False)
        self.register_buffer("sin", angles.sin().type_as(self.wte.weight), persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Draw the weights of linear maps and embeddings, and zero their biases."""
        for name, p in self.named_parameters():
            # Gains and scales already have their values. (blocks.0.w_o.weight is in blocks.0.w_o.)
            module_name, _, _ = name.rpartition(".")
            if not isinstance(self.get_submodule(module_name), (nn.Linear, nn.Embedding)):
                continue
            std = self.config.embed_std if name in ("wte.weight", "wpe.weight") else 0.02
            if name.endswith(WRITERS):
                # As in GPT-2: the residual stream is a sum of 2 n_layer outputs of such matrices.
                std /= (2 * self.config.n_layer) ** 0.5
            if p.dim() == 2:
                # If sphere is True, project_ scales each vector to norm 1 afterwards. angpt's
                # constrain_ shrinks only what is longer than 1, so draw long vectors.
                p.normal_(std=100.0 if self.sphere else std)
            else:
                p.zero_()  # a bias
        for layer, block in enumerate(self.blocks, 1):
            block.start_(layer)
        self.project_()

    @torch.no_grad()
    def project_(self):
        """Constrain ngpt's and angpt's weights, and update powernorm's running means."""
        for name, module in self.named_modules():
            if isinstance(module, PowerNorm):
                module.update_()
            elif self.sphere and isinstance(module, (nn.Linear, nn.Embedding)):
                # Columns of the matrices in `columns` are constrained, and rows of all others.
                dim = 0 if f"{name}.weight".endswith(self.blocks[0].columns) else 1
                self.blocks[0].constrain_(module.weight, dim)

    def logits(self, h):
        """Return the logits (B, T, V) of h (B, T, d)."""
        if not self.sphere:
            return self.lm_head(h)               # nGPT eq. (1)
        # For one position, as in generation, it is cheaper to multiply the logits by s_z.
        if h.shape[1] == 1:
            return self.s_z() * self.lm_head(h)  # (1), (3)
        # For many positions, multiply the rows of the matrix instead. That gives the same result,
        # but on a GPU the backward pass needs no float32 copy of the logits.
        rows = self.s_z()[:, None] * self.lm_head.weight  # (V, d)
        return F.linear(h, rows)                 # (1), (3)

    def summed_loss(self, h, targets):
        """Return the summed cross-entropy of h (B, T, d) in nats. Targets of -1 do not count."""
        logits = wide(self.logits(h)).flatten(0, 1)  # (B T, V)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="sum")

    def mean_loss(self, h, targets):
        """Return the mean cross-entropy of h (B, T, d) in nats. Targets of -1 do not count."""
        n_logits = targets.numel() * self.config.vocab_size
        at_once = self.most_logits_on_gpu if h.is_cuda else self.most_logits
        if n_logits <= at_once:
            total = self.summed_loss(h, targets)
        else:
            # To save memory, take chunks of positions, and let the backward pass compute each chunk
            # again. The number of chunks is a power of two. If T is a power of two as well, all
            # chunks have the same shape, and summed_loss is compiled only once.
            n_chunks = 2 ** math.ceil(math.log2(n_logits / at_once))
            n_chunks = min(n_chunks, h.shape[1])
            total = 0.0
            for chunk in zip(h.chunk(n_chunks, 1), targets.chunk(n_chunks, 1)):
                total = total + checkpoint(self.summed_loss, *chunk, use_reentrant=False)
        return total / (targets >= 0).sum()

    def forward(self, idx, targets=None, caches=None, loss_only=False):
        """Return (logits, loss) for token ids idx and targets, each (B, T).

        The logits are (B, T, V), or None with loss_only. The loss is the mean cross-entropy in
        nats; targets of -1 do not count. Without targets the result is the logits of the last
        position (B, 1, V), and None. `caches`, one per layer, hold the keys and values of the
        tokens before idx. Raises ValueError if there are more than block_size tokens.
        """
        config = self.config
        start = caches[0].length if caches else 0
        stop = start + idx.shape[1]
        if stop > config.block_size:
            raise ValueError(f"got {stop} tokens, but block_size is {config.block_size}")
        h = self.wte(idx)  # (B, T, d)
        if config.pos == "learned":
            h = h + self.wpe.weight[start:stop]
        h = F.dropout(h, config.dropout, self.training)
        cos = self.cos[start:stop]
        sin = self.sin[start:stop]
        for block, cache in zip(self.blocks, caches or [None] * config.n_layer):
            if config.checkpoint_blocks:
                h = checkpoint(block, h, cos, sin, cache, use_reentrant=False)
            else:
                h = block(h, cos, sin, cache)
        h = self.norm_f(h)
        if targets is None:
            return self.logits(h[:, -1:]), None
        # mean_loss computes logits of its own, so train.py sets loss_only.
        logits = None if loss_only else self.logits(h)
        return logits, self.mean_loss(h, targets)

    @torch.inference_mode()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """Continue idx (B, T): yield the next token ids (B,), max_new_tokens times.

        At temperature 0 the next token is the likeliest one. Otherwise it is drawn, and if top_k is
        set, it is drawn from the top_k likeliest ones. Only the last block_size tokens of idx are
        used. When the context is full, its older half is dropped.
        """
        size = self.config.block_size
        new = idx[:, -size:]
        was_training = self.training
        caches = [Cache() for _ in self.blocks]
        self.eval()
        try:
            for _ in range(max_new_tokens):
                if caches[0].length == size:
                    # The context is full. Keep its newer half, and compute its caches again.
                    caches = [Cache() for _ in self.blocks]
                    new = idx[:, -max(1, size // 2):]
                logits, _ = self(new, caches=caches)  # (B, 1, V)
                logits = wide(logits[:, -1])          # (B, V)
                if top_k:
                    least = logits.topk(min(top_k, self.config.vocab_size)).values[:, -1:]
                    logits = logits.masked_fill(logits < least, -math.inf)
                if temperature == 0:
                    new = logits.argmax(-1, keepdim=True)  # (B, 1)
                else:
                    p = (logits / temperature).softmax(-1)
                    new = torch.multinomial(p, 1, generator=generator)
                idx = torch.cat((idx, new), 1)
                yield new[:, 0]
        finally:
            self.train(was_training)

"""
Register twenty-three architectures besides the six.

These are nGPT's optional forms; two steps from nGPT to anGPT (anGPT Fig. 5); NormFormer without one
of its operations; PowerNorm as the main text of its paper has it; and the norms of other papers,
older and newer than the six.

Importing this file registers them. So does an --arch that names this file before the colon:

    import lessons.extras.variants
    train(TrainConfig(arch="ngpt_slerp", max_steps=500))

    python train.py --arch=lessons/extras/variants.py:ngpt_slerp --max_steps=500

  ngpt_no_qk_norm           q and k are not normalized        nGPT Table 6, row 1
  ngpt_slerp                SLERP in place of LERP            nGPT eq. 6; Table 6, row 2
  ngpt_scalar               vectors of scales become numbers  as in nGPT Table 5, all but s_z
  ngpt_riemann              h moves in its tangent space      nGPT eq. 28-30
  ngpt_by_depth             alpha starts at 0.2 / n_layer     2604.27077
  ngpt_corrected            nu(alpha), not unit, ends a step  anGPT Fig. 5, "with LERP correction"
  ngpt_bounded              the same, with bounded weights    anGPT Fig. 5, "with param. bounding"
  normformer_no_attn_ln     no LayerNorm after attention      NormFormer Table 4
  normformer_no_ffn_ln      no LayerNorm in the MLP           NormFormer Table 4
  normformer_no_head_scale  no gain for each head             NormFormer Table 4
  powernorm_plain           no GroupScaling1D                 diverges if deep: see lesson 2

Below, h is the residual stream, F a branch (attention or MLP), N a norm, and l = 1, ..., L the
number of a layer.

  postln      h <- LN(h + F(h)), as in the first Transformer      NormFormer section 1
  mixln       h <- N(h + F(h)) where l <= L/4, then h + F(N(h))   Mix-LN, 2412.13795
  deepnorm    h <- LN((2L)^(1/4) h + F(h)), F starts smaller      DeepNet, 2203.00555
  keel        h <- LN(2L h + F(LN(h)))                            Keel, 2601.19895
  periln      h <- h + N(F(N(h))), as in Gemma 2                  Peri-LN, 2502.02732
  olmo2       h <- h + N(F(h)), with norms of q, k before rope    OLMo 2, 2501.00656
  hybridnorm  h <- N(h + Attn(h)), with norms of q, k and v;      HybridNorm, 2503.04598
              then h <- h + MLP(h)
  lnscale     h <- h + F(N(h) / sqrt(l))                          anGPT section 3.2, Appendix A

The last four have another N in h <- h + F(N(h)):

  dyt         weight tanh(alpha x)                                anGPT Appendix A
  derf        weight erf(alpha x + s)                             Derf, 2512.10938
  seednorm    (weight + alpha tanh(beta . x)) x / rms(x)          SeeDNorm, 2510.22777
  gatednorm   y sigmoid(U silu(D y)), where y = RMSNorm(x)        GatedNorm, 2601.22966

NormFormer's fourth operation is the option resid_scale. With qk_norm=True, lnscale is anGPT's "GPT+
with LN scaling", and dyt is its "GPT+ with DyT", except that the paper mentions one more learned
scale there without saying where it belongs.

We could not compare every equation with its paper. Those of the papers that are given by arXiv
number come from the authors' code (mixln, deepnorm, hybridnorm, derf), from a library's code
(olmo2), from the text of the paper (gatednorm), or from other descriptions (ngpt_by_depth, periln,
keel, seednorm). Where we could not check a detail, the class says so.

The recipes are not tuned for these architectures. Those whose names begin with one of the six use
its recipe. periln and olmo2 use that of normformer, which has a norm at the end of a branch, too.
The others use that of rmsnorm.

Hyper-connections, value residuals and other changes to the residual stream itself are not here:
they would need another class GPT.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

from model import (ANGPTBlock, ARCHS, LayerNorm, NGPTBlock, NormFormerBlock, PowerNorm,
                   PowerNormBlock, PreNormBlock, RMSNorm, Scale, attend, heads, rope, unit, wide)


# ---- nGPT ----------------------------------------------------------------------------------------

class StepsBlock(NGPTBlock):
    """NGPTBlock with methods to override. As it stands, it computes what NGPTBlock does."""

    def qk_norm(self, x):
        """Return q or k (..., T, d_k), normalized."""
        return unit(x)                                                      # (15, 16)

    def step(self, h, y, alpha):
        """Move h (B, T, d) a share alpha (d,) of the way to the unit vectors y (B, T, d)."""
        return unit(h + alpha * (y - h))                                    # (10, 11)

    def forward(self, h, cos, sin, cache=None):
        s_qk = self.s_qk().view(self.n_head, 1, self.d_k)
        q, k, v = heads(self.w_qkv(h), self.n_head)                         # (12)
        q = self.qk_norm(rope(q, cos, sin)) * s_qk                          # (15)
        k = self.qk_norm(rope(k, cos, sin)) * s_qk                          # (16)
        y = attend(q, k, v, self.d_k ** 0.5, cache, self.dropout * self.training)  # (13)
        h_a = unit(self.drop(self.w_o(y.transpose(1, 2).flatten(2))))       # (14): (B, T, d)
        h = self.step(h, h_a, self.alpha_a().abs())                         # (10)
        u, z = self.w_up(h).chunk(2, dim=-1)                                # (17): (B, T, 4d) each
        u = u * self.s_u()                                                  # (20)
        z = z * self.s_v() * self.d ** 0.5                                  # (21)
        h_m = unit(self.drop(self.w_down(u * F.silu(z))))                   # (18, 19)
        return self.step(h, h_m, self.alpha_m().abs())                      # (11)


class NoQKNorm(StepsBlock):
    """nGPT without the norms of q and k."""

    def qk_norm(self, x):
        return x


class Slerp(StepsBlock):
    """nGPT with spherical interpolation between h and y, channel by channel.

    If alpha were one number, h would move on the arc to y. Its entries differ, so h leaves the arc.
    """

    def step(self, h, y, alpha):
        # The derivative of arccos is infinite at -1 and 1, so theta keeps away from 0 and pi.
        theta = (h * y).sum(-1, keepdim=True).clamp(-0.9999, 0.9999).arccos()  # (B, T, 1)
        # This is (6) times sin(theta), a factor that unit takes out again.
        return unit(((1 - alpha) * theta).sin() * h + (alpha * theta).sin() * y)


class ScalarScale(Scale):
    """A Scale with one learned number in all its n entries."""

    def __init__(self, n, init, scale):
        super().__init__(1, init, scale)
        self.n = n

    def forward(self):
        return super().forward().expand(self.n)


class ScalarScales(NGPTBlock):
    """nGPT with one number in place of each vector of scales in a block.

    Here s_u has no effect: it scales the input of w_down, whose output is normalized.
    """

    def __init__(self, config):
        super().__init__(config)
        for name in ("s_qk", "s_u", "s_v", "alpha_a", "alpha_m"):
            vector = getattr(self, name)
            setattr(self, name, ScalarScale(len(vector.weight), vector.init, vector.scale))


class Riemannian(StepsBlock):
    """nGPT whose step goes in the direction of y, projected onto the tangent space at h."""

    def step(self, h, y, alpha):
        gradient = h * (h * y).sum(-1, keepdim=True) - y                    # (28)
        return unit(h - alpha * gradient)                                   # (29, 30)


class AlphaByDepth(NGPTBlock):
    """nGPT whose alphas start at 0.2 / n_layer.

    2604.27077 changes more in nGPT. We could not check its equation.
    """

    def __init__(self, config):
        super().__init__(config)
        self.alpha_a.init = 0.2 / config.n_layer
        self.alpha_m.init = 0.2 / config.n_layer


class Corrected(StepsBlock):
    """nGPT whose step ends with anGPT's factor nu(alpha) instead of a norm."""
    nu = ANGPTBlock.nu

    def step(self, h, y, alpha):
        return self.nu(alpha) * (h + alpha * (y - h))  # anGPT Table 1, Residual


class Bounded(Corrected):
    """Corrected with weights of norm at most 1, as in anGPT, but along nGPT's axes."""
    constrain_ = ANGPTBlock.constrain_  # anGPT section 4.2


# ---- NormFormer and PowerNorm --------------------------------------------------------------------

class NoAttnLN(NormFormerBlock):
    """NormFormer without the LayerNorm after attention."""

    def __init__(self, config):
        super().__init__(config)
        self.norm_attn = nn.Identity()


class NoFFNLN(NormFormerBlock):
    """NormFormer without the LayerNorm in the MLP."""

    def __init__(self, config):
        super().__init__(config)
        self.norm_ffn = nn.Identity()


class NoHeadScale(NormFormerBlock):
    """NormFormer without HeadScale: the gain of each head stays 1 and is not trained."""

    def __init__(self, config):
        super().__init__(config)
        del self.head_scale
        self.register_buffer("head_scale", torch.ones(self.n_head), persistent=False)


class PlainPowerNorm(PowerNorm):
    """PowerNorm without GroupScaling1D."""

    def group_scale(self, x):
        return x


class PlainPowerNormBlock(PowerNormBlock):
    Norm = PlainPowerNorm


# ---- Where the norms stand -----------------------------------------------------------------------

class BranchesBlock(PreNormBlock):
    """PreNormBlock with its branches as methods, so that subclasses can place the norms elsewhere.

    As it stands, it computes what PreNormBlock does.
    """

    def __init__(self, config):
        super().__init__(config)
        # These norms come before rope, and norm_qk after it.
        self.norm_q = nn.Identity()
        self.norm_k = nn.Identity()
        self.norm_v = nn.Identity()

    def attn(self, x, cos, sin, cache):
        q, k, v = heads(self.w_qkv(x), self.n_head)                         # (B, H, T, d_k) each
        q = self.norm_qk(rope(self.norm_q(q), cos, sin))
        k = self.norm_qk(rope(self.norm_k(k), cos, sin))
        y = attend(q, k, self.norm_v(v), self.g, cache, self.dropout * self.training)
        return self.drop(self.w_o(y.transpose(1, 2).flatten(2)))            # (B, T, d)

    def mlp(self, x):
        return self.drop(self.w_down(self.f(self.w_up(x))))

    def forward(self, h, cos, sin, cache=None):
        h = h + self.attn(self.norm1(h), cos, sin, cache)
        return h + self.mlp(self.norm2(h))


class PostLNBlock(BranchesBlock):
    """Post-LN: the norm comes after the sum."""
    Norm = LayerNorm
    alpha = 1.0  # subclasses set a larger one

    def __init__(self, config):
        super().__init__(config)
        # GPT makes its last norm with self.Norm. The last block already ends in a norm, so let GPT
        # make an Identity.
        self.Norm = nn.Identity

    def forward(self, h, cos, sin, cache=None):
        h = self.norm1(self.alpha * h + self.attn(h, cos, sin, cache))
        return self.norm2(self.alpha * h + self.mlp(h))


class MixLNBlock(BranchesBlock):
    """Post-LN in the first quarter of the layers, Pre-LN in the others.

    We could not check how the paper rounds a quarter.
    """
    Norm = RMSNorm

    def __init__(self, config):
        super().__init__(config)
        self.n_layer = config.n_layer

    def start_(self, layer):
        self.post = layer <= self.n_layer // 4

    def forward(self, h, cos, sin, cache=None):
        if self.post:
            h = self.norm1(h + self.attn(h, cos, sin, cache))
            return self.norm2(h + self.mlp(h))
        return super().forward(h, cos, sin, cache)


class DeepNormBlock(PostLNBlock):
    """Post-LN with h multiplied by alpha, and with smaller initial weights.

    All matrices but those of q and k are initialized at beta times Xavier's size. We could not
    check whether the paper means Xavier's normal or uniform distribution; this is the normal one.
    SwiGLU's w_up counts as two matrices here, which is our choice.
    """

    def __init__(self, config):
        super().__init__(config)
        self.alpha = (2 * config.n_layer) ** 0.25
        self.beta = (8 * config.n_layer) ** -0.25

    def start_(self, layer):
        q, k, v = self.w_qkv.weight.chunk(3)
        for matrix in (q, k):
            nn.init.xavier_normal_(matrix)
        for matrix in (v, self.w_o.weight, *self.w_up.weight.split(4 * self.d), self.w_down.weight):
            nn.init.xavier_normal_(matrix, gain=self.beta)


class KeelBlock(PostLNBlock):
    """Post-LN with h multiplied by 2L, the number of branches, and with a norm before each branch.

    Two things come from implementations, and we could not check them in the paper: that alpha is
    2L, and that the first layer has alpha = 1 and no norm after its attention. We do not know
    whether the paper has a norm after the last block. There is none here, because the last block
    ends in one.
    """

    def __init__(self, config):
        super().__init__(config)
        self.alpha = 2.0 * config.n_layer
        self.post1 = LayerNorm(self.d, config)
        self.post2 = LayerNorm(self.d, config)

    def start_(self, layer):
        if layer == 1:
            self.alpha = 1.0
            self.post1 = nn.Identity()

    def forward(self, h, cos, sin, cache=None):
        h = self.post1(self.alpha * h + self.attn(self.norm1(h), cos, sin, cache))
        return self.post2(self.alpha * h + self.mlp(self.norm2(h)))


class BranchRMSNorm(RMSNorm):
    """RMSNorm of a branch's output, or of q, k or v: computed in float32, returned in x's dtype.

    Under autocast these are bfloat16, and torch prints a warning if RMSNorm's input and weight have
    different dtypes. (The residual stream is float32.)
    """

    def forward(self, x):
        return super().forward(wide(x)).type_as(x)


class PeriLNBlock(BranchesBlock):
    """A norm at both ends of each branch.

    The paper also normalizes the embedding. This is left out, because GPT has no place for it.
    """
    family = "normformer"
    Norm = RMSNorm

    def __init__(self, config):
        super().__init__(config)
        self.post1 = BranchRMSNorm(self.d, config)
        self.post2 = BranchRMSNorm(self.d, config)

    def forward(self, h, cos, sin, cache=None):
        h = h + self.post1(self.attn(self.norm1(h), cos, sin, cache))
        return h + self.post2(self.mlp(self.norm2(h)))


class RMSNormOverHeads(BranchRMSNorm):
    """RMSNorm of x (B, H, T, d_k) over all H * d_k channels of a token."""

    def forward(self, x):
        y = super().forward(x.transpose(1, 2).flatten(2))                   # (B, T, d)
        return y.unflatten(2, (x.shape[1], -1)).transpose(1, 2)


class OLMo2Block(BranchesBlock):
    """A norm at the end of each branch.

    q and k are normalized before rope, over all heads at once, with a gain.
    """
    family = "normformer"
    Norm = BranchRMSNorm

    def __init__(self, config):
        super().__init__(config)
        self.norm_q = RMSNormOverHeads(self.d, config)
        self.norm_k = RMSNormOverHeads(self.d, config)

    def forward(self, h, cos, sin, cache=None):
        h = h + self.norm1(self.attn(h, cos, sin, cache))
        return h + self.norm2(self.mlp(h))


class HybridNormBlock(BranchesBlock):
    """Norms of q, k and v in place of the norm before attention, and a norm before the MLP.

    q, k and v are normalized for each head, before rope, with a gain that the heads share. The norm
    before the MLP changes the residual stream itself. The authors' HybridNorm*, which also has
    Pre-LN in the first layer, is not here.
    """
    Norm = RMSNorm

    def __init__(self, config):
        super().__init__(config)
        self.norm1 = nn.Identity()
        self.norm_q = BranchRMSNorm(self.d_k, config)
        self.norm_k = BranchRMSNorm(self.d_k, config)
        self.norm_v = BranchRMSNorm(self.d_k, config)

    def forward(self, h, cos, sin, cache=None):
        h = self.norm2(h + self.attn(h, cos, sin, cache))
        return h + self.mlp(h)


class LNScalingBlock(BranchesBlock):
    """Pre-LN with the output of a layer's norms divided by the root of the layer's number.

    The norm after the last block is not scaled.
    """
    Norm = RMSNorm

    def __init__(self, config):
        super().__init__(config)
        # This is a buffer, because torch.compile would compile a block again for each new number.
        self.register_buffer("factor", torch.tensor(1.0), persistent=False)

    def start_(self, layer):
        self.factor.fill_(layer ** -0.5)

    def forward(self, h, cos, sin, cache=None):
        h = h + self.attn(self.factor * self.norm1(h), cos, sin, cache)
        return h + self.mlp(self.factor * self.norm2(h))


# ---- What the norms are --------------------------------------------------------------------------

class DyT(nn.Module):
    """weight * tanh(alpha x) + bias, which needs no statistics of x.

    alpha is one number and starts at 1. There is a bias if config.bias is true.
    """

    def __init__(self, n, config):
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(1.0))
        self.weight = nn.Parameter(torch.ones(n))  # gamma
        self.bias = nn.Parameter(torch.zeros(n)) if config.bias else 0.0  # beta

    def forward(self, x):
        return self.weight * torch.tanh(self.alpha * x) + self.bias


class Derf(DyT):
    """weight * erf(alpha x + s) + bias: DyT with erf in place of tanh, and with a shift s.

    alpha and s are one number each. They start at 1 and 0, the default of the authors' GPT-2 code;
    the authors do not say what their published run used.
    """

    def __init__(self, n, config):
        super().__init__(n, config)
        self.s = nn.Parameter(torch.tensor(0.0))

    def forward(self, x):
        return self.weight * torch.erf(self.alpha * x + self.s) + self.bias


class SeeDNorm(RMSNorm):
    """(weight + alpha tanh(beta . x)) * x / sqrt(mean(x^2) + eps): RMSNorm with a gain that sees x.

    Unlike in RMSNorm, the output depends on the length of x. In the paper alpha and beta have
    weight decay, but in train.py only matrices have it.
    """

    def __init__(self, n, config):
        super().__init__(n, config)
        self.alpha = nn.Parameter(torch.ones(n))
        # With beta = 0 it starts as RMSNorm.
        self.beta = nn.Parameter(torch.zeros(n))

    def forward(self, x):
        gain = self.weight + self.alpha * torch.tanh((self.beta * x).sum(-1, keepdim=True))
        return gain * F.rms_norm(x, self.normalized_shape, eps=self.eps)


class GatedNorm(RMSNorm):
    """y * sigmoid(up(silu(down(y)))), where y = RMSNorm(x): a gate for every channel.

    The gates are computed from 16 numbers per token. The paper does not say how the two matrices
    are initialized. Here they are drawn like all others, so that the gates start near 1/2.
    """

    def __init__(self, n, config):
        super().__init__(n, config)
        self.down = nn.Linear(n, 16, bias=False)
        self.up = nn.Linear(16, n, bias=False)

    def forward(self, x):
        y = super().forward(x)
        return y * torch.sigmoid(self.up(F.silu(self.down(y))))


class DyTBlock(PreNormBlock):
    Norm = DyT


class DerfBlock(PreNormBlock):
    Norm = Derf


class SeeDNormBlock(PreNormBlock):
    Norm = SeeDNorm


class GatedNormBlock(PreNormBlock):
    Norm = GatedNorm


ARCHS.update({
    "ngpt_no_qk_norm": NoQKNorm,
    "ngpt_slerp": Slerp,
    "ngpt_scalar": ScalarScales,
    "ngpt_riemann": Riemannian,
    "ngpt_by_depth": AlphaByDepth,
    "ngpt_corrected": Corrected,
    "ngpt_bounded": Bounded,
    "normformer_no_attn_ln": NoAttnLN,
    "normformer_no_ffn_ln": NoFFNLN,
    "normformer_no_head_scale": NoHeadScale,
    "powernorm_plain": PlainPowerNormBlock,
    "postln": PostLNBlock,
    "mixln": MixLNBlock,
    "deepnorm": DeepNormBlock,
    "keel": KeelBlock,
    "periln": PeriLNBlock,
    "olmo2": OLMo2Block,
    "hybridnorm": HybridNormBlock,
    "lnscale": LNScalingBlock,
    "dyt": DyTBlock,
    "derf": DerfBlock,
    "seednorm": SeeDNormBlock,
    "gatednorm": GatedNormBlock,
})

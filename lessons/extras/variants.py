"""
Beside the six: nGPT's optional forms, and the steps from nGPT to anGPT (anGPT Fig. 5), each one method away from nGPT;
NormFormer with one of its operations off; PowerNorm as its paper's main text has it; and norms before, after and
around a branch, of yesterday and today.

Importing this file registers them, and so does their name with the file's in front of it:

    import lessons.extras.variants
    train(TrainConfig(arch="ngpt_slerp", max_steps=500))

    python train.py --arch=lessons/extras/variants.py:ngpt_slerp --max_steps=500

  ngpt_no_qk_norm           q and k keep their norms                              nGPT Table 6, 1
  ngpt_slerp                the arc in place of the chord                         nGPT eq. 6, Table 6, 2
  ngpt_scalar               one number for each of a block's vectors of scales    nGPT Table 5
  ngpt_riemann              the step is projected on the tangent space            nGPT eq. 28-30
  ngpt_by_depth             alpha starts at 0.2 / layers: 0.05 in four            2604.27077; lesson 6
  ngpt_corrected            nu(alpha) in place of the norm after the step         anGPT Fig. 5, "with LERP correction"
  ngpt_bounded              and weights bounded in place of normalized            anGPT Fig. 5, "with param. bounding"
  normformer_no_attn_ln     without the LayerNorm after attention                 NormFormer Table 4
  normformer_no_ffn_ln      without the LayerNorm in the MLP                      NormFormer Table 4
  normformer_no_head_scale  without the gain of each head                         NormFormer Table 4
  powernorm_plain           PowerNorm without GroupScaling1D: diverges if deep    lesson 2

In these h is the residual stream, F a branch (attention or MLP), N a norm, l = 1, ... L the number of a layer:

  postln                    h <- LN(h + F(h)), as in the first Transformer        NormFormer section 1
  mixln                     h <- N(h + F(h)) where l <= L/4, then h + F(N(h))     Mix-LN, 2412.13795
  deepnorm                  h <- LN((2L)^(1/4) h + F(h)), F starting smaller      DeepNet, 2203.00555
  keel                      h <- LN(2L h + F(LN(h)))                              Keel, 2601.19895
  periln                    h <- h + N(F(N(h))), as in Gemma 2                    Peri-LN, 2502.02732
  olmo2                     h <- h + N(F(h)), norms of q and k before rope        OLMo 2, 2501.00656
  hybridnorm                h <- N(h + Attn(h)), norms of q, k and v; h + MLP(h)  HybridNorm, 2503.04598
  lnscale                   h <- h + F(N(h) / sqrt(l))                            anGPT section 3.2, Appendix A

and these take something else for N in h <- h + F(N(h)):

  dyt                       weight tanh(alpha x)                                  anGPT Appendix A
  derf                      weight erf(alpha x + s)                               Derf, 2512.10938
  seednorm                  (weight + alpha tanh(beta . x)) x / rms(x)            SeeDNorm, 2510.22777
  gatednorm                 y sigmoid(U silu(D y)), y = RMSNorm(x)                GatedNorm, 2601.22966

NormFormer's fourth operation is the option resid_scale. With qk_norm=True lnscale is anGPT's "GPT+ with LN scaling",
and dyt its "GPT+ with DyT" without the additional learned scale that the paper names and does not place.

The papers with a number in arXiv (2412.13795, ...) are not among this project's: their equations are those of the
authors' own code (mixln, deepnorm, hybridnorm, derf), of a library's (olmo2), of the paper's text (gatednorm) or of
several descriptions that agree (periln, keel, seednorm). Each class says what could not be checked. Nobody has tuned
recipes for them: periln and olmo2 take normformer's, whose branches end in norms too, the others rmsnorm's.

Hyper-connections, value residuals and whatever else gives the stream another form would need another GPT.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

from model import (ANGPTBlock, ARCHS, LayerNorm, NGPTBlock, NormFormerBlock, PowerNorm, PowerNormBlock, PreNormBlock,
                   RMSNorm, Scale, attend, heads, rope, unit, wide)


# ---- nGPT ------------------------------------------------------------------------------------------------------------

class StepsBlock(NGPTBlock):
    """NGPTBlock with its steps as methods to override; as it stands, the same function."""

    def qk_norm(self, x):
        """x (..., T, d_k)"""
        return unit(x)                                                            # (15, 16)

    def step(self, h, y, alpha):
        """From h (B, T, d) towards the unit vectors y (B, T, d), alpha (d,) of the way."""
        return unit(h + alpha * (y - h))                                          # (10, 11)

    def forward(self, h, cos, sin, cache=None):
        s_qk = self.s_qk().view(self.n_head, 1, self.d_k)
        q, k, v = heads(self.w_qkv(h), self.n_head)                               # (12)
        q = self.qk_norm(rope(q, cos, sin)) * s_qk                                # (15)
        k = self.qk_norm(rope(k, cos, sin)) * s_qk                                # (16)
        y = attend(q, k, v, self.d_k ** 0.5, cache, self.dropout * self.training) # (13)
        h_a = unit(self.drop(self.w_o(y.transpose(1, 2).flatten(2))))             # (14): (B, T, d)
        h = self.step(h, h_a, self.alpha_a().abs())                               # (10)
        u, z = self.w_up(h).chunk(2, dim=-1)                                      # (17): (B, T, 4d) each
        u = u * self.s_u()                                                        # (20)
        z = z * self.s_v() * self.d ** 0.5                                        # (21)
        h_m = unit(self.drop(self.w_down(u * F.silu(z))))                         # (18, 19)
        return self.step(h, h_m, self.alpha_m().abs())                            # (11)


class NoQKNorm(StepsBlock):
    def qk_norm(self, x):
        return x


class Slerp(StepsBlock):
    def step(self, h, y, alpha):
        theta = (h * y).sum(-1, keepdim=True).clamp(-0.9999, 0.9999).arccos()     # (B, T, 1)
        return unit(((1 - alpha) * theta).sin() * h + (alpha * theta).sin() * y)  # (6) times sin(theta)


class ScalarScale(Scale):
    """A Scale whose n entries are one number."""

    def __init__(self, n, init, scale):
        super().__init__(1, init, scale)
        self.n = n

    def forward(self):
        return super().forward().expand(self.n)


class ScalarScales(NGPTBlock):
    """s_u does nothing then: the norm behind w_down takes it out again."""

    def __init__(self, config):
        super().__init__(config)
        for name in ("s_qk", "s_u", "s_v", "alpha_a", "alpha_m"):
            vector = getattr(self, name)
            setattr(self, name, ScalarScale(len(vector.weight), vector.init, vector.scale))


class Riemannian(StepsBlock):
    def step(self, h, y, alpha):
        gradient = h * (h * y).sum(-1, keepdim=True) - y                          # (28)
        return unit(h - alpha * gradient)                                         # (29, 30)


class AlphaByDepth(NGPTBlock):
    """Of 2604.27077's changes to nGPT this one alone; its equation could not be checked."""

    def __init__(self, config):
        super().__init__(config)
        self.alpha_a.init = 0.2 / config.n_layer
        self.alpha_m.init = 0.2 / config.n_layer


class Corrected(StepsBlock):
    nu = ANGPTBlock.nu

    def step(self, h, y, alpha):
        return self.nu(alpha) * (h + alpha * (y - h))                             # anGPT Table 1, Residual


class Bounded(Corrected):
    constrain_ = ANGPTBlock.constrain_                                            # anGPT section 4.2, nGPT's axes


# ---- NormFormer and PowerNorm ----------------------------------------------------------------------------------------

class NoAttnLN(NormFormerBlock):
    def __init__(self, config):
        super().__init__(config)
        self.norm_attn = nn.Identity()


class NoFFNLN(NormFormerBlock):
    def __init__(self, config):
        super().__init__(config)
        self.norm_ffn = nn.Identity()


class NoHeadScale(NormFormerBlock):
    def __init__(self, config):
        super().__init__(config)
        del self.head_scale
        self.register_buffer("head_scale", torch.ones(self.n_head), persistent=False)


class PlainPowerNorm(PowerNorm):
    def group_scale(self, x):
        return x


class PlainPowerNormBlock(PowerNormBlock):
    Norm = PlainPowerNorm


# ---- Where the norms stand -------------------------------------------------------------------------------------------

class BranchesBlock(PreNormBlock):
    """PreNormBlock with its two branches as methods, without their norms; as it stands, the same function."""

    def __init__(self, config):
        super().__init__(config)
        self.norm_q = nn.Identity()                                               # before rope; norm_qk is behind it
        self.norm_k = nn.Identity()
        self.norm_v = nn.Identity()

    def attn(self, x, cos, sin, cache):
        q, k, v = heads(self.w_qkv(x), self.n_head)                               # (B, H, T, d_k) each
        q = self.norm_qk(rope(self.norm_q(q), cos, sin))
        k = self.norm_qk(rope(self.norm_k(k), cos, sin))
        y = attend(q, k, self.norm_v(v), self.g, cache, self.dropout * self.training)
        return self.drop(self.w_o(y.transpose(1, 2).flatten(2)))                  # (B, T, d)

    def mlp(self, x):
        return self.drop(self.w_down(self.f(self.w_up(x))))

    def forward(self, h, cos, sin, cache=None):
        h = h + self.attn(self.norm1(h), cos, sin, cache)
        return h + self.mlp(self.norm2(h))


class PostLNBlock(BranchesBlock):
    """The norm behind the sum. The last block ends in one, so that the model needs none at its end."""
    Norm = LayerNorm
    alpha = 1.0                                                                   # of Post-LN's descendants

    def __init__(self, config):
        super().__init__(config)
        self.Norm = nn.Identity                                                   # of which GPT makes norm_f

    def forward(self, h, cos, sin, cache=None):
        h = self.norm1(self.alpha * h + self.attn(h, cos, sin, cache))
        return self.norm2(self.alpha * h + self.mlp(h))


class MixLNBlock(BranchesBlock):
    """The first quarter of the layers Post-LN, the others Pre-LN. Not checked: how a quarter is rounded."""
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
    """Post-LN with a longer h, and with matrices that begin beta times as large as Xavier's, except q's and k's. Not
    checked: whether Xavier's normal or uniform; and SwiGLU, which is younger: here its two maps are two matrices."""

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
    """Post-LN with h times the number of branches, 2L, and a norm before each branch too. Not checked in the paper:
    alpha = 2L, and that the first layer has alpha = 1 and no norm behind its attention; both are from
    implementations. Whether it has a last norm is not known: here none, as h comes out of one."""

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


class PeriLNBlock(BranchesBlock):
    """A norm on both sides of a branch. The paper also has one on the embedding, which GPT has no place for."""
    family = "normformer"
    Norm = RMSNorm

    def __init__(self, config):
        super().__init__(config)
        self.post1 = RMSNorm(self.d, config)
        self.post2 = RMSNorm(self.d, config)

    def forward(self, h, cos, sin, cache=None):
        h = h + self.post1(wide(self.attn(self.norm1(h), cos, sin, cache)))
        return h + self.post2(wide(self.mlp(self.norm2(h))))


class RMSNormOverHeads(RMSNorm):
    """RMSNorm of x (B, H, T, d_k) over all H d_k channels of a token."""

    def forward(self, x):
        y = super().forward(wide(x.transpose(1, 2).flatten(2)))                   # (B, T, d)
        return y.unflatten(2, (x.shape[1], -1)).transpose(1, 2)


class OLMo2Block(BranchesBlock):
    """The norm at a branch's end. Those of q and k are over all heads at once, with a gain, before rope."""
    family = "normformer"
    Norm = RMSNorm

    def __init__(self, config):
        super().__init__(config)
        self.norm_q = RMSNormOverHeads(self.d, config)
        self.norm_k = RMSNormOverHeads(self.d, config)

    def forward(self, h, cos, sin, cache=None):
        h = h + self.norm1(self.attn(h, cos, sin, cache))
        return h + self.norm2(self.mlp(h))


class HybridNormBlock(BranchesBlock):
    """Attention reads h itself, but each head's q, k and v are normalized, before rope, with a gain that the heads
    share; the MLP's norm is on the stream. The authors' HybridNorm* has Pre-LN in the first layer too: not here."""
    Norm = RMSNorm

    def __init__(self, config):
        super().__init__(config)
        self.norm1 = nn.Identity()
        self.norm_q = RMSNorm(self.d_k, config)
        self.norm_k = RMSNorm(self.d_k, config)
        self.norm_v = RMSNorm(self.d_k, config)

    def forward(self, h, cos, sin, cache=None):
        h = self.norm2(h + self.attn(h, cos, sin, cache))
        return h + self.mlp(h)


class LNScalingBlock(BranchesBlock):
    """What both norms of a layer give, over the root of the layer's number; the norm at the end stays whole."""
    Norm = RMSNorm

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("factor", torch.tensor(1.0), persistent=False)       # compiled once for all layers

    def start_(self, layer):
        self.factor.fill_(layer ** -0.5)

    def forward(self, h, cos, sin, cache=None):
        h = h + self.attn(self.factor * self.norm1(h), cos, sin, cache)
        return h + self.mlp(self.factor * self.norm2(h))


# ---- What the norms are ----------------------------------------------------------------------------------------------

class DyT(nn.Module):
    """weight * tanh(alpha x) + bias (bias with bias=True): no statistics at all; alpha is one number, 1 at first."""

    def __init__(self, n, config):
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(1.0))
        self.weight = nn.Parameter(torch.ones(n))                                 # gamma
        self.bias = nn.Parameter(torch.zeros(n)) if config.bias else 0.0          # beta

    def forward(self, x):
        return self.weight * torch.tanh(self.alpha * x) + self.bias


class Derf(DyT):
    """weight * erf(alpha x + s) + bias: DyT with another S, which can move. alpha and s are one number each, 1 and 0
    at first, the default of the authors' GPT-2; what its published run began with is not said."""

    def __init__(self, n, config):
        super().__init__(n, config)
        self.s = nn.Parameter(torch.tensor(0.0))

    def forward(self, x):
        return self.weight * torch.erf(self.alpha * x + self.s) + self.bias


class SeeDNorm(RMSNorm):
    """(weight + alpha tanh(beta . x)) * x / sqrt(mean(x^2) + eps): RMSNorm, whose gain hears of x's length. The paper
    lets alpha and beta decay, train.py matrices alone."""

    def __init__(self, n, config):
        super().__init__(n, config)
        self.alpha = nn.Parameter(torch.ones(n))
        self.beta = nn.Parameter(torch.zeros(n))                                  # so it begins as RMSNorm

    def forward(self, x):
        gain = self.weight + self.alpha * torch.tanh((self.beta * x).sum(-1, keepdim=True))
        return gain * F.rms_norm(x, self.normalized_shape, eps=self.eps)


class GatedNorm(RMSNorm):
    """y * sigmoid(up(silu(down(y)))), y of RMSNorm: every channel has a gate, made of 16 numbers. The start is not
    said; here the matrices are drawn like all others, so that the gates begin near 1/2."""

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

"""
Beside the six: nGPT's optional forms, and the steps from nGPT to anGPT (anGPT Fig. 5), each one method away from nGPT;
NormFormer with one of its operations off; PowerNorm as its paper's main text has it; and three that the papers
compare with, written from their descriptions.

Importing this file registers them:

    import lessons.variants
    train(TrainConfig(arch="ngpt_slerp", max_steps=500))

  ngpt_no_qk_norm           q and k keep their norms                            nGPT Table 6, 1
  ngpt_slerp                the arc in place of the chord                       nGPT eq. 6, Table 6, 2
  ngpt_scalar               one number for each of a block's vectors of scales  nGPT Table 5
  ngpt_riemann              the step is projected on the tangent space          nGPT eq. 28-30
  ngpt_corrected            nu(alpha) in place of the norm after the step       anGPT Fig. 5, "with LERP correction"
  ngpt_bounded              and weights bounded in place of normalized          anGPT Fig. 5, "with param. bounding"
  normformer_no_attn_ln     without the LayerNorm after attention               NormFormer Table 4
  normformer_no_ffn_ln      without the LayerNorm in the MLP                    NormFormer Table 4
  normformer_no_head_scale  without the gain of each head                       NormFormer Table 4
  powernorm_plain           PowerNorm without GroupScaling1D: diverges if deep  README, PowerNorm's divergence
  postln                    h <- LN(h + Attn(h)), as in the first Transformer   NormFormer section 1
  dyt                       Dynamic Tanh for every norm                         anGPT Appendix A
  lnscale                   RMSNorm's output over sqrt(layer)                   anGPT section 3.2, Appendix A

NormFormer's fourth operation is the option resid_scale. With qk_norm=True dyt and lnscale are anGPT's "GPT+ with ...".
"""
import functools

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import (ANGPTBlock, ARCHS, LayerNorm, NGPTBlock, NormFormerBlock, PowerNorm, PreNormBlock, RMSNorm, Scale,
                   attend, heads, rope, unit)


class StepsBlock(NGPTBlock):
    """NGPTBlock with its steps as methods to override; as it stands, the same function."""

    def qk_norm(self, x):
        """x (..., T, d_k)"""
        return unit(x)                                                               # (15, 16)

    def step(self, h, y, alpha):
        """From h (B, T, d) towards the unit vectors y (B, T, d), alpha (d,) of the way."""
        return unit(h + alpha * (y - h))                                             # (10, 11)

    def forward(self, h, cos, sin, cache=None):
        s_qk = self.s_qk().view(self.n_head, 1, self.d_k)
        q, k, v = heads(self.w_qkv(h), self.n_head)                                  # (12)
        q = self.qk_norm(rope(q, cos, sin)) * s_qk                                   # (15)
        k = self.qk_norm(rope(k, cos, sin)) * s_qk                                   # (16)
        y = attend(q, k, v, self.d_k ** 0.5, cache, self.dropout * self.training)    # (13)
        h_a = unit(self.w_o(y.transpose(1, 2).flatten(2)))                           # (14): (B, T, d)
        h = self.step(h, h_a, self.alpha_a().abs())                                  # (10)
        u, z = self.w_up(h).chunk(2, dim=-1)                                         # (17): (B, T, 4d) each
        u, z = u * self.s_u(), z * self.s_v() * self.d ** 0.5                        # (20, 21)
        h_m = unit(self.w_down(u * F.silu(z)))                                       # (18, 19)
        return self.step(h, h_m, self.alpha_m().abs())                               # (11)


class NoQKNorm(StepsBlock):
    def qk_norm(self, x):
        return x


class Slerp(StepsBlock):
    def step(self, h, y, alpha):
        theta = (h * y).sum(-1, keepdim=True).clamp(-0.9999, 0.9999).arccos()        # (B, T, 1)
        return unit(((1 - alpha) * theta).sin() * h + (alpha * theta).sin() * y)     # (6) times sin(theta)


class ScalarScale(Scale):
    """A Scale whose n entries are one number."""

    def __init__(self, n, init, scale):
        super().__init__(1, init, scale)
        self.n = n

    def forward(self):
        return super().forward().expand(self.n)


class ScalarScales(NGPTBlock):
    def __init__(self, config):
        super().__init__(config)
        for name in ("s_qk", "s_u", "s_v", "alpha_a", "alpha_m"):
            vector = getattr(self, name)
            setattr(self, name, ScalarScale(len(vector.weight), vector.init, vector.scale))


class Riemannian(StepsBlock):
    def step(self, h, y, alpha):
        gradient = h * (h * y).sum(-1, keepdim=True) - y                             # (28)
        return unit(h - alpha * gradient)                                            # (29, 30)


class Corrected(StepsBlock):
    def step(self, h, y, alpha):
        return ANGPTBlock.nu(self, alpha) * (h + alpha * (y - h))                    # anGPT Table 1, Residual


class Bounded(Corrected):
    bound = ANGPTBlock.bound                                                         # anGPT section 4.2, nGPT's axes


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


class PostLNBlock(PreNormBlock):
    """The norm behind the sum. The last block ends in one, so that the model needs none at its end."""

    def __init__(self, config):
        super().__init__(config, LayerNorm)
        self.Norm = nn.Identity                                                      # of which GPT makes norm_f

    def forward(self, h, cos, sin, cache=None):
        q, k, v = heads(self.w_qkv(h), self.n_head)
        q, k = self.norm_qk(rope(q, cos, sin)), self.norm_qk(rope(k, cos, sin))
        y = attend(q, k, v, self.g, cache, self.dropout * self.training)
        h = self.norm1(h + self.w_o(y.transpose(1, 2).flatten(2)))                   # LN(x + Attn(x)): (B, T, d)
        return self.norm2(h + self.w_down(self.f(self.w_up(h))))                     # LN(x + MLP(x))


class DyT(nn.Module):
    """gamma * tanh(alpha x) + beta (beta with bias=True): no statistics at all; alpha is one number, 1 at first."""

    def __init__(self, n, config):
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(1.0))
        self.weight = nn.Parameter(torch.ones(n))                                    # gamma
        self.bias = nn.Parameter(torch.zeros(n)) if config.bias else 0.0             # beta

    def forward(self, x):
        return self.weight * torch.tanh(self.alpha * x) + self.bias


class ScaledRMSNorm(RMSNorm):
    def __init__(self, n, config, layer):
        super().__init__(n, config)
        self.register_buffer("factor", torch.tensor(layer ** -0.5), persistent=False)    # as a tensor compiled once

    def forward(self, x):
        return super().forward(x) * self.factor


class LNScalingBlock(PreNormBlock):
    """Both norms of layer 1, 2, ... over the root of that number; the norm at the end stays whole.

    A GPT makes its n_layer blocks in order: the config counts them.
    """

    def __init__(self, config):
        self.layer = config.blocks_made = getattr(config, "blocks_made", 0) % config.n_layer + 1
        super().__init__(config, functools.partial(ScaledRMSNorm, layer=self.layer))
        self.Norm = RMSNorm                                                          # of which GPT makes norm_f


ARCHS.update(ngpt_no_qk_norm=NoQKNorm, ngpt_slerp=Slerp, ngpt_scalar=ScalarScales, ngpt_riemann=Riemannian,
             ngpt_corrected=Corrected, ngpt_bounded=Bounded, normformer_no_attn_ln=NoAttnLN,
             normformer_no_ffn_ln=NoFFNLN, normformer_no_head_scale=NoHeadScale,
             powernorm_plain=functools.partial(PreNormBlock, Norm=PlainPowerNorm), postln=PostLNBlock,
             dyt=functools.partial(PreNormBlock, Norm=DyT), lnscale=LNScalingBlock)

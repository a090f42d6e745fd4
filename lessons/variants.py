"""
nGPT's optional forms, and the steps from nGPT to anGPT (anGPT Fig. 5), each one method away from nGPT; and PowerNorm
as its paper's main text has it.

Importing this file registers them:

    import lessons.variants
    train(TrainConfig(arch="ngpt_slerp", max_steps=500))

  ngpt_no_qk_norm   q and k keep their norms                            nGPT Table 6, 1
  ngpt_slerp        the arc in place of the chord                       nGPT eq. 6, Table 6, 2
  ngpt_scalar       one number for each of a block's vectors of scales  nGPT Table 5
  ngpt_riemann      the step is projected on the tangent space          nGPT eq. 28-30
  ngpt_corrected    nu(alpha) in place of the norm after the step       anGPT Fig. 5, "with LERP correction"
  ngpt_bounded      and weights bounded in place of normalized          anGPT Fig. 5, "with param. bounding"
  powernorm_plain   PowerNorm without GroupScaling1D: diverges if deep  README, PowerNorm's divergence
"""
import functools

from model import ANGPTBlock, ARCHS, NGPTBlock, PowerNorm, PreNormBlock, Scale, lerp, rope, scaled, unit


class StepsBlock(NGPTBlock):
    """NGPTBlock with its steps as methods to override; as it stands, the same function."""

    def qk_norm(self, x):
        """x (..., T, d_k)"""
        return unit(x)                                                               # (15, 16)

    def step(self, h, y, alpha):
        """From h (B, T, d) towards the unit vectors y (B, T, d), alpha (d,) of the way."""
        return unit(lerp(h, y, alpha))                                               # (10, 11)

    def forward(self, h, cos, sin, cache=None):
        a, m, s_qk, s_uz = self.constants()
        qk, v = self.heads(self.w_qkv(h))                                            # (12)
        q, k = (self.qk_norm(rope(qk, cos, sin)) * s_qk).unbind(0)
        y = self.attend(q, k, v, self.d_k ** 0.5, cache)                             # (13)
        h = self.step(h, unit(self.drop(self.w_o(self.join(y)))), a)
        u, z = self.branches(scaled(s_uz, self.w_up, h))                             # (17, 20, 21)
        return self.step(h, unit(self.drop(self.w_down(u * self.f(z)))), m)


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
        return lerp(h, y, alpha) * ANGPTBlock.nu(self, alpha)                        # anGPT Table 1, Residual


class Bounded(Corrected):
    constrain_ = staticmethod(ANGPTBlock.constrain_)                                 # anGPT section 4.2, nGPT's axes


class PlainPowerNorm(PowerNorm):
    def group_scale(self, x):
        return x


ARCHS.update(ngpt_no_qk_norm=NoQKNorm, ngpt_slerp=Slerp, ngpt_scalar=ScalarScales, ngpt_riemann=Riemannian,
             ngpt_corrected=Corrected, ngpt_bounded=Bounded,
             powernorm_plain=functools.partial(PreNormBlock, Norm=PlainPowerNorm))

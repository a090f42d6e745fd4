"""Test variants.py against its equations, written out once more; gpt2.py and export_gpt2.py."""
import copy
import json
import math
import warnings
from dataclasses import asdict

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import lessons.extras.variants as variants
from lessons.extras.export_gpt2 import main as export
from lessons.extras.gpt2 import read_gpt2
from model import ARCHS, Cache, GPT, GPTConfig, NGPTBlock, RMSNormBlock
from prepare import DataError
from train import load_model

torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other

VARIANTS = [arch for arch, block in ARCHS.items() if block.__module__ == variants.__name__]
SIX = [arch for arch, block in ARCHS.items() if block.__module__ == NGPTBlock.__module__]
TINY = dict(vocab_size=17, block_size=12, n_layer=4, n_head=2, n_embd=16)
GPT2 = dict(pos="learned", mlp="gelu", bias=True, tie=True)
every_variant = pytest.mark.parametrize("arch", VARIANTS)


def gaussian(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some_tokens(*shape, seed=2):
    return torch.randint(17, shape, generator=torch.Generator().manual_seed(seed))


IDX, TARGETS = some_tokens(2, 8), some_tokens(2, 8, seed=5)


@torch.no_grad()
def rough(arch, **options):
    """Return a model in float64 whose parameters have all moved away from their initial values.

    Otherwise a forgotten gain, which starts at 1, would not show.
    """
    torch.manual_seed(0)
    # The rope tables are computed in the default dtype, too.
    torch.set_default_dtype(torch.float64)
    try:
        model = GPT(GPTConfig(arch=arch, **{**TINY, **options})).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    for seed, (name, p) in enumerate(model.state_dict().items()):
        noise = gaussian(*p.shape, seed=seed)
        if name.endswith("psi2"):
            p.copy_(0.5 + noise ** 2)
        elif p.dim() == 2:
            p.copy_(noise / p.shape[1] ** 0.5)
        elif p.dtype == torch.float64:
            p.copy_(p * (1 + 0.3 * noise) + 0.3 * noise)
    # On the sphere weights must have norm 1.
    model.project_()
    return model


def assert_close(got, want, tol=1e-11):
    assert got.shape == want.shape and (got - want).abs().max() <= tol * want.abs().max()


# ---- The equations, without model.py, for one head and one query at a time -----------------------

def over_rms(x, eps):
    return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt()


def ref_unit(x):
    return x / (x * x).sum(-1, keepdim=True).sqrt()


def ref_silu(x):
    return x / (1 + (-x).exp())


def ref_erf(x):
    """Return 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x (Gauss-Legendre)."""
    nodes, weights = np.polynomial.legendre.leggauss(60)
    return sum(w * x * (-(x * (node + 1) / 2) ** 2).exp()
               for node, w in zip(nodes, weights)) / math.sqrt(math.pi)


def ref_turn(x):
    """Rotate each point (channel i, channel i + d_k/2) of x (B, T, d_k) by t 10000^(-2i/d_k)."""
    pairs = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None] * 10000.0 ** -(torch.arange(pairs).double() / pairs)
    z = torch.complex(x[..., :pairs], x[..., pairs:]) * torch.exp(1j * angle)
    return torch.cat((z.real, z.imag), dim=-1)


def layer_norm(x, weight, bias=0):
    return weight * over_rms(x - x.mean(-1, keepdim=True), 1e-5) + bias


def rms_norm(x, weight):
    return weight * over_rms(x, 1e-6)


def plain_power_norm(x, weight, psi2, bias=0, **moving):
    return weight * x / (psi2 + 1e-5).sqrt() + bias


def dyt(x, weight, alpha, bias=0):
    return weight * (1 - 2 / (1 + (2 * alpha * x).exp())) + bias


def derf(x, weight, alpha, s, bias=0):
    return weight * ref_erf(alpha * x + s) + bias


def seednorm(x, weight, alpha, beta):
    length = torch.einsum("btd,d->bt", x, beta)[..., None]
    return (alpha * (1 - 2 / (1 + (2 * length).exp())) + weight) * over_rms(x, 1e-6)


def gatednorm(x, weight, **matrices):
    y = weight * over_rms(x, 1e-6)
    gate = ref_silu(y @ matrices["down.weight"].T) @ matrices["up.weight"].T
    return y / (1 + (-gate).exp())


NORMS = {"postln": layer_norm, "deepnorm": layer_norm, "keel": layer_norm,
         "powernorm_plain": plain_power_norm,
         "dyt": dyt, "derf": derf, "seednorm": seednorm, "gatednorm": gatednorm,
         **dict.fromkeys(("mixln", "periln", "olmo2", "hybridnorm", "lnscale"), rms_norm)}


class Written:
    """A whole GPT, written out, with the parameters of a model.

    b is the prefix of a block, such as "blocks.0.", and l is its number, from 1.
    """

    def __init__(self, model):
        self.c = model.config
        self.d, self.d_k, self.L = self.c.n_embd, self.c.n_embd // self.c.n_head, self.c.n_layer
        self.p = {name: p.clone() for name, p in model.state_dict().items()}
        for name, _ in model.named_parameters():
            self.p[name].requires_grad_()
        self.on_sphere = self.c.arch.startswith("ngpt")
        self.block = getattr(self, self.c.arch.split("_")[0], self.preln)
        self.N = NORMS.get(self.c.arch, layer_norm)

    def norm(self, name, x):
        parts = {key[len(name) + 1:]: p for key, p in self.p.items() if key.startswith(name + ".")}
        return self.N(x, **parts) if parts else x

    def linear(self, name, x):
        return x @ self.p[name + ".weight"].T + self.p.get(name + ".bias", 0)

    def before_rope(self, b, which, x, head):
        """Return a head's channels of x = W h, where W is W_q, W_k or W_v."""
        # OLMo 2 normalizes over all heads. It has no norm of v.
        if self.c.arch == "olmo2":
            x = self.norm(f"{b}norm_{which}", x)
        x = x[..., head * self.d_k:(head + 1) * self.d_k]
        return self.norm(f"{b}norm_{which}", x) if self.c.arch == "hybridnorm" else x

    def behind_rope(self, b, x, head):
        """Return a head's q or k (B, T, d_k) after rope, norm and scale."""
        if self.c.pos == "rope":
            x = ref_turn(x)
        if self.c.qk_norm or (self.on_sphere and self.c.arch != "ngpt_no_qk_norm"):
            x = ref_unit(x)
        if self.on_sphere:
            s_qk = self.stored(b + "s_qk", 1, 1 / math.sqrt(self.d)).expand(self.d)
            x = x * s_qk[head * self.d_k:(head + 1) * self.d_k]
        return x

    def attn(self, b, x, scale=None, gains=None):
        """Return attention's output. `gains` has one gain for the output of each head."""
        scale = scale or (self.p[b + "g"] if self.c.qk_norm else self.d_k ** -0.5)
        q, k, v = self.linear(b + "w_qkv", x).split(self.d, dim=-1)
        outputs = []
        for head in range(self.c.n_head):
            q_head = self.behind_rope(b, self.before_rope(b, "q", q, head), head)
            k_head = self.behind_rope(b, self.before_rope(b, "k", k, head), head)
            v_head = self.before_rope(b, "v", v, head)
            places = []
            for t in range(x.shape[1]):
                # (B, t + 1)
                weights = (scale * (k_head[:, :t + 1] * q_head[:, t:t + 1]).sum(-1)).exp()
                mean = ((weights[..., None] * v_head[:, :t + 1]).sum(1)
                        / weights.sum(1, keepdim=True))
                places.append(mean if gains is None else gains[head] * mean)
            outputs.append(torch.stack(places, dim=1))
        return self.linear(b + "w_o", torch.cat(outputs, dim=-1))

    def stored(self, name, init, scale):
        return self.p[name + ".weight"] * init / scale

    def act(self, x):
        if self.c.mlp == "gelu":
            return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))
        return x[..., :4 * self.d] * ref_silu(x[..., 4 * self.d:])

    def mlp(self, b, x):
        return self.linear(b + "w_down", self.act(self.linear(b + "w_up", x)))

    def preln(self, b, l, h):
        h = h + self.attn(b, self.norm(b + "norm1", h))
        return h + self.mlp(b, self.norm(b + "norm2", h))

    def postln(self, b, l, h, alpha=1):
        h = self.norm(b + "norm1", alpha * h + self.attn(b, h))
        return self.norm(b + "norm2", alpha * h + self.mlp(b, h))

    def mixln(self, b, l, h):
        return self.postln(b, l, h) if l / self.L <= 0.25 else self.preln(b, l, h)

    def deepnorm(self, b, l, h):
        return self.postln(b, l, h, alpha=math.sqrt(math.sqrt(2 * self.L)))

    def keel(self, b, l, h):
        if l == 1:
            h = h + self.attn(b, self.norm(b + "norm1", h))
            return self.norm(b + "post2", h + self.mlp(b, self.norm(b + "norm2", h)))
        h = self.norm(b + "post1", 2 * self.L * h + self.attn(b, self.norm(b + "norm1", h)))
        return self.norm(b + "post2", 2 * self.L * h + self.mlp(b, self.norm(b + "norm2", h)))

    def periln(self, b, l, h):
        h = h + self.norm(b + "post1", self.attn(b, self.norm(b + "norm1", h)))
        return h + self.norm(b + "post2", self.mlp(b, self.norm(b + "norm2", h)))

    def olmo2(self, b, l, h):
        h = h + self.norm(b + "norm1", self.attn(b, h))
        return h + self.norm(b + "norm2", self.mlp(b, h))

    def hybridnorm(self, b, l, h):
        h = h + self.attn(b, h)
        return self.norm(b + "norm2", h) + self.mlp(b, self.norm(b + "norm2", h))

    def lnscale(self, b, l, h):
        h = h + self.attn(b, self.norm(b + "norm1", h) / math.sqrt(l))
        return h + self.mlp(b, self.norm(b + "norm2", h) / math.sqrt(l))

    def normformer(self, b, l, h):
        y = self.attn(b, self.norm(b + "norm1", h), gains=self.p.get(b + "head_scale"))
        h = h + self.norm(b + "norm_attn", y)
        inner = self.act(self.linear(b + "w_up", self.norm(b + "norm2", h)))
        return h + self.linear(b + "w_down", self.norm(b + "norm_ffn", inner))

    def step(self, h, y, alpha):
        cosine = (h * y).sum(-1, keepdim=True)
        if self.c.arch == "ngpt_riemann":
            # The projection onto the tangent space, as a matrix.
            project = torch.eye(self.d) - h[..., :, None] * h[..., None, :]
            return ref_unit(h + alpha * (project @ y[..., None])[..., 0])
        if self.c.arch == "ngpt_slerp":
            theta = torch.acos(cosine)
            return ref_unit(torch.sin((1 - alpha) * theta) / torch.sin(theta) * h
                            + torch.sin(alpha * theta) / torch.sin(theta) * y)
        if self.c.arch in ("ngpt_corrected", "ngpt_bounded"):
            return ((1 - alpha) * h + alpha * y) / ((1 - alpha) ** 2 + alpha ** 2).sqrt()
        return ref_unit((1 - alpha) * h + alpha * y)

    def ngpt(self, b, l, h):
        small = 1 / math.sqrt(self.d)
        start = 0.2 / self.L if self.c.arch == "ngpt_by_depth" else 0.05
        y = self.attn(b, h, scale=math.sqrt(self.d_k))
        h = self.step(h, ref_unit(y), self.stored(b + "alpha_a", start, small).abs())
        u, z = self.linear(b + "w_up", h).split(4 * self.d, dim=-1)
        u = u * self.stored(b + "s_u", 1, 1)
        z = z * self.stored(b + "s_v", 1, 1) * math.sqrt(self.d)
        y = self.linear(b + "w_down", u * ref_silu(z))
        return self.step(h, ref_unit(y), self.stored(b + "alpha_m", start, small).abs())

    def logits(self, idx):
        h = self.p["wte.weight"][idx]
        if self.c.pos == "learned":
            h = h + self.p["wpe.weight"][:idx.shape[1]]
        for i in range(self.L):
            h = self.block(f"blocks.{i}.", i + 1, h)
        h = self.norm("norm_f", h) @ self.p["wte.weight" if self.c.tie else "lm_head.weight"].T
        return self.stored("s_z", 1, 1 / math.sqrt(self.d)) * h if self.on_sphere else h


@pytest.mark.parametrize("arch, options", [
    *[(arch, {}) for arch in VARIANTS],
    ("postln", GPT2),
    ("keel", GPT2),
    ("dyt", GPT2),
    ("derf", dict(bias=True)),
    ("powernorm_plain", dict(bias=True, n_layer=2)),
    ("ngpt_by_depth", dict(n_layer=2)),
    ("olmo2", dict(qk_norm=True)),
    ("mixln", dict(n_layer=8))])
def test_a_variant_and_its_gradients_equal_its_equations(arch, options):
    model = rough(arch, **options)
    written = Written(model)
    (logits, loss), want = model(IDX, TARGETS), written.logits(IDX)
    nats = (want.exp().sum(-1).log() - want.gather(-1, TARGETS[..., None])[..., 0]).mean()
    assert_close(logits, want)
    assert_close(loss, nats)
    loss.backward()
    nats.backward()
    for name, p in model.named_parameters():
        if arch == "ngpt_scalar" and "s_u" in name:
            # A single factor is taken out again by the norm after w_down.
            assert p.grad.abs().max() < 1e-14
        else:
            assert p.grad.abs().max() > 1e-9, name
            assert_close(p.grad, written.p[name].grad, 1e-10)


@every_variant
def test_a_variant_in_bfloat16_is_near_float32_and_without_warnings(arch):
    model = GPT(GPTConfig(arch=arch, **TINY))
    _, want = model(IDX, TARGETS)
    # Otherwise torch prints some warnings only once in a process.
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
            warnings.simplefilter("error")
            _, loss = model(IDX, TARGETS)
            norm = variants.BranchRMSNorm(16, model.config)
            assert norm(torch.ones(1, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16
    finally:
        torch.set_warn_always(False)
    assert abs(loss - want) < 0.03


@every_variant
def test_a_variant_trains_is_causal_and_caches(arch):
    model = rough(arch, pn_warmup=0).train()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(5):
        loss = model(IDX, TARGETS)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.project_()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05, losses
    with torch.no_grad():
        for model.training in (True, False):
            whole = model(IDX, TARGETS)[0]
            for t in (1, 4, 7):
                other = IDX.clone()
                other[:, t] = (other[:, t] + 1) % 17
                assert_close(model(other, TARGETS)[0][:, :t], whole[:, :t], 1e-12)
        caches = [Cache() for _ in model.blocks]
        for part in IDX.split([3, 1, 4], dim=1):
            last = model(part, caches=caches)[0]
        assert_close(last[:, 0], whole[:, -1])
        again = rough(arch, pn_warmup=0)
        again.load_state_dict(model.state_dict())
        assert torch.equal(again(IDX, TARGETS)[0], whole)


# The forward of every other variant is one of these, with something left out.
@pytest.mark.parametrize("arch", [
    arch for arch in VARIANTS if "_no_" not in arch and arch != "ngpt_bounded"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch's compiler
def test_a_compiled_variant_is_one_graph_with_eagers_gradients(arch):
    torch.compiler.reset()
    eager = rough(arch, pn_warmup=0).train()
    compiled = copy.deepcopy(eager)
    # PowerNorm has a backward of its own; aot_eager traces that, too.
    backend = "aot_eager" if "powernorm" in arch else "eager"
    compiled.blocks[0].compile(fullgraph=True, backend=backend)
    if arch == "mixln":  # Its last block is another one.
        compiled.blocks[-1].compile(fullgraph=True, backend=backend)
    for model in (eager, compiled):
        model(IDX, TARGETS)[1].backward()
    for p, other in zip(compiled.parameters(), eager.parameters()):
        assert_close(p.grad, other.grad)


def parameters_of(arch):
    return sum(p.numel() for p in GPT(GPTConfig(arch=arch, **TINY)).parameters())


# The models have 4 layers of width 16, with heads of 8 channels.
@pytest.mark.parametrize("arch, base, more", [
    ("normformer_no_attn_ln", "normformer", -4 * 16),
    ("normformer_no_ffn_ln", "normformer", -4 * 64),
    ("normformer_no_head_scale", "normformer", -4 * 2),
    ("ngpt_scalar", "ngpt", -4 * (16 * 3 + 64 * 2 - 5)),
    ("postln", "layernorm", -16),
    ("deepnorm", "layernorm", -16),
    ("keel", "layernorm", -16 + 7 * 16),
    ("mixln", "rmsnorm", 0),
    ("lnscale", "rmsnorm", 0),
    ("periln", "rmsnorm", 4 * 2 * 16),
    ("olmo2", "rmsnorm", 4 * 2 * 16),
    ("hybridnorm", "rmsnorm", 4 * (3 * 8 - 16)),
    ("dyt", "rmsnorm", 9),
    ("derf", "rmsnorm", 2 * 9),
    ("seednorm", "rmsnorm", 9 * 2 * 16),
    ("gatednorm", "rmsnorm", 9 * 2 * 16 * 16)])
def test_what_a_variant_adds_to_or_takes_from_the_parameters(arch, base, more):
    assert parameters_of(arch) - parameters_of(base) == more


def test_a_variant_is_told_by_name_in_the_docstring_and_takes_the_recipe_of_its_kin():
    assert len(VARIANTS) == 23
    table = [line.split()[0] for line in variants.__doc__.split("\n")
             if line.startswith("  ") and line.strip()]
    assert [name for name in table if name in ARCHS] == [arch for arch in ARCHS if arch in VARIANTS]
    kin = {"ngpt": "ngpt", "normformer": "normformer", "powernorm": "powernorm",
           "periln": "normformer", "olmo2": "normformer"}
    for arch in VARIANTS:
        assert ARCHS[arch].family == kin.get(arch.split("_")[0], "rmsnorm")


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("arch, written", [("steps", NGPTBlock), ("branches", RMSNormBlock)])
def test_blocks_to_override_are_the_block_they_override(arch, written, training, monkeypatch):
    block = (variants.StepsBlock if arch == "steps"
             else type("Block", (variants.BranchesBlock, RMSNormBlock), {}))
    monkeypatch.setitem(ARCHS, "plain", written)
    monkeypatch.setitem(ARCHS, "overridden", block)
    logits = []
    for name in ("overridden", "plain"):
        model = rough(name, dropout=0.3).train(training)
        torch.manual_seed(1)
        logits.append(model(IDX, IDX)[0])
    assert_close(*logits)


def test_norms_begin_as_their_docstrings_say():
    config, x = GPTConfig(arch="dyt", **TINY), gaussian(2, 5, 16).float()
    assert torch.equal(variants.DyT(16, config)(x), torch.tanh(x))
    assert torch.equal(variants.Derf(16, config)(x), torch.erf(x))
    seednorm = variants.SeeDNorm(16, config)
    assert torch.equal(seednorm(x), variants.RMSNorm(16, config)(x))
    assert seednorm.alpha.tolist() == 16 * [1]


def test_blocks_know_their_number_in_one_model_and_the_next():
    config = GPTConfig(arch="lnscale", **TINY)
    for _ in range(2):
        assert [round(block.factor.item() ** -2) for block in GPT(config).blocks] == [1, 2, 3, 4]
    config = GPTConfig(arch="mixln", **{**TINY, "n_layer": 11})
    assert [block.post for block in GPT(config).blocks] == [True] * 2 + [False] * 9


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_deepnorm_begins_with_xavier_s_matrices_times_beta_and_leaves_them_then(mlp):
    model = GPT(GPTConfig(arch="deepnorm", vocab_size=17, n_layer=2, n_head=2, n_embd=96, mlp=mlp))
    q, k, v = model.blocks[1].w_qkv.weight.split(96)
    beta = 16 ** -0.25  # (8 n_layer)^(-1/4)
    wide = beta * math.sqrt(2 / (96 + 384))
    square = math.sqrt(2 / (96 + 96))
    for matrix, std in ((q, square), (k, square), (v, beta * square),
                        (model.blocks[1].w_o.weight, beta * square),
                        (model.blocks[1].w_up.weight, wide),
                        (model.blocks[1].w_down.weight, wide)):
        assert abs(matrix.std() / std - 1) < 0.03
    before = copy.deepcopy(model.state_dict())
    model.project_()
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


@torch.no_grad()
def test_ngpt_bounded_bounds_along_ngpt_s_axes():
    model = rough("ngpt_bounded")
    for name, dim in (("w_qkv", 1), ("w_o", 0), ("w_up", 1), ("w_down", 0)):
        matrix = getattr(model.blocks[1], name).weight
        # About as many norms are above 1 as below.
        before = gaussian(*matrix.shape) / matrix.shape[dim] ** 0.5
        matrix.copy_(before)
        model.project_()
        assert_close(matrix, before / before.norm(dim=dim, keepdim=True).clamp(min=1))


# ---- gpt2.py -------------------------------------------------------------------------------------

def a_run(folder, arch="layernorm", **options):
    """Save a checkpoint of a rough model in the folder; return the model, in float32."""
    model = rough(arch, **{**GPT2, **options}).float()
    state = {"model": model.state_dict(), "config": asdict(model.config), "step": 3,
             "tokenizer": "bytes"}
    folder.mkdir()
    torch.save(state, folder / "ckpt.pt")
    return model


@pytest.mark.parametrize("bias", [True, False])
def test_a_run_as_hugging_face_s_gpt2_and_back(tmp_path, bias, capsys):
    model = a_run(tmp_path / "run", bias=bias, dropout=0.2)
    export([str(tmp_path / "run"), str(tmp_path / "theirs")])
    assert capsys.readouterr().out == f"{tmp_path}/theirs: config.json, model.safetensors\n"
    c = json.loads((tmp_path / "theirs" / "config.json").read_text())
    w = load_file(tmp_path / "theirs" / "model.safetensors")
    sizes = dict(vocab_size=17, n_positions=12, n_layer=4, n_head=2, n_embd=16, attn_pdrop=0.2,
                 embd_pdrop=0.2, resid_pdrop=0.2, bos_token_id=256, eos_token_id=256)
    assert {name: c[name] for name in sizes} == sizes and c["activation_function"] == "gelu_new"
    wanted = {"wte.weight": [17, 16], "wpe.weight": [12, 16],
              "ln_f.weight": [16], "ln_f.bias": [16]}
    for i in range(4):
        for name in (f"h.{i}.ln_1", f"h.{i}.ln_2"):
            wanted |= {f"{name}.weight": [16], f"{name}.bias": [16]}
        for name, into, out in (("attn.c_attn", 16, 48), ("attn.c_proj", 16, 16),
                                ("mlp.c_fc", 16, 64), ("mlp.c_proj", 64, 16)):
            wanted |= {f"h.{i}.{name}.weight": [into, out], f"h.{i}.{name}.bias": [out]}
    assert {name: list(x.shape) for name, x in w.items()} == wanted
    assert torch.equal(w["h.2.attn.c_proj.weight"], model.blocks[2].w_o.weight.T)
    assert bias or not any(x.any() for name, x in w.items() if name.endswith("bias"))
    again, tokenizer, _ = load_model(tmp_path / "theirs")
    assert tokenizer.name == "bytes"
    assert torch.equal(again(IDX, IDX)[0], model(IDX, IDX)[0])


@pytest.mark.parametrize("name, value", [
    ("arch", "rmsnorm"),
    ("arch", "postln"),
    ("pos", "rope"),
    ("mlp", "swiglu"),
    ("tie", False),
    ("qk_norm", True)])
def test_what_gpt2_s_files_cannot_hold_is_refused_by_name(tmp_path, name, value):
    a_run(tmp_path / "run", **{name: value})
    with pytest.raises(DataError, match=f"^{name}={value}: GPT-2's files can only hold {name}=.*$"):
        export([tmp_path / "run", tmp_path / "theirs"])
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize("name, value", [
    ("tie_word_embeddings", False),
    ("scale_attn_by_inverse_layer_idx", True),
    ("scale_attn_weights", False),
    ("add_cross_attention", True),
    ("n_inner", 48),
    ("activation_function", "relu"),
    ("layer_norm_epsilon", 1e-6),
    ("model_type", "llama")])
def test_what_the_reader_cannot_represent_is_refused_by_name(tmp_path, name, value):
    a_run(tmp_path / "run")
    export([tmp_path / "run", tmp_path / "theirs"])
    path = tmp_path / "theirs" / "config.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "n_inner": 64, "reorder_and_upcast_attn": True}))
    # Neither of these two changes what the model computes, so they are accepted.
    read_gpt2(tmp_path / "theirs")
    path.write_text(json.dumps({**whole, "n_inner": None}))  # the default, as HuggingFace saves it
    read_gpt2(tmp_path / "theirs")
    path.write_text(json.dumps({**whole, name: value}))
    with pytest.raises(DataError, match=f"^{path}: expected GPT-2's {name}=.*, found {value}$"):
        read_gpt2(tmp_path / "theirs")


@pytest.mark.parametrize("source", ["gpt2-mini", "GPT2", "out/nothing_here"])
def test_only_published_names_are_looked_for_on_the_network(source, monkeypatch, tmp_path):
    a_run(tmp_path / "run")
    export([tmp_path / "run", tmp_path / "theirs"])
    asked, files = [], tmp_path / "theirs"
    monkeypatch.setattr("huggingface_hub.snapshot_download",
                        lambda name, **_: asked.append(name) or files)
    with pytest.raises(DataError,
                       match=f"^{source}: no such checkpoint; .* gpt2, gpt2-medium, .*$"):
        read_gpt2(source)
    assert not asked
    for name in ("gpt2", "gpt2-large", "gpt2-xl"):
        assert read_gpt2(name) and asked.pop() == f"openai-community/{name}"


@pytest.mark.parametrize("source, hint", [
    ("out/angpt", "; did you mean out/angpt.1[?]"), ("ngpt", "; did you mean out/ngpt[?]"),
    ("resume", "; to resume a run, set --resume=true instead"),
    ("scratch", "; without --init_from a run starts from random weights"),
    ("zzz", "with the config.json of GPT-2")])
def test_a_missing_checkpoint_is_told_with_what_may_be_meant(source, hint, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    a_run(tmp_path / "out" / "angpt.1")
    a_run(tmp_path / "out" / "ngpt")
    with pytest.raises(DataError, match=f"^{source}: no such checkpoint; .*{hint}$"):
        read_gpt2(source)


def test_the_command_wants_two_folders():
    with pytest.raises(DataError,
                       match="^expected two folders, that of a run and one to write to: .*$"):
        export(["out/layernorm"])

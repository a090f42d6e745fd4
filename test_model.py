"""Tests of model.py. Every equation meets a second, slow implementation: NumPy, float64, one head and one token at a
time, written from the papers and sharing no code with the model. Run with `python -m pytest -q`."""
import functools
import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import prepare

from model import ARCHS, GPT, GPTConfig, NGPTBlock, PowerNorm, Scale, attend, rope, unit

PRE_NORM, SPHERE = ["layernorm", "rmsnorm", "powernorm", "normformer"], ["ngpt", "angpt"]
torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other
TINY = dict(vocab_size=17, block_size=12, n_layer=2, n_head=2, n_embd=16)
every_arch = pytest.mark.parametrize("arch", PRE_NORM + SPHERE)


def build(arch, **options):
    torch.manual_seed(0)
    return GPT(GPTConfig(arch=arch, **{**TINY, **options})).double().eval()


@torch.no_grad()
def rough(model):
    """Moves every parameter away from its initial value, so that a forgotten gain or a swapped axis shows."""
    gen = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=gen, dtype=torch.float64)
        p.copy_(noise / p.shape[-1] ** 0.5 if p.ndim > 1 else p * (1 + 0.3 * noise) + 0.3 * noise * (p == 0))
        if "alpha" in name:
            p[::3] *= -1  # the forward takes |alpha|
    for layer in model.modules():
        if isinstance(layer, PowerNorm):
            layer.psi2.copy_(0.5 + torch.rand(layer.psi2.shape, generator=gen, dtype=torch.float64))
    return model


def tokens(*shape, vocab=17, seed=2):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def randn(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


IDX, TARGETS, PROMPT = tokens(2, 12), tokens(2, 12, seed=5), tokens(2, 5)


def array(x):
    return x.detach().double().numpy() if torch.is_tensor(x) else np.asarray(x)


def close(got, want, tol=1e-10):
    got, want = array(got), array(want)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tol * np.abs(want).max()


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def unchanged(model, before):
    return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# The equations, once more --------------------------------------------------------------------------------------------

def norm(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def linear(layer, x):
    return x @ array(layer.weight).T + (0 if layer.bias is None else array(layer.bias))


def value(scale, init, stored):
    """A Scale's value, from the parameter it keeps (nGPT, section 2.5)."""
    return array(next(scale.parameters())) * init / stored


def group_scale(x):
    groups = x.reshape(*x.shape[:-1], 4, -1)
    return (groups / np.sqrt((groups**2).mean(-1, keepdims=True) + 1e-5)).reshape(x.shape)


def ref_norm(layer, arch, x):
    if arch == "rmsnorm":
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    elif arch == "powernorm":  # in evaluation
        x = group_scale(x) / np.sqrt(array(layer.psi2) + 1e-5)
    else:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    bias = getattr(layer, "bias", None)
    return x * array(layer.weight) + (0 if bias is None else array(bias))


def angles(T, r):
    return np.arange(T)[:, None] * 10000.0 ** (-2 * np.arange(r // 2) / max(r, 1))


def tables(T, r):
    return torch.tensor(np.cos(angles(T, r))), torch.tensor(np.sin(angles(T, r)))


def turn(x, theta):
    """(T, d_h): channels i and i + r/2 are the coordinates of a point in the plane that turns by theta (T, r/2)."""
    n = theta.shape[1]
    z = (x[:, :n] + 1j * x[:, n:2 * n]) * np.exp(1j * theta)
    return np.concatenate([z.real, z.imag, x[:, 2 * n:]], axis=1)


def ref_attention(block, c, x, theta):
    d, dk = c.n_embd, c.n_embd // c.n_head
    nu_qkv, nu_p = (math.sqrt(d / dk), math.sqrt(dk / d)) if c.arch == "angpt" else (1, 1)
    q, k, v = np.split(linear(block.w_qkv, x) * nu_qkv, 3, axis=-1)
    out = np.zeros_like(x)
    for b, head in itertools.product(range(len(x)), range(c.n_head)):
        own = slice(head * dk, (head + 1) * dk)
        qh, kh, scale = turn(q[b, :, own], theta), turn(k[b, :, own], theta), 1 / math.sqrt(dk)
        if c.qk_norm or c.arch in SPHERE:
            qh, kh, scale = norm(qh), norm(kh), math.sqrt(dk) if c.arch == "ngpt" else array(block.g)
        if c.arch == "ngpt":
            s_qk = value(block.s_qk, 1, 1 / math.sqrt(d))[own]
            qh, kh = qh * s_qk, kh * s_qk
        for t in range(x.shape[1]):
            weights = np.exp(scale * (kh[:t + 1] @ qh[t]))
            out[b, t, own] = (weights / weights.sum()) @ v[b, :t + 1, own]
        if c.arch == "normformer":
            out[b, :, own] *= array(block.head_scale)[head]
    return linear(block.w_o, out) * nu_p


def ref_mlp(block, c, x):
    root_d = math.sqrt(c.n_embd) if c.arch in SPHERE else 1
    nu_uz, nu_acf, nu_d = (0.5, float(block.nu_acf), 2) if c.arch == "angpt" else (1, 1, 1)
    uz = linear(block.w_up, x) * nu_uz
    u, gate = np.split(uz, 2, axis=-1) if c.mlp == "swiglu" else (1, uz)
    if c.arch == "ngpt":
        u, gate = u * value(block.s_u, 1, 1), gate * value(block.s_v, 1, 1)
    hidden = u * {"swiglu": silu, "gelu": gelu}[c.mlp](gate * root_d) * nu_acf
    if c.arch == "normformer":
        hidden = ref_norm(block.norm_ffn, c.arch, hidden)
    return linear(block.w_down, hidden) * nu_d


def ref_block(block, c, h, theta):
    if c.arch in SPHERE:
        stored = 1 / math.sqrt(c.n_embd) if c.arch == "ngpt" else 0.01
        for branch, alpha in ((ref_attention, block.alpha_a), (ref_mlp, block.alpha_m)):
            y = norm(branch(block, c, h, theta) if branch is ref_attention else branch(block, c, h))
            a = np.abs(value(alpha, 0.05, stored))
            h = norm(h + a * (y - h)) if c.arch == "ngpt" else (h + a * (y - h)) / np.sqrt(1 - 2 * a + 2 * a**2)
        return h
    y = ref_attention(block, c, ref_norm(block.norm1, c.arch, h), theta)
    h = h + (ref_norm(block.norm_attn, c.arch, y) if c.arch == "normformer" else y)
    kept = h * array(block.resid_scale) if c.resid_scale else h
    return kept + ref_mlp(block, c, ref_norm(block.norm2, c.arch, h))


def ref_gpt(model, idx):
    c, T = model.config, idx.shape[1]
    d, sphere = c.n_embd, c.arch in SPHERE
    h = array(model.wte.weight)[idx.numpy()]
    if c.pos == "learned":
        h = h + array(model.wpe.weight)[:T]
    if c.pos == "sinusoidal":
        for t, i in itertools.product(range(T), range(d)):
            wave = math.cos if i % 2 else math.sin
            h[:, t, i] += wave(t / 10000 ** ((i - i % 2) / d)) * (1 / math.sqrt(d) if sphere else 0.02)
    for block in model.blocks:
        h = ref_block(block, c, h, angles(T, d // c.n_head if c.pos == "rope" else 0))
    s_z = value(model.s_z, 1, 1 / math.sqrt(d) if c.arch == "ngpt" else 0.01) if sphere else 1
    return s_z * linear(model.lm_head, h if sphere else ref_norm(model.norm_f, c.arch, h))


@pytest.mark.parametrize("arch, resid_scale", [(a, False) for a in PRE_NORM + SPHERE] + [("normformer", True)])
@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
@pytest.mark.parametrize("qk_norm", [False, True], ids=["", "qk_norm"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_block_equals_its_equations(arch, resid_scale, mlp, qk_norm, bias, fraction):
    model = rough(build(arch, mlp=mlp, qk_norm=qk_norm, bias=bias, rope_fraction=fraction, resid_scale=resid_scale))
    h, r = randn(2, 7, 16), int(8 * fraction)
    want = ref_block(model.blocks[0], model.config, h.numpy(), angles(7, r))
    close(model.blocks[0](h, *tables(7, r)), want)
    close(model.cos, np.cos(angles(12, r)), 1e-6)
    close(model.sin, np.sin(angles(12, r)), 1e-6)


@every_arch
@pytest.mark.parametrize("pos", ["rope", "learned", "sinusoidal"])
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_whole_model_equals_its_equations(arch, pos, tie):
    model = rough(build(arch, pos=pos, tie=tie))
    logits, loss = model(IDX, TARGETS)
    want = ref_gpt(model, IDX)
    close(logits, want, 1e-10 if pos == "learned" else 1e-6)  # the other two have float32 tables
    log_p = want - np.log(np.exp(want).sum(-1, keepdims=True))
    nats = -np.take_along_axis(log_p, TARGETS.numpy()[..., None], -1)
    close(loss, nats.mean(), 1e-6)  # a float32 loss
    close(model(IDX, TARGETS.masked_fill(torch.arange(12) > 3, -1))[1], nats[:, :4].mean(), 1e-6)  # -1: no target
    last, none = model(IDX)
    assert none is None
    close(last, logits[:, -1:], 1e-12)


@every_arch
@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_every_parameter_learns(arch, mlp):
    model = rough(build(arch, mlp=mlp, qk_norm=True, bias=True, resid_scale=arch == "normformer", pos="learned"))
    model(IDX, TARGETS)[1].backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0, name


@pytest.mark.parametrize("arch", PRE_NORM)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_block_with_silent_branches_is_the_identity(arch, training):
    """The residual takes x itself, never N(x)."""
    block, h = rough(build(arch, bias=True)).train(training).blocks[0], randn(2, 7, 16)
    silent = [block.w_o, block.w_down] + ([block.norm_attn] if arch == "normformer" else [])
    for p in itertools.chain(*(layer.parameters() for layer in silent)):
        nn.init.zeros_(p)
    assert torch.equal(block(h, *tables(7, 8)), h)


# Small pieces --------------------------------------------------------------------------------------------------------

def test_unit_has_norm_one_and_survives_zero():
    x, zero = randn(5, 16), torch.zeros(3, 16, requires_grad=True)
    for factor in (1e-10, 1, 1e10):
        close(unit(x * factor), norm(x.numpy()))
    close(unit(x, dim=0), norm(x.numpy().T).T)
    unit(zero).sum().backward()
    assert torch.equal(unit(zero), zero) and zero.grad.isfinite().all()
    half = randn(64, 3000).bfloat16()  # a norm rounded to bfloat16 would be off by 2e-3
    assert unit(half).dtype == torch.bfloat16 and (unit(half).double().norm(dim=-1) - 1).abs().max() < 1e-3


def test_rope_turns_pairs_and_scores_see_offsets_only():
    x = randn(2, 3, 9, 8)
    y = rope(x, *tables(9, 4))
    for b, head in itertools.product(range(2), range(3)):
        close(y[b, head], turn(x[b, head].numpy(), angles(9, 4)))
    close(y.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(y[:, :, 0], x[:, :, 0]) and torch.equal(y[..., 4:], x[..., 4:])
    q, k = (rope(randn(1, 1, 1, 8, seed=s).expand(1, 1, 9, 8), *tables(9, 8))[0, 0] for s in (1, 2))
    scores = q @ k.T
    close(scores[1:, 1:], scores[:-1, :-1])
    assert scores[0].std() > 0.1


def test_scale_separates_value_from_learning_rate():
    scale = Scale(6, 0.05, 0.01)
    (p,) = scale.parameters()
    scale().sum().backward()
    for got, want in ((p, 0.01), (scale(), 0.05), (p.grad, 0.05 / 0.01)):
        close(got, np.full(6, want), 1e-6)


@pytest.mark.parametrize("T", [6, 520])
def test_attend_is_causal_softmax_attention(T):
    q, k, v = (randn(2, 3, T, 4, seed=s) for s in (1, 2, 3))
    weights = np.exp(0.7 * np.einsum("bhid,bhjd->bhij", q, k)) * np.tril(np.ones((T, T)))
    close(attend(q, k, v, 0.7), np.einsum("bhij,bhjd->bhid", weights / weights.sum(-1, keepdims=True), v))


# PowerNorm -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("micro_batches", [1, 2])
def test_powernorm_follows_its_rule_over_steps(micro_batches):
    layer = PowerNorm(8, GPTConfig(arch="powernorm", bias=True, pn_warmup=2)).double().train()
    with torch.no_grad():
        layer.weight.copy_(1 + 0.3 * randn(8, seed=8))
        layer.bias.copy_(0.3 * randn(8, seed=9))
    gamma, beta, psi2, nu = (array(t).copy() for t in (layer.weight, layer.bias, layer.psi2, layer.nu))
    for step in range(6):
        means = 0  # over the step's tokens: x^2, xhat^2, g xhat
        for micro in range(micro_batches):
            x, w = (randn(3, 5, 8, seed=100 * step + 10 * micro + i) for i in (0, 1))
            x = (0.5 + (1 + step) * x).requires_grad_()
            layer.weight.grad = layer.bias.grad = None
            y = layer(x)
            (y * w).sum().backward()

            z = group_scale(array(x))
            root = np.sqrt(((z**2).mean((0, 1)) if step < 2 else psi2) + 1e-5)
            xhat, g = z / root, array(w) * gamma
            close(y, gamma * xhat + beta)
            close(layer.weight.grad, (array(w) * xhat).sum((0, 1)))
            groups, dz = array(x).reshape(3, 5, 4, 2), ((g - nu * xhat) / root).reshape(3, 5, 4, 2)
            s = (groups**2).mean(-1, keepdims=True) + 1e-5  # back through the group scaling
            dx = dz / np.sqrt(s) - groups * (dz * groups).mean(-1, keepdims=True) / s**1.5
            close(x.grad, dx.reshape(3, 5, 8))
            means = means + np.stack([z**2, xhat**2, g * xhat]).mean((1, 2)) / micro_batches
        layer.update_()
        psi2, nu = 0.9 * psi2 + 0.1 * means[0], nu * (1 - 0.1 * means[1]) + 0.1 * means[2]
        close(layer.psi2, psi2)
        close(layer.nu, nu)
        assert int(layer.steps) == step + 1
    before = snapshot(layer)
    close(layer.eval()(x), ref_norm(layer, "powernorm", array(x)))  # running statistics, and none gathered
    layer.train().update_()
    assert unchanged(layer, before)


# Causality -----------------------------------------------------------------------------------------------------------

def leak(model, t=6):
    """The largest change that another token at t makes in a logit before t; those from t on have to change."""
    other = IDX.clone()
    other[:, t] = (other[:, t] + 1) % 17
    difference = (model(IDX, IDX)[0] - model(other, other)[0]).abs().amax((0, 2))
    assert difference[t:].min() > 1e-9
    return difference[:t].max().item()


@every_arch
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_no_logit_sees_the_future(arch, training):
    assert leak(rough(build(arch, pn_warmup=0)).train(training)) <= 1e-12  # pn_warmup=0: warm-up is over


def test_powernorm_sees_the_future_in_warm_up_and_only_there():
    model = rough(build("powernorm", pn_warmup=1)).train()
    assert leak(model) > 1e-9 and leak(model.eval()) <= 1e-12
    model.train()(IDX, TARGETS)[1].backward()
    model.project_()
    assert leak(model) <= 1e-12


# Generation ----------------------------------------------------------------------------------------------------------

def generate(model, idx, n, **options):
    return torch.stack(list(model.generate(idx, n, **options)), dim=1)


@torch.no_grad()
def greedy_from_scratch(model, window, n):
    size = model.config.block_size
    for _ in range(n):
        window = window if window.shape[1] <= size else window[:, -(size // 2):]
        token = model(window)[0][:, -1].argmax(-1)
        window = torch.cat([window, token[:, None]], 1)
        yield token


@pytest.mark.parametrize("arch, pos, size", [(arch, pos, 12) for pos in ("rope", "learned", "sinusoidal")
                                             for arch in PRE_NORM + SPHERE] + [("angpt", "rope", 520)])
def test_cached_generation_equals_recomputation(arch, pos, size):
    model, prompt = rough(build(arch, pos=pos, block_size=size)), tokens(2, size - 7)
    want = torch.stack(list(greedy_from_scratch(model, prompt, 23)), 1)  # passes block_size
    assert len(want.unique()) > 3 and torch.equal(generate(model, prompt, 23, temperature=0), want)
    long = tokens(2, 2 * size)  # of a longer prompt, the last block_size tokens
    assert torch.equal(generate(model, long, 3, temperature=0), generate(model, long[:, -size:], 3, temperature=0))


@every_arch
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_generation_is_in_eval_mode_and_restores_the_mode(arch, training):
    model = rough(build(arch, dropout=0.5))
    want, before = generate(model, PROMPT, 6, temperature=0), snapshot(model)
    model.train(training)
    assert torch.equal(generate(model, PROMPT, 6, temperature=0), want)
    stream = model.generate(PROMPT, 6)
    next(stream)
    stream.close()  # the reader may leave early
    assert all(m.training == training for m in model.modules()) and unchanged(model, before)


def test_sampling_options_have_greedy_as_their_limit_and_seeds_repeat():
    model = rough(build("ngpt"))
    want = generate(model, PROMPT, 10, temperature=0)
    for options in (dict(top_k=1), dict(top_p=1e-6), dict(temperature=1e-5)):
        assert torch.equal(generate(model, PROMPT, 10, **options), want)
    a, b, c = (generate(model, PROMPT, 10, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_stop_token_ends_one_sequence_and_not_the_other():
    model = rough(build("layernorm"))
    a, b = generate(model, PROMPT, 12, temperature=0).tolist()
    at, stop = next((i, t) for i, t in enumerate(a) if i and t not in a[:i] + b)
    got = generate(model, PROMPT, 12, temperature=0, stop=stop).tolist()
    assert got == [a[:at + 1] + [stop] * (11 - at), b]
    assert generate(model, PROMPT[:1], 12, temperature=0, stop=stop).tolist() == [a[:at + 1]]  # all stopped: the end


def test_samples_follow_the_softmax():
    n, model, prompt = 4000, rough(build("layernorm", vocab_size=6)), tokens(1, 5, vocab=6)
    logits = array(model(prompt)[0])[0, -1]
    order = np.argsort(-logits)

    def expected(temperature, keep=6):
        p = np.exp(logits / temperature)
        p[order[keep:]] = 0
        return p / p.sum()

    nucleus = expected(2.0)[order].cumsum()[1:3].mean()  # two tokens are too few, three are enough
    for options, want in ((dict(temperature=0.5), expected(0.5)), (dict(), expected(1.0)),
                          (dict(temperature=2.0), expected(2.0)), (dict(temperature=2.0, top_k=3), expected(2.0, 3)),
                          (dict(temperature=2.0, top_p=nucleus), expected(2.0, 3))):
        (drawn,) = model.generate(prompt.expand(n, 5), 1, generator=torch.Generator().manual_seed(7), **options)
        frequency = np.bincount(drawn.numpy(), minlength=6) / n
        assert np.abs(frequency - want).max() < 0.03 and (frequency > 0).sum() == (want > 0).sum()


# Constraints ---------------------------------------------------------------------------------------------------------

def constrained_norms(model):
    """(name, norms) of each matrix's constrained vectors: its rows, but the columns of nGPT's two output maps."""
    for name, p in model.named_parameters():
        if p.ndim == 2:
            yield name, p.norm(dim=0 if model.config.arch == "ngpt" and ("w_o." in name or "w_down." in name) else 1)


def assert_constraint(model):
    for name, norms in constrained_norms(model) if model.config.arch in SPHERE else ():
        assert norms.max() <= 1 + 1e-6 and (model.config.arch == "angpt" or norms.min() >= 1 - 1e-6), name


@pytest.mark.parametrize("arch", SPHERE)
@pytest.mark.parametrize("pos", ["rope", "learned"])
def test_projection_is_the_papers_constraint(arch, pos):
    model = build(arch, pos=pos)
    assert all((norms - 1).abs().max() < 1e-6 for _, norms in constrained_norms(model))  # unit at init, in both
    rough(model).project_()
    assert_constraint(model)


def test_angpt_bound_leaves_short_rows_and_all_directions_alone():
    model = build("angpt")
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p[::2] *= 0.3
                p[1::2] *= 3
    before = snapshot(model)
    model.project_()
    for name, p in model.named_parameters():
        short = p[::2] if p.ndim == 2 else p
        assert torch.equal(short, before[name][::2] if p.ndim == 2 else before[name]), name
        if p.ndim == 2:
            close(p[1::2], norm(array(before[name][1::2])), 1e-6)


@every_arch
def test_projection_keeps_zeros_finite_and_pre_norm_families_as_they_are(arch):
    model = rough(build(arch, bias=True))
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim:
                p[..., 0] = p[0] = 0
    before = snapshot(model)
    model.project_()
    assert all(p.isfinite().all() for p in model.parameters()) and unchanged(model, before) == (arch in PRE_NORM)


@every_arch
def test_one_batch_is_learnt_by_heart(arch):
    torch.manual_seed(0)
    model = GPT(GPTConfig(arch=arch, **{**TINY, "n_embd": 32}, pn_warmup=5)).train()
    adam = torch.optim.Adam(model.parameters(), lr=0.03 if arch in SPHERE else 0.01)
    for _ in range(60):
        adam.zero_grad()
        model(IDX, TARGETS)[1].backward()
        adam.step()
        model.project_()
        assert_constraint(model)
    assert model(IDX, TARGETS)[1] < math.log(17) / 4


# Numbers of the papers -----------------------------------------------------------------------------------------------

def test_angpt_residual_is_scaled_by_nu_of_alpha():
    """With silent branches norm(0) = 0, so that each update leaves h times (1 - a) / sqrt(1 - 2a + 2a^2)."""
    block, h = rough(build("angpt")).blocks[0], randn(2, 7, 16)
    nn.init.zeros_(block.w_o.weight)
    nn.init.zeros_(block.w_down.weight)
    a, m = np.abs(value(block.alpha_a, 0.05, 0.01)), np.abs(value(block.alpha_m, 0.05, 0.01))
    close(block(h, *tables(7, 8)), h.numpy() * (1 - a) / np.hypot(1 - a, a) * (1 - m) / np.hypot(1 - m, m))


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_angpt_constants_are_those_of_section_4(mlp):
    d, rng = 256, np.random.default_rng(0)
    block = build("angpt", mlp=mlp, n_embd=d, n_head=8).blocks[0]
    for name, want in dict(nu_qkv=math.sqrt(8), nu_p=math.sqrt(1 / 8), nu_uz=1 / 2, nu_d=2).items():
        assert abs(float(getattr(block, name)) - want) < 1e-6, name
    u, z = norm(rng.standard_normal((2, 500, 4 * d)))  # uniform on the sphere
    hidden = u * silu(math.sqrt(d) * z) if mlp == "swiglu" else gelu(math.sqrt(d) * z)
    assert abs(float(block.nu_acf) * np.linalg.norm(hidden, axis=-1).mean() - 1) < 0.01
    assert mlp == "gelu" or 3.71 < float(block.nu_acf) < 3.75  # the paper's 3.74


def count(arch, **options):
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(GPTConfig(arch=arch, **options)).parameters())


SIZES = [(256, 6, 4), (384, 10, 6), (512, 18, 8), (768, 18, 12), (1024, 24, 16), (1280, 36, 20)]


@pytest.mark.parametrize("arch, printed", [
    ("rmsnorm", [32.05, 62.23, 127.03, 247.16, 505.73, 1073]),  # the paper prints 62.24 and 247.17
    ("ngpt", [32.11, 62.32, 127.16, 247.34, 506.00, 1073]),     # and 62.33
    ("angpt", [32.10, 62.28, 127.08, 247.21, 505.78, 1073])])
def test_parameters_of_angpt_table_f1(arch, printed):
    counts = [count(arch, vocab_size=50304, block_size=2048, n_embd=d, n_layer=n, n_head=h, qk_norm=True)
              for d, n, h in SIZES]
    assert [round(n / 1e6, 2) for n in counts[:5]] + [round(counts[5] / 1e6)] == printed


@pytest.mark.parametrize("arch, printed", [("rmsnorm", [468.2, 1025.7]), ("ngpt", [468.4, 1026.1])])
def test_parameters_of_ngpt_table_2(arch, printed):
    counts = [count(arch, vocab_size=32000, block_size=4096, n_embd=d, n_layer=n, n_head=h) for d, n, h in SIZES[4:]]
    assert [n // 10**5 / 10 for n in counts] == printed  # truncated, not rounded


@pytest.mark.parametrize("bias, added", [(False, 46_224), (True, 92_304)])
def test_parameters_of_gpt2_and_what_normformer_adds(bias, added):
    gpt2 = dict(vocab_size=50257, block_size=1024, n_embd=768, n_layer=12, n_head=12, mlp="gelu", pos="learned",
                tie=True, bias=bias)
    plain = count("layernorm", **gpt2)
    assert plain == 124_439_808 or not bias
    assert count("normformer", **gpt2) - plain == added
    assert count("normformer", **gpt2, resid_scale=True) - plain == added + 12 * 768


# Initialization, configuration, dropout ------------------------------------------------------------------------------

@pytest.mark.parametrize("arch", PRE_NORM)
def test_pre_norm_initialization(arch):
    model = build(arch, n_layer=3, n_embd=128, vocab_size=500, bias=True, qk_norm=True, pos="learned", block_size=100)
    for name, p in model.named_parameters():
        if p.ndim == 2:
            std = 0.02 / math.sqrt(2 * 3) if "w_o." in name or "w_down." in name else 0.02
            assert abs(p.std() / std - 1) < 0.05 and abs(p.mean()) < 0.1 * std, name
        else:
            close(p, np.full(p.shape, 0 if name.endswith("bias") else 8 if name.endswith(".g") else 1), 1e-6)


@pytest.mark.parametrize("arch", SPHERE)
@pytest.mark.parametrize("options", [{}, dict(alpha_init=0.2, alpha_scale=0.5, s_z_init=3.0, s_z_scale=0.25)],
                         ids=["papers", "options"])
def test_scales_start_as_configured(arch, options):
    model, papers = build(arch, **options), 0.25 if arch == "ngpt" else 0.01  # 0.25 = 1/sqrt(16)
    block = model.blocks[1]
    alpha = (options.get("alpha_init", 0.05), options.get("alpha_scale", papers))
    starts = [(block.alpha_a, 16, *alpha), (block.alpha_m, 16, *alpha),
              (model.s_z, 17, options.get("s_z_init", 1), options.get("s_z_scale", papers))]
    if arch == "ngpt":
        starts += [(block.s_qk, 16, 1, papers), (block.s_u, 64, 1, 1), (block.s_v, 64, 1, 1)]
    else:
        assert abs(block.g.item() - math.sqrt(8)) < 1e-6
    for scale, n, init, stored in starts:
        close(scale(), np.full(n, init), 1e-6)
        close(next(scale.parameters()), np.full(n, stored), 1e-6)


@every_arch
def test_a_seventh_arch_is_one_assignment(arch, monkeypatch):
    class Backwards(NGPTBlock):
        def forward(self, h, *args, **kwargs):
            return -super().forward(h, *args, **kwargs)

    monkeypatch.setitem(ARCHS, "backwards", Backwards)
    close(build("backwards", n_layer=1)(IDX)[0], -build("ngpt", n_layer=1)(IDX)[0], 1e-12)
    monkeypatch.setitem(ARCHS, "mine", functools.partial(ARCHS[arch]))
    mine, original = rough(build("mine")), rough(build(arch))
    mine.project_()
    original.project_()
    assert torch.equal(mine(IDX)[0], original(IDX)[0]) and generate(mine, PROMPT, 3).shape == (2, 3)


@pytest.mark.parametrize("options, words", [
    (dict(arch="rmsnrom"), "rmsnrom rmsnorm"), (dict(arch="normforme"), "normforme normformer"),
    (dict(mlp="swigloo"), "swigloo swiglu"), (dict(pos="ropes"), "ropes rope"),
    (dict(n_embd=64, n_head=7), "7 64 8"), (dict(n_embd=64, n_head=40), "40 64 32"),
    (dict(rope_fraction=0.375), "rope_fraction 0.375 0.25"), (dict(rope_fraction=1.5), "rope_fraction 1.5 1"),
    (dict(dropout=-0.5), "dropout 0.5 0"), *[({key: bad}, f"{key} {abs(bad)} 1") for key in TINY for bad in (0, -3)]])
def test_bad_options_are_met_with_the_nearest_good_one(options, words):
    with pytest.raises(ValueError) as error:
        GPTConfig(**{**dict(arch="rmsnorm"), **TINY, **options})
    said, words = re.findall(r"\w+(?:\.\d+)?", str(error.value)), words.split()
    assert set(words) <= set(said), error.value
    names = set(said) & {*ARCHS, "swiglu", "gelu", "rope", "learned", "sinusoidal"}
    assert all(said.count(words[-1]) > said.count(name) for name in names - {words[-1]}), error.value


def test_too_long_a_sequence_names_both_lengths():
    with pytest.raises(ValueError, match=r"(?s)(?=.*\b13\b)(?=.*\b12\b)"):
        build("rmsnorm")(tokens(1, 13))


@every_arch
def test_dropout_acts_at_its_rate_and_in_training_only(arch):
    model, idx, inputs = rough(build(arch, dropout=0.4, n_embd=32, pn_warmup=0)), tokens(40, 12), []
    assert torch.equal(model(IDX)[0], rough(build(arch, n_embd=32))(IDX)[0])
    block, h = model.train().blocks[0], randn(40, 12, 32)
    block.register_forward_pre_hook(lambda block, args: inputs.append(args[0]))
    assert not torch.equal(model(idx)[0], model(idx)[0])
    assert all(abs((x == 0).double().mean() - 0.4) < 0.02 for x in inputs)  # of the embeddings
    if arch in PRE_NORM:  # of a branch, when the other is silent: the share of channels that stay as they are
        nn.init.zeros_(block.w_down.weight)
        assert abs((block(h, *tables(12, 16)) == h).double().mean() - 0.4) < 0.02


# Gradients, folding, variants, README ---------------------------------------------------------------------------------

@pytest.mark.parametrize("arch, qk_norm", [(a, q) for a in PRE_NORM for q in (False, True)] + [(a, False) for a in SPHERE])
def test_gradients_of_a_block_are_those_of_its_equations(arch, qk_norm):
    """Along random directions in input and parameters: autograd against differences of the NumPy equations."""
    model = rough(build(arch, qk_norm=qk_norm, bias=True))
    block, c = model.blocks[0], model.config
    h, weights = randn(2, 6, 16).requires_grad_(), array(randn(2, 6, 16, seed=8))
    (block(h, *tables(6, 8)) * torch.tensor(weights)).sum().backward()
    for seed, x in enumerate([h, *block.parameters()]):
        direction, step = randn(*x.shape, seed=seed), 1e-5
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                x.add_(direction, alpha=sign * step)
                ends.append((ref_block(block, c, array(h), angles(6, 8)) * weights).sum())
                x.sub_(direction, alpha=sign * step)
        slope = (ends[0] - ends[1]) / (2 * step)
        assert abs((x.grad * direction).sum().item() - slope) < 1e-6 * max(1, abs(slope))


@every_arch
@pytest.mark.parametrize("mlp, bias, tie", [("swiglu", False, False), ("gelu", True, True)])
def test_folding_leaves_the_logits_and_empties_the_factors(arch, mlp, bias, tie):
    model = rough(build(arch, mlp=mlp, bias=bias, tie=tie))
    before = model(IDX, TARGETS)[0]
    close(model.fold_()(IDX, TARGETS)[0], before, 1e-12)
    if arch in SPHERE:
        block = model.blocks[0]
        close(model.s_z(), np.ones(17))
        assert block.sqrt_d == 1
        if arch == "ngpt":
            close(block.s_v(), np.ones(64))
        else:
            assert block.nu_qkv == block.nu_p == block.nu_uz == block.nu_acf == block.nu_d == 1


def test_variants_of_ngpt_differ_in_their_one_step(monkeypatch):
    from lessons import variants
    monkeypatch.setitem(ARCHS, "steps", variants.StepsBlock)
    close(rough(build("steps"))(IDX, TARGETS)[0], rough(build("ngpt"))(IDX, TARGETS)[0], 1e-14)
    h, y, alpha = norm(array(randn(5, 16))), norm(array(randn(5, 16, seed=4))), 0.3
    dot = (h * y).sum(-1, keepdims=True)
    theta = np.arccos(dot)
    expected = {
        "ngpt_slerp": (np.sin((1 - alpha) * theta) * h + np.sin(alpha * theta) * y) / np.sin(theta),
        "ngpt_riemann": norm(h - alpha * (h * dot - y)),
        "ngpt_corrected": (h + alpha * (y - h)) / math.sqrt(1 - 2 * alpha + 2 * alpha**2),
    }
    for arch, want in expected.items():
        block = build(arch).blocks[0]
        close(block.step(torch.tensor(h), torch.tensor(y), torch.tensor(alpha, dtype=torch.float64)), want, 1e-12)
    close(build("ngpt_no_qk_norm").blocks[0].qk_norm(torch.tensor(3 * h)), 3 * h)
    assert next(build("ngpt_scalar").blocks[0].s_u.parameters()).numel() == 1
    bounded = rough(build("ngpt_bounded"))
    bounded.project_()
    assert bounded.blocks[0].w_o.weight.norm(dim=0).max() <= 1 + 1e-12
    assert bounded.blocks[0].w_o.weight.norm(dim=0).min() < 0.99


@pytest.mark.parametrize("arch", ["ngpt_no_qk_norm", "ngpt_slerp", "ngpt_scalar", "ngpt_riemann", "ngpt_corrected",
                                  "ngpt_bounded"])
def test_variants_learn(arch):
    import lessons.variants  # noqa: F401
    test_one_batch_is_learnt_by_heart(arch)


def test_the_seventh_arch_of_the_readme_runs(tmp_path):
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", readme, re.S) if "ARCHS[" in block)
    assert len(code[code.index("class "):].strip().splitlines()) <= 10
    folder = tmp_path / "data"
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be\n" * 100)
    prepare.prepare(str(text), name="tiny", data_dir=str(folder))
    small = f'data="{folder}/tiny", out_dir="{tmp_path}/out", max_steps=2, n_layer=1, n_embd=16, n_head=2, block_size=16'
    try:
        exec(code.replace("max_steps=200", small + ', dtype="float32", compile="false"'), {})
        log = (tmp_path / "out" / "log.jsonl").read_text()
    finally:
        ARCHS.pop("dyt", None)
    assert '"step": 2' in log

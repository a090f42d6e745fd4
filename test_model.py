"""Every test. Run with `python -m pytest`.

Every equation of model.py meets a second, slow implementation: NumPy, float64, one head and one token at a time,
written from the papers and sharing no code with the model. The rest holds properties, for every architecture.
"""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import platform
import pickle
import random
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken
import torch
from torch import nn

import bench
import model as model_py
import prepare as prep
import sample as sampler
import train as trainer
from lessons import variants
from model import ARCHS, GPT, Cache, ConfigError, GPTConfig, NGPTBlock, PowerNorm, Scale, attend, rope, unit
from prepare import DataError
from train import Diverged, TrainConfig, load_model, parse, resolve, train

torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other


@pytest.fixture(autouse=True)
def compiler_as_it_was():
    """bench.py sets these for the whole process."""
    config = torch._dynamo.config
    with config.patch(specialize_float=config.specialize_float, recompile_limit=config.recompile_limit):
        yield


# model.py ============================================================================================================

PRE_NORM, SPHERE = ["layernorm", "rmsnorm", "powernorm", "normformer"], ["ngpt", "angpt"]
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
    z = (x[:, :n] + 1j * x[:, n : 2 * n]) * np.exp(1j * theta)
    return np.concatenate([z.real, z.imag, x[:, 2 * n :]], axis=1)


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
            weights = np.exp(scale * (kh[: t + 1] @ qh[t]))
            out[b, t, own] = (weights / weights.sum()) @ v[b, : t + 1, own]
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
    for factor in (1e-30, 1, 1e10):
        close(unit(x * factor), norm(x.numpy()))
    close(unit(x, dim=0), norm(x.numpy().T).T)
    unit(zero).sum().backward()
    assert torch.equal(unit(zero), zero) and torch.equal(zero.grad, torch.zeros(3, 16))
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


@pytest.mark.parametrize("T", [6, 128, 129, 300, 520])
def test_attend_is_causal_softmax_attention(T):
    q, k, v = (randn(2, 3, T, 4, seed=s).requires_grad_() for s in (1, 2, 3))
    weights = np.exp(0.7 * np.einsum("bhid,bhjd->bhij", array(q), array(k))) * np.tril(np.ones((T, T)))
    want = np.einsum("bhij,bhjd->bhid", weights / weights.sum(-1, keepdims=True), array(v))
    close(attend(q, k, v, 0.7), want)
    with torch.no_grad():
        for first in {1, T // 2, T - 1}:
            cache = Cache(2, GPTConfig(n_head=3, n_embd=12, block_size=T), v)
            parts = (slice(first), slice(first, T))
            close(torch.cat([attend(q[:, :, s], k[:, :, s], v[:, :, s], 0.7, cache) for s in parts], 2), want)
    grads = torch.autograd.grad(attend(q, k, v, 0.7).cos().sum(), (q, k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7)
    for got, other in zip(grads, torch.autograd.grad(sdpa.cos().sum(), (q, k, v))):
        close(got, other, 1e-9)


def formula_of_attention(q, k, v, scale):
    T = q.shape[-2]
    scores = (scale * q @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32))
    return scores.masked_fill(torch.ones(T, T).triu(1) > 0, -math.inf).softmax(-1).type_as(v) @ v


def test_compiled_code_has_an_attention_with_its_own_backward(monkeypatch):
    """Where it may: not with dropout or keys before the first query. The scale, too, gets a gradient."""
    calls, compiled = [], model_py.CompiledAttention
    counted = SimpleNamespace(apply=lambda *a: calls.append(1) or compiled.apply(*a))
    monkeypatch.setattr(model_py, "CompiledAttention", counted)
    monkeypatch.setattr(model_py, "PART", 3)
    q, k, v, scale = *(randn(2, 2, 7, 4, seed=s).requires_grad_() for s in range(3)), torch.tensor(0.7, requires_grad=True)
    g, results = randn(2, 7, 2, 4, seed=3).transpose(1, 2), []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
        y = attend(q, k, v, scale)
        results.append((y, *torch.autograd.grad(y, (q, k, v, scale), g)))
        assert len(calls) == compiling
    for got, want in zip(*results):
        close(got, want)
    assert torch.autograd.gradcheck(lambda *a: attend(*a, 0.7), (q, k, v), check_undefined_grad=False) and len(calls) > 1
    calls.clear()
    attend(q, k, v, 0.7, dropout=0.1)
    cache = Cache(2, GPTConfig(n_head=2, n_embd=8, block_size=7), v)
    with torch.no_grad():
        for part in (slice(3), slice(3, 7)):
            attend(q[:, :, part], k[:, :, part], v[:, :, part], 0.7, cache)
    assert len(calls) == 1  # the first three tokens alone
    slope = torch.autograd.grad(compiled.apply(q, k, v).square().sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def test_compiled_attention_sees_the_past_alone_however_large_its_scores(monkeypatch):
    monkeypatch.setattr(model_py, "PART", 4)
    q, k, v, g = (randn(1, 2, 7, 4, seed=s) for s in range(4))
    q[..., 0], k[..., 0] = 1.0, torch.tensor([-3e4, -3e4, 0.0, 1.0, 0.0, 1e4, 3e4])
    results = []
    for how in (model_py.CompiledAttention.apply, lambda *x: formula_of_attention(*x, 1.0)):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        y = how(*inputs)
        results.append((y, *torch.autograd.grad(y, inputs, g)))
    for got, want in zip(*results):
        assert torch.isfinite(got).all()
        close(got, want, 1e-7)


@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_compiled_attention_in_half_precision_is_about_as_exact_as_autograd_on_its_formula(scale):
    q, k, v, g = (randn(2, 2, 200, 16, seed=s).bfloat16() for s in range(4))
    results = []
    for dtype, how in (
        (torch.double, formula_of_attention),
        (torch.bfloat16, formula_of_attention),
        (torch.bfloat16, lambda q, k, v, scale: model_py.CompiledAttention.apply(scale * q, k, v)),
    ):
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        y = how(*inputs, scale)
        results.append((y, *torch.autograd.grad(y, inputs, g.to(dtype))))
    for want, usual, ours in zip(*results):
        assert 0 < (ours - want).norm() < 1.5 * (usual - want).norm() < 0.05 * want.norm()
    assert torch.equal(model_py.attend_plainly(q, k, v, scale, 0.0), formula_of_attention(q, k, v, scale))


def test_compiled_attention_takes_values_that_autocast_left_in_float32():
    class Mine(model_py.PreNormBlock):
        def __init__(self, config):
            super().__init__(config, model_py.RMSNorm)
            self.gain = torch.nn.Parameter(torch.ones(self.d_k))

        def attend(self, q, k, v, scale, cache):
            return super().attend(q, k, v * self.gain, scale, cache)

    torch._dynamo.reset()
    block, h = Mine(GPTConfig(n_embd=32, n_head=2)).train(), randn(2, 9, 32).float()
    cos, sin = (x.float() for x in tables(9, 16))
    grads = []
    for run in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        with torch.autocast("cpu", torch.bfloat16):
            y = run(h, cos, sin)
        grads.append(torch.autograd.grad(y.cos().sum(), list(block.parameters())))
    for eager, compiled in zip(*grads):
        close(compiled, eager, 0.05)


@every_arch
@pytest.mark.parametrize("T, at_once, pieces", [(12, 12, [12]), (12, 5, [4, 4, 4]), (11, 5, [4, 4, 3]), (10, 4, 5 * [2])])
def test_loss_only_is_the_same_loss(arch, T, at_once, pieces, monkeypatch):
    """With and without the logits, all at once or in pieces, of one size where that can be; -1 is no target."""
    model = rough(build(arch, tie=arch == "rmsnorm"))
    idx, targets = IDX[:, :T], TARGETS.masked_fill(torch.arange(12) % 5 == 1, -1)[:, :T]
    logits, loss = model(idx, targets)
    want = torch.autograd.grad(loss, list(model.parameters()))
    monkeypatch.setattr(GPT, "logits_at_once", 2 * 17 * at_once)
    sizes, loss_sum = [], model.loss_sum
    monkeypatch.setattr(model, "loss_sum", lambda h, t: sizes.append(h.shape[1]) or loss_sum(h, t))
    none, again = model(idx, targets, loss_only=True)
    assert none is None and sizes == pieces
    close(again, loss, 1e-6)  # float32 losses
    for got, other in zip(torch.autograd.grad(again, list(model.parameters())), want):
        close(got, other, 1e-5)
    assert sorted(sizes) == (pieces if len(pieces) == 1 else sorted(2 * pieces))  # the backward makes them anew
    assert model(idx, targets)[0].shape == logits.shape


def test_gelu_compiles_to_the_same_function(monkeypatch):
    x = torch.linspace(-9, 9, 1001, dtype=torch.float64, requires_grad=True)
    want = 0.5 * array(x) * (1 + np.tanh(math.sqrt(2 / math.pi) * (array(x) + 0.044715 * array(x) ** 3)))
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
        close(model_py.gelu(x), want, 1e-12)
        close(torch.autograd.grad(model_py.gelu(x).sum(), x)[0], np.gradient(want, array(x)), 1e-4)


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
        window = window if window.shape[1] <= size else window[:, -(size // 2) :]
        token = model(window)[0][:, -1].argmax(-1)
        window = torch.cat([window, token[:, None]], 1)
        yield token


@pytest.mark.parametrize(
    "arch, pos, size",
    [(arch, pos, 12) for pos in ("rope", "learned", "sinusoidal") for arch in PRE_NORM + SPHERE]
    + [("angpt", "rope", 520)],
)
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
    assert got == [a[: at + 1] + [stop] * (11 - at), b]
    assert generate(model, PROMPT[:1], 12, temperature=0, stop=stop).tolist() == [a[: at + 1]]  # all stopped: the end


def test_samples_follow_the_softmax():
    n, model, prompt = 4000, rough(build("layernorm", vocab_size=6)), tokens(1, 5, vocab=6)
    logits = array(model(prompt)[0])[0, -1]
    order = np.argsort(-logits)

    def expected(temperature, keep=6):
        p = np.exp(logits / temperature)
        p[order[keep:]] = 0
        return p / p.sum()

    nucleus = expected(2.0)[order].cumsum()[1:3].mean()  # two tokens are too few, three are enough
    for options, want in (
        (dict(temperature=0.5), expected(0.5)),
        (dict(), expected(1.0)),
        (dict(temperature=2.0), expected(2.0)),
        (dict(temperature=2.0, top_k=3), expected(2.0, 3)),
        (dict(temperature=2.0, top_p=nucleus), expected(2.0, 3)),
    ):
        (drawn,) = model.generate(prompt.expand(n, 5), 1, generator=torch.Generator().manual_seed(7), **options)
        frequency = np.bincount(drawn.numpy(), minlength=6) / n
        assert np.abs(frequency - want).max() < 0.03 and (frequency > 0).sum() == (want > 0).sum()


@pytest.mark.parametrize("k", [1, 2, 3])
def test_of_equally_likely_tokens_no_more_than_top_k_are_kept(k):
    drawn = model_py.pick(torch.tensor([[0.0, 2.0, 2.0, 2.0]]).expand(500, 4), 1.0, k, None, None)
    assert len(drawn.unique()) == k and drawn.min() > 0


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


@pytest.mark.parametrize(
    "arch, printed",
    [
        ("rmsnorm", [32.05, 62.23, 127.03, 247.16, 505.73, 1073]),  # the paper prints 62.24 and 247.17
        ("ngpt", [32.11, 62.32, 127.16, 247.34, 506.00, 1073]),  # and 62.33
        ("angpt", [32.10, 62.28, 127.08, 247.21, 505.78, 1073]),
    ],
)
def test_parameters_of_angpt_table_f1(arch, printed):
    counts = [
        count(arch, vocab_size=50304, block_size=2048, n_embd=d, n_layer=n, n_head=h, qk_norm=True) for d, n, h in SIZES
    ]
    assert [round(n / 1e6, 2) for n in counts[:5]] + [round(counts[5] / 1e6)] == printed


@pytest.mark.parametrize("arch, printed", [("rmsnorm", [468.2, 1025.7]), ("ngpt", [468.4, 1026.1])])
def test_parameters_of_ngpt_table_2(arch, printed):
    counts = [count(arch, vocab_size=32000, block_size=4096, n_embd=d, n_layer=n, n_head=h) for d, n, h in SIZES[4:]]
    assert [n // 10**5 / 10 for n in counts] == printed  # truncated, not rounded


@pytest.mark.parametrize("bias, added", [(False, 46_224), (True, 92_304)])
def test_parameters_of_gpt2_and_what_normformer_adds(bias, added):
    gpt2 = dict(
        vocab_size=50257,
        block_size=1024,
        n_embd=768,
        n_layer=12,
        n_head=12,
        mlp="gelu",
        pos="learned",
        tie=True,
        bias=bias,
    )
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
@pytest.mark.parametrize(
    "options", [{}, dict(alpha_init=0.2, alpha_scale=0.5, s_z_init=3.0, s_z_scale=0.25)], ids=["papers", "options"]
)
def test_scales_start_as_configured(arch, options):
    model, papers = build(arch, **options), 0.25 if arch == "ngpt" else 0.01  # 0.25 = 1/sqrt(16)
    block = model.blocks[1]
    alpha = (options.get("alpha_init", 0.05), options.get("alpha_scale", papers))
    starts = [
        (block.alpha_a, 16, *alpha),
        (block.alpha_m, 16, *alpha),
        (model.s_z, 17, options.get("s_z_init", 1), options.get("s_z_scale", papers)),
    ]
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


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(arch="rmsnrom"), "rmsnrom rmsnorm"),
        (dict(arch="normforme"), "normforme normformer"),
        (dict(mlp="swigloo"), "swigloo swiglu"),
        (dict(pos="ropes"), "ropes rope"),
        (dict(n_embd=64, n_head=7), "7 64 8"),
        (dict(n_embd=64, n_head=40), "40 64 32"),
        (dict(rope_fraction=0.375), "rope_fraction 0.375 0.25"),
        (dict(rope_fraction=0.39), "rope_fraction 0.39 0.5"),
        (dict(rope_fraction=1.5), "rope_fraction 1.5 1"),
        (dict(dropout=-0.5), "dropout 0.5 0"),
        *[({key: bad}, f"{key} {abs(bad)} 1") for key in TINY for bad in (0, -3)],
    ],
)
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


@pytest.mark.parametrize(
    "arch, qk_norm", [(a, q) for a in PRE_NORM for q in (False, True)] + [(a, False) for a in SPHERE]
)
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
def test_gradients_pass_gradcheck(arch):
    """PowerNorm with its running statistics: in training its backward is not the derivative, and has its own test."""
    block = rough(build(arch)).blocks[0]
    assert torch.autograd.gradcheck(lambda h: block(h, *tables(4, 8)), randn(1, 4, 16).requires_grad_())


@every_arch
@pytest.mark.parametrize("mlp, bias, tie", [("swiglu", False, False), ("gelu", True, True)])
def test_folding_leaves_the_logits_and_empties_the_factors(arch, mlp, bias, tie):
    model = rough(build(arch, mlp=mlp, bias=bias, tie=tie, qk_norm=tie, pos="learned" if tie else "rope"))
    before = model(IDX, TARGETS)[0]
    plain = torch.stack(list(model.generate(IDX[:, :4], 6, temperature=0)))
    assert copy.deepcopy(model).train().fold_().training and not model.training
    close(model.fold_()(IDX, TARGETS)[0], before, 1e-12)
    assert torch.equal(torch.stack(list(model.generate(IDX[:, :4], 6, temperature=0))), plain)
    if arch in SPHERE:
        block = model.blocks[0]
        gone = block.constants()[3:] if arch == "ngpt" else [block.sqrt_d, block.nu_qkv, block.nu_p, block.nu_uz]
        assert all(isinstance(factor, model_py.One) for factor in [model.s_z(), *gone])
        with torch.no_grad():
            block._modules["alpha_a"].weight.mul_(2)
        close(model(IDX, TARGETS)[0], before, 1e-12)  # what depends on parameters alone was computed once
    else:
        if arch == "rmsnorm" or arch == "powernorm" and not bias:
            for norm in [model._modules["norm_f"], model.blocks[0]._modules["norm1"], model.blocks[0]._modules["norm2"]]:
                norm.weight = None  # gains are in the matrices
        close(model(IDX, TARGETS)[0], before, 1e-12)
        assert isinstance(model.blocks[0].g, model_py.One) == tie
    replaced = {name for name, layer in model.blocks[0].named_children() if vars(model.blocks[0]).get(name)}
    assert {"w_qkv", "w_o", "w_up", "w_down"} <= replaced


def unbounded_step(self, h, cos, sin, cache=None):
    """A learner's anGPT: no norm on the MLP's branch, so that nu_acf and nu_d, which folding drops, change something."""
    a, m, nu_a, nu_m = self.constants()
    qk, v = self.heads(self.nu_qkv * self.w_qkv(h))
    q, k = unit(rope(qk, cos, sin)).unbind(0)
    h = model_py.lerp(h, unit(self.nu_p * self.w_o(self.join(self.attend(q * self.g, k, v, 1.0, cache)))), a) * nu_a
    u, z = self.branches(self.nu_uz * self.w_up(h))
    return model_py.lerp(h, self.nu_d * self.w_down(self.nu_acf * (u * self.f(self.sqrt_d * z))), m) * nu_m


@pytest.mark.parametrize(
    "arch, changes",
    [
        ("angpt", {"forward": unbounded_step}),
        ("ngpt", {"constants": lambda self: (self.s_qk(),), "forward": lambda self, h, *_: h * self.constants()[0]}),
        ("rmsnorm", {"forward": lambda self, h, *_: h + self.norm1.weight.exp() * self.w_o(h)}),
    ],
)
def test_folding_leaves_a_changed_forward_alone(arch, changes, monkeypatch):
    for name, change in changes.items():
        monkeypatch.setattr(type(build(arch).blocks[0]), name, change)
    for model in (rough(build(arch)).train(), build(arch, alpha_init=0.002).train()):  # the second changes little
        logits, weights = model(IDX, TARGETS)[0], list(model.parameters())
        assert model.fold_() is model and model.training
        assert torch.equal(model(IDX, TARGETS)[0], logits)
        assert all(now is weight for now, weight in zip(model.parameters(), weights, strict=True))


@every_arch
def test_folding_leaves_a_model_with_hooks_alone(arch):
    for name in ("wte", "lm_head", "blocks.1", "blocks.0.w_o"):
        model, called = build(arch), []
        model.get_submodule(name).register_forward_hook(lambda *_: called.append(name))
        logits = model(IDX, TARGETS)[0]
        assert torch.equal(model.fold_()(IDX, TARGETS)[0], logits) and len(called) == 2


@every_arch
def test_folding_happens_in_float32_too(arch):
    """Rounding is not taken for a change, nor a change for rounding."""
    model = build(arch, n_layer=8, n_embd=64).float()
    logits = model(IDX, TARGETS)[0]
    close(model.fold_()(IDX, TARGETS)[0], logits, 1e-5)
    assert vars(model.blocks[7]).get("w_o")


def test_folding_leaves_a_block_of_ones_own_alone(monkeypatch):
    class Own(model_py.NGPTBlock):
        def __init__(self, config):
            super().__init__(config)
            self.more = torch.nn.ModuleList([torch.nn.Linear(self.d, self.d)])

        def forward(self, h, cos, sin, cache=None):
            u, z = model_py.scaled(torch.cat((self.s_v(), self.s_v())), self.w_up, h).chunk(2, -1)
            return unit(h + self.more[0](self.w_down(self.s_u() * u * z)) * self.w_o.weight.sum())

    def own(Norm):
        return type("OwnNorm", (Norm,), {"forward": lambda self, x: self.weight + x})

    class OwnLinear(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + x.mean(-1, keepdim=True)

    def lora(config):
        block = model_py.PreNormBlock(config, model_py.RMSNorm)
        block.w_up = OwnLinear(16, 128, bias=False)
        return block

    def wild(config):
        block = model_py.NormFormerBlock(config)
        block.norm_ffn, block.w_down = own(model_py.LayerNorm)(64, config), OwnLinear(64, 16, bias=False)
        return block

    def shared(config, kept=[]):
        kept.append(model_py.PreNormBlock(config, model_py.RMSNorm))
        return kept[0]

    def mixed(config, made=itertools.count()):
        return model_py.PreNormBlock(config, model_py.LayerNorm) if next(made) % 2 else model_py.NormFormerBlock(config)

    makers = {"own": Own, "lora": lora, "wild": wild, "shared": shared, "mixed": mixed}
    makers |= {f"own {Norm.__name__}": functools.partial(model_py.PreNormBlock, Norm=own(Norm))
               for Norm in (model_py.LayerNorm, model_py.RMSNorm, PowerNorm)}
    for arch, maker in makers.items():
        monkeypatch.setitem(ARCHS, arch, maker)
        model = rough(build(arch))
        before = model(IDX, TARGETS)[0]
        for _ in range(2):
            close(model.fold_()(IDX, TARGETS)[0], before, 1e-12)
    twice = rough(build("angpt"))
    before = twice(IDX, TARGETS)[0]
    close(twice.fold_().fold_()(IDX, TARGETS)[0], before, 1e-12)


@pytest.mark.parametrize("arch", ["normformer", "ngpt", "angpt"])
@pytest.mark.parametrize("sequences", [1, 8])
def test_linear_maps_with_hooks_or_of_ones_own_are_called(arch, sequences):
    """Though the matrix could be scaled in place of what goes in or comes out: with more tokens than channels."""
    maps = ["w_qkv", "w_o", "w_up", "w_down"]

    class Adapted(torch.nn.Linear):  # a low-rank addition, here of rank d
        def forward(self, x):
            return super().forward(x) + x @ self.more

    model = rough(build(arch))
    idx, targets = (x[:1].repeat(sequences, 1) for x in (IDX, TARGETS))
    assert (idx.numel() >= 4 * model.config.n_embd) == (sequences == 8)
    plain = model(idx, targets)[0]
    for kind in ("register_forward_hook", "register_forward_pre_hook"):
        for name in maps + ["norm_ffn"] * (arch == "normformer"):
            called = []
            hook = getattr(getattr(model.blocks[0], name), kind)(lambda *_: called.append(name))
            close(model(idx, targets)[0], plain, 1e-12)
            hook.remove()
            assert called == [name]
    for kind in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        for name in maps + ["norm_ffn"] * (arch == "normformer"):
            called = []
            hook = getattr(getattr(model.blocks[0], name), kind)(lambda *_: called.append(name))
            model(idx, targets)[1].backward()
            hook.remove()
            assert called == [name]
    for name in maps + ["norm_ffn"] * (arch == "normformer"):
        module, called = getattr(model.blocks[0], name), []
        module.forward = lambda x, usual=module.forward: called.append(name) or usual(x)
        close(model(idx, targets)[0], plain, 1e-12)
        del module.forward
        assert called == [name]
    for name in maps:
        linear = getattr(model.blocks[1], name)
        linear.__class__, linear.more = Adapted, torch.nn.Parameter(torch.zeros_like(linear.weight.T))
    logits, loss = model(idx, targets)
    close(logits, plain, 1e-12)
    more = [getattr(model.blocks[1], name).more for name in maps]
    assert all(g.abs().max() > 0 for g in torch.autograd.grad(loss, more))


@pytest.mark.parametrize("factor", [2.0, 2, torch.tensor(2.0)], ids=["float", "int", "0-dim"])
@pytest.mark.parametrize("tokens", [3, 40])
def test_scaled_takes_a_number(factor, tokens):
    linear, x = torch.nn.Linear(8, 5).double(), randn(2, tokens, 8, seed=4)
    close(model_py.scaled(factor, linear, x), 2 * linear(x), 1e-12)


@pytest.mark.parametrize("tokens", [3, 40])
def test_scaled_is_a_factor_for_each_output(tokens):
    linear, s, x = torch.nn.Linear(8, 5).double(), randn(5).requires_grad_(), randn(2, tokens, 8, seed=4)
    out = model_py.scaled(s, linear, x)
    want = array(s) * (array(x) @ array(linear.weight).T + array(linear.bias))
    close(out, want, 1e-12)
    close(torch.autograd.grad(out.sum(), s)[0], (want / array(s)).sum((0, 1)), 1e-10)


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_after_norm_is_the_linear_map_of_the_norm(tokens, bias):
    norm, linear = rough(model_py.LayerNorm(8, GPTConfig(bias=bias)).double()), torch.nn.Linear(8, 5, bias=bias).double()
    x, factors = randn(2, tokens, 8, seed=4).requires_grad_(), randn(2, tokens, 5, seed=5)
    tensors = [x, *norm.parameters(), *linear.parameters()]
    out, want = model_py.after_norm(linear, norm, x), linear(norm(x))
    close(out, want, 1e-12)
    for got, expected in zip(torch.autograd.grad((factors * out).sum(), tensors),
                             torch.autograd.grad((factors * want).sum(), tensors)):
        close(got, expected, 1e-10)
    own_norm = type("OwnNorm", (model_py.LayerNorm,), {"forward": lambda self, x: x + 1})(8, GPTConfig()).double()
    close(model_py.after_norm(linear, own_norm, x), linear(x + 1), 1e-14)
    own_linear = type("OwnLinear", (torch.nn.Linear,), {"forward": lambda self, x: x + 1})(8, 5).double()
    close(model_py.after_norm(own_linear, norm, x), norm(x) + 1, 1e-14)
    half = model_py.after_norm(linear.bfloat16(), norm.bfloat16(), x.bfloat16())
    assert half.dtype == torch.bfloat16 and (half - want).abs().max() < 0.1 * want.abs().max()


def test_after_norm_under_autocast_keeps_its_statistics_in_float32():
    """Rounded to bfloat16 the standard deviation would be off by 2e-3, in the backward alone."""
    norm, linear, x = model_py.LayerNorm(64, GPTConfig()), torch.nn.Linear(64, 5), (3 * randn(1, 800, 64)).bfloat16()
    factors = randn(1, 800, 5, seed=4).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        out = model_py.after_norm(linear, norm, x.requires_grad_())
    got = torch.autograd.grad((factors * out).sum(), x)[0].double()
    y = x.detach().double().requires_grad_()
    want = torch.autograd.grad((factors * linear.double()(norm.double()(y))).sum(), y)[0]
    ratio = (got * want).sum(-1) / (want * want).sum(-1)  # of each token, in which roundings of single entries cancel
    assert (ratio - 1).square().mean().sqrt() < 1e-3


def test_variants_of_ngpt_differ_in_their_one_step(monkeypatch):
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
    plain, x = build("powernorm_plain").blocks[0].norm1, randn(2, 5, 16)
    close(plain(x), array(x) / math.sqrt(1 + 1e-5), 1e-12)


@pytest.mark.parametrize("arch, like", [("ngpt_slerp", "ngpt"), ("ngpt_bounded", "ngpt"), ("mine", "rmsnorm"), ("ours", "angpt")])
def test_an_arch_without_a_recipe_trains_like_its_family(arch, like, monkeypatch):
    monkeypatch.setitem(ARCHS, "mine", functools.partial(model_py.PreNormBlock, Norm=model_py.RMSNorm))
    monkeypatch.setitem(ARCHS, "ours", type("Ours", (model_py.ANGPTBlock,), {}))
    mine, family = resolve(TrainConfig(arch=arch)), resolve(TrainConfig(arch=like))
    for name in ("learning_rate", "weight_decay", "warmup_ratio"):
        assert getattr(mine, name) == getattr(family, name)


@torch.no_grad()
@every_arch
@pytest.mark.parametrize("kernel", ["plain", "sdpa", "sdpa-math"])
def test_several_tokens_can_follow_a_filled_cache(arch, kernel, monkeypatch):
    monkeypatch.setattr(model_py, "attention_kernel", lambda *_: kernel)
    model = rough(build(arch))
    caches = [Cache(2, model.config, model.wte.weight) for _ in model.blocks]
    for part in IDX.split([5, 1, 6], dim=1):
        last, _ = model(part, caches=caches)
    close(last[:, 0], model(IDX)[0][:, 0])


def ops_of_attention():
    class Ops(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(func.overloadpacket.__name__)
            return func(*args, **kwargs or {})

    seen, q, k, v = set(), *randn(3, 2, 2, 6, 8).unbind(0)
    scores = 0.3 * q @ k.transpose(-2, -1) + torch.full((6, 6), -math.inf).triu(1)
    with Ops():
        out = attend(q, k, v, 0.3)
    close(out, scores.softmax(-1) @ v)
    return seen


FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def test_the_kernel_of_attention_can_be_chosen():
    for name, takes in {"plain": False, "sdpa": True, "sdpa-flash": True, "sdpa-math": False, "auto": False}.items():
        with trainer.attention(name):
            seen = ops_of_attention()
            assert (FLASH in seen) == takes and ("triu" in seen) == (name in ("plain", "auto"))
            assert ("_safe_softmax" in seen) == (name == "sdpa-math")
        assert model_py.ATTENTION == "auto"
    with trainer.attention("sdpa-math"):
        with trainer.attention("plain"):
            assert "triu" in ops_of_attention()
        assert "_safe_softmax" in ops_of_attention()
    torch.backends.cuda.enable_math_sdp(False)  # somebody's own choice comes back afterwards
    try:
        with pytest.raises(KeyError), trainer.attention("sdpa-math"):
            assert torch.backends.cuda.math_sdp_enabled() and not torch.backends.cuda.flash_sdp_enabled()
            raise KeyError
        assert not torch.backends.cuda.math_sdp_enabled() and torch.backends.cuda.flash_sdp_enabled()
    finally:
        torch.backends.cuda.enable_math_sdp(True)
    with pytest.raises(ConfigError, match="did you mean sdpa-math"):
        TrainConfig(attention="sdpa-mth")


@pytest.mark.parametrize("name", ["flash_attn", "sdpa-cudnn", "sdpa-efficient", "sdpa-flash"])
def test_a_kernel_of_attention_that_cannot_train_the_model_is_an_error(name, train_run):
    """On CPUs sdpa-flash can, but for dropout."""
    with pytest.raises(ConfigError, match=f"attention={name} does not .* cpu in float32: expected one of auto, plain, sdpa"):
        train_run(attention=name, dropout=0.1)
    assert model_py.ATTENTION == "auto" and torch.backends.cuda.math_sdp_enabled()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch's compiler
def test_compiled_code_is_that_of_the_chosen_back_end(tmp_path, monkeypatch):
    """Traced, all of sdpa's back ends look alike, so that the cache of another one's code has to be told apart."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    q = randn(1, 2, 6, 8).float()
    for name, takes in [("sdpa-flash", True), ("sdpa-math", False), ("sdpa-flash", True)]:
        torch.compiler.reset()
        with trainer.attention(name), torch.profiler.profile() as profile:
            torch.compile(lambda q: attend(q, q, q, 0.3) + 1)(q)
        assert any(FLASH in event.key for event in profile.key_averages()) == takes, name


def test_a_run_takes_its_kernel_of_attention_and_gives_it_back(train_run, monkeypatch):
    before, used = trainer.optimizer_step, []
    monkeypatch.setattr(trainer, "optimizer_step", lambda *a: used.append(model_py.ATTENTION) or before(*a))
    logs = [train_run(name, attention=name, max_steps=2)[0] for name in ("plain", "sdpa-math")]
    assert used == ["plain", "plain", "sdpa-math", "sdpa-math"] and model_py.ATTENTION == "auto"
    assert logs[0][0]["config"]["attention"] == "plain"
    assert logs[0][-1]["loss"] == pytest.approx(logs[1][-1]["loss"], rel=1e-5)
    train_run("plain", attention="sdpa", max_steps=2, resume="true")  # another kernel may go on


@pytest.mark.parametrize(
    "arch", ["ngpt_no_qk_norm", "ngpt_slerp", "ngpt_scalar", "ngpt_riemann", "ngpt_corrected", "ngpt_bounded"]
)
def test_variants_learn(arch):
    test_one_batch_is_learnt_by_heart(arch)


@torch.no_grad()
def test_generation_in_a_window_of_one_token():
    model, token = rough(build("rmsnorm", block_size=1)), IDX[:, :1]
    for new in model.generate(token, 5, temperature=0):
        assert torch.equal(new, model(token)[0][:, 0].argmax(-1))
        token = new[:, None]


def test_the_seventh_arch_of_the_readme_runs(tmp_path, capsys):
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", readme, re.S) if "ARCHS[" in block)
    assert len(code[code.index("class ") :].strip().splitlines()) <= 10
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be\n" * 100)
    prep.prepare(str(text), name="tiny", data_dir=str(tmp_path))
    small = (
        f'data="{tmp_path}/tiny", out_dir="{tmp_path}/out", max_steps=2, n_layer=1, n_embd=16, n_head=2, '
        'block_size=16, dtype="float32", compile="false"'
    )
    try:
        exec(code.replace("max_steps=200", small).replace("out/scalenorm", f"{tmp_path}/out"), {})
    finally:
        ARCHS.pop("scalenorm", None)
    assert capsys.readouterr().out.split("bits/byte")[-1].strip()  # text
    assert '"step": 2' in (tmp_path / "out" / "log.jsonl").read_text()


# prepare.py ==========================================================================================================

PREP = [sys.executable, prep.__file__]
PREP_TEXT = b"def f():\n    return 'h\xc3\xa9'\n" + bytes(range(256)) + b"<|endoftext|>\r\n"


def prep_tiny(name="gpt2"):
    """A small BPE of our own under a known name: all bytes and a few merges."""
    words = [bytes([i]) for i in range(256)] + [b"th", b"the", b"in", b"an", b" t", b" the"]
    ranks = {word: i for i, word in enumerate(words)}
    return tiktoken.Encoding(
        name, pat_str=r"\s?\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)}
    )


@pytest.fixture
def prep_gpt2(monkeypatch):
    tiny = prep_tiny()
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: tiny)
    prep.get_tokenizer.cache_clear()
    yield tiny
    prep.get_tokenizer.cache_clear()


def prep_documents(n, seed=0):
    rng = random.Random(seed)
    return [
        "".join(rng.choice(["the ", "in an ", "thé\n", "x", "<|endoftext|>"]) for _ in range(rng.randint(1, 60)))
        for _ in range(n)
    ]


def prep_jsonl(path, documents):
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(documents)))
    return path


def prep_parquet(path, documents):
    n = len(documents)
    columns = {name: ["x"] * n for name in "id dump url date file_path language".split()}
    pq.write_table(
        pa.table({"text": documents, **columns, "language_score": [0.9] * n, "token_count": [7] * n}),
        path,
        row_group_size=100,
    )
    return path


def prep_read(folder):
    """split -> its documents, decoded."""
    meta, found = prep.read_meta(folder), {}
    tokenizer = prep.get_tokenizer(meta["tokenizer"])
    for split in ("val", "train"):
        tokens = np.concatenate([prep.read_shard(p) for p in sorted(Path(folder).glob(f"*_{split}_*.bin"))])
        starts = np.flatnonzero(tokens == tokenizer.eot_token)
        assert starts[0] == 0 and len(tokens) == meta[f"{split}_tokens"]
        found[split] = [tokenizer.decode_bytes(part[1:].tolist()) for part in np.split(tokens, starts[1:])]
        assert sum(map(len, found[split])) == meta[f"{split}_bytes"]
    return found


def prep_hashes(folder):
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in Path(folder).glob("*")
        if p.suffix in (".bin", ".json")
    }


def prep_run(*options):
    done = subprocess.run([*PREP, *map(str, options)], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_prepare_byte_tokenizer_is_exact():
    tokenizer = prep.get_tokenizer("bytes")
    assert isinstance(tokenizer, tiktoken.Encoding) and tokenizer.n_vocab == 257 and tokenizer.eot_token == 256
    for data in (b"", PREP_TEXT, np.random.default_rng(0).bytes(100_000)):
        tokens = prep.encode(tokenizer, data)
        assert tokens.dtype == np.uint16 and tokens[0] == 256 and tokenizer.decode_bytes(tokens[1:].tolist()) == data
    text = "<|endoftext|> añ日\n" * 300_000
    start = time.time()
    assert bytes(tokenizer.encode_ordinary(text)) == text.encode() and time.time() - start < 5


def test_prepare_bpe(prep_gpt2):
    tokenizer = prep.get_tokenizer("gpt2")
    text = "the <|endoftext|> in an é\n"
    tokens = prep.encode(tokenizer, text.encode()).tolist()
    assert tokens == [tokenizer.eot_token, *tokenizer.encode_ordinary(text)] and tokens.count(tokenizer.eot_token) == 1
    assert tokenizer.decode_bytes(prep.encode(tokenizer, b"a\xffb")[1:].tolist()) == "a\ufffdb".encode()
    spaces = b" " * 3_000_000 + b"x"  # more than tiktoken can take at once
    assert tokenizer.decode_bytes(prep.encode(tokenizer, spaces)[1:].tolist()) == spaces


def test_prepare_tokenizer_errors(monkeypatch):
    prep.get_tokenizer.cache_clear()
    with pytest.raises(prep.DataError, match="gpt3 is unknown, the nearest is gpt2"):
        prep.get_tokenizer("gpt3")

    def offline(name):
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(prep.DataError, match="TIKTOKEN_CACHE_DIR.*no network"):
        prep.get_tokenizer("gpt2")
    many = tiktoken.Encoding(
        "o",
        pat_str=".",
        mergeable_ranks={i.to_bytes(3, "big"): i for i in range(65536)},
        special_tokens={"<|endoftext|>": 65536},
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: many)
    with pytest.raises(prep.DataError, match="65537.*65536"):
        prep.get_tokenizer("cl100k_base")


def test_prepare_shard_round_trip_and_damage(tmp_path):
    path = tmp_path / "a.bin"
    tokens = np.random.default_rng(0).integers(0, 65536, 1000).astype(np.uint16)
    prep.write_shard(path, tokens)
    assert np.array_equal(prep.read_shard(path), tokens) and path.stat().st_size == 1024 + 2000
    assert np.fromfile(path, "<i4", 256).tolist() == [20240520, 1, 1000] + [0] * 253
    whole = path.read_bytes()

    def header(i, value):
        return whole[: 4 * i] + np.int32(value).tobytes() + whole[4 * i + 4 :]

    for damaged, message in [
        (whole[:-1], "3023 bytes, expected 3024"),
        (whole + b"xx", "3026"),
        (b"", "0 bytes"),
        (whole[:500], "500 bytes"),
        (header(0, 7), "magic number 7, expected 20240520"),
        (header(1, 2), "version 2, expected 1"),
        (header(2, 0), "0 tokens"),
        (whole[:1024], "token"),
    ]:
        path.write_bytes(damaged)
        with pytest.raises(prep.DataError, match=message) as error:
            prep.read_shard(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(prep.DataError, match="none.bin: no such file"):
        prep.read_shard(tmp_path / "none.bin")


def test_prepare_default_corpus(tmp_path):
    folder = prep.prepare(data_dir=str(tmp_path))
    meta, found = prep.read_meta(folder), prep_read(folder)
    assert folder == tmp_path / "stdlib" and meta["tokenizer"] == "bytes" and meta["vocab_size"] == 257
    assert not set(found["val"]) & set(found["train"]) and b"" not in found["val"] + found["train"]
    assert (
        len(set(found["train"])) == len(found["train"])
        and Path(os.__file__).read_bytes() in found["val"] + found["train"]
    )
    assert 0.04 < meta["val_bytes"] / (meta["val_bytes"] + meta["train_bytes"]) < 0.08
    assert prep.prepare(data_dir=str(tmp_path)) == folder  # complete already
    with pytest.raises(prep.DataError, match="seed=1337, now seed=0"):
        prep.prepare(data_dir=str(tmp_path), seed=0)


def test_prepare_local_sources(tmp_path, prep_gpt2):
    texts = prep_documents(300)
    prep_jsonl(tmp_path / "a.jsonl", texts)
    prep_parquet(tmp_path / "a.parquet", texts)
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "notes.md").write_text("passed over")
    (tmp_path / "many" / "empty.txt").write_text("")
    for i, text in enumerate(texts[:40]):
        (tmp_path / "many" / f"{i}.TXT").write_text(text, newline="")
    for source, expected in [
        ("a.jsonl", texts),
        ("a.parquet", texts),
        ("many", texts[:40]),
        ("many/1*.TXT", [texts[1], *texts[10:20]]),
    ]:
        for tokenizer in ("bytes", "gpt2"):
            found = prep_read(
                prep.prepare(str(tmp_path / source), data_dir=str(tmp_path / "data"), tokenizer=tokenizer, force=True)
            )
            assert sorted(found["val"] + found["train"]) == sorted(text.encode() for text in expected)
            assert found["val"] and found["train"]


def test_prepare_names_a_glob_by_its_folder(tmp_path):
    (tmp_path / "my books").mkdir()
    for i in range(3):
        (tmp_path / "my books" / f"{i}.txt").write_text(f"book {i}")
    assert prep.prepare(str(tmp_path / "my books" / "*.txt"), data_dir=str(tmp_path)) == tmp_path / "my-books"


def test_prepare_single_text_holds_out_its_end(tmp_path):
    lines = b"".join(b"line %d\n" % i for i in range(200_000))
    (tmp_path / "one.txt").write_bytes(lines)
    found = prep_read(prep.prepare(str(tmp_path / "one.txt"), data_dir=str(tmp_path)))
    (val,), (train,) = found["val"], found["train"]  # no end-of-text where it was read in pieces
    assert train + val == lines and train.endswith(b"\n") and 0.05 <= len(val) / len(lines) < 0.051


def test_prepare_holds_out_what_was_asked_for_of_a_single_text(tmp_path, prep_gpt2):
    lines = "".join(f"line {i} in thé inn\n" for i in range(40_000)).encode()
    (tmp_path / "one.txt").write_bytes(lines)
    for tokenizer, wanted in itertools.product(("bytes", "gpt2"), (1, 20_000, 10**7)):
        options = dict(name=f"{tokenizer}{wanted}", tokenizer=tokenizer, val_tokens=wanted, data_dir=str(tmp_path))
        folder = prep.prepare(str(tmp_path / "one.txt"), **options)
        (val,), (train,) = prep_read(folder).values()
        assert train + val == lines and train.endswith(b"\n")
        if tokenizer == "bytes":
            assert len(val) - 30 <= min(wanted, len(lines) // 2) <= len(val)
        elif wanted == 20_000:  # about, since nobody knows the bytes of a token beforehand
            assert wanted / 2 < prep.read_meta(folder)["val_tokens"] < 4 * wanted
    for name, text in {"early": b"Title\n" + b"x" * 500_000, "none": b"x" + "字仮名é".encode() * 70_000}.items():
        (tmp_path / f"{name}.txt").write_bytes(text)
        for tokenizer in ("bytes", "gpt2"):
            folder = prep.prepare(str(tmp_path / f"{name}.txt"), data_dir=str(tmp_path), tokenizer=tokenizer, force=True)
            (val,), (train,) = prep_read(folder).values()  # nor is a character cut, which gpt2 would show as U+FFFD
            assert train + val == text and 0.05 <= len(val) / len(text) < 0.0501


def test_prepare_cuts_a_text_without_lines(tmp_path):
    text = b"one two three " * 150_000
    (tmp_path / "one.txt").write_bytes(text)
    folder = prep.prepare(str(tmp_path / "one.txt"), data_dir=str(tmp_path), tokens=1000, shard_tokens=5000)
    assert prep.read_meta(folder)["train_tokens"] <= 2 * prep.PIECE + 1 < len(text) / 2


def test_prepare_holds_out_a_share_of_the_text_not_of_the_file(tmp_path):
    texts = [f"{i} is a number, and {i + 1} the next one.\n" * 5 for i in range(1000)]
    rows = [json.dumps({"text": text, "meta": "x" * 1000}) for text in texts]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    pq.write_table(pa.table({"text": texts, "blob": [random.Random(i).randbytes(2000) for i in range(1000)]}), tmp_path / "blob.parquet")
    pq.write_table(pa.table({"text": ["the same\n" * 20] * 2000}), tmp_path / "same.parquet")
    for name in ("rows.jsonl", "blob.parquet", "same.parquet"):
        meta = prep.read_meta(prep.prepare(str(tmp_path / name), data_dir=str(tmp_path)))
        assert 0.05 <= meta["val_bytes"] / (meta["val_bytes"] + meta["train_bytes"]) < 0.052


def test_prepare_reads_a_file_once(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    for i in range(20):
        (tmp_path / "a" / "b" / f"{i}.txt").write_text(f"text {i}")
    found = prep_read(prep.prepare(str(tmp_path / "**" / "**" / "*.txt"), name="all", data_dir=str(tmp_path)))
    assert sorted(found["val"] + found["train"]) == sorted(b"text %d" % i for i in range(20))


@pytest.mark.parametrize("name", ["wiki_train", "my_val", "a_val_000000", "train_val"])
def test_a_corpus_may_have_any_name(tmp_path, name):
    (tmp_path / f"{name}.txt").write_text("".join(f"line {i}\n" for i in range(2000)))
    folder = prep.prepare(str(tmp_path / f"{name}.txt"), data_dir=str(tmp_path))
    meta = prep.read_meta(folder)
    for split in ("train", "val"):
        (path,) = trainer.Tokens(folder, split, 16, 257).paths
        assert len(prep.read_shard(path)) == meta[f"{split}_tokens"]


def test_shards_of_others_need_no_meta(tmp_path, prep_gpt2, monkeypatch):
    monkeypatch.setattr(prep_gpt2.__class__, "n_vocab", 50257)
    monkeypatch.setattr(trainer, "bytes_per_token", lambda _: np.ones(50257, dtype=np.int64))
    folder = tmp_path / "theirs"
    folder.mkdir()
    for name in ("fineweb_val_000000.bin", "fineweb_train_000001.bin"):
        prep.write_shard(folder / name, np.random.default_rng(0).integers(50257, size=2000))
    options = {**TRAIN_TINY, "data": str(folder), "out_dir": str(tmp_path / "out"), "max_steps": 2}
    assert train(TrainConfig(**options), say=None)[-1]["step"] == 2
    (folder / ".lock").touch()  # prepare.py was at work here, and has not ended
    with pytest.raises(DataError, match="meta.json: no such file"):
        train(TrainConfig(**options), say=None)


def test_prepare_fineweb(tmp_path, monkeypatch, prep_gpt2):
    datasets = pytest.importorskip("datasets")
    texts = prep_documents(500)
    path, load = prep_parquet(tmp_path / "fw.parquet", texts), datasets.load_dataset

    def local(repo, name, split, streaming):
        assert (repo, name, split, streaming) == ("HuggingFaceFW/fineweb", "sample-10BT", "train", True)
        return load(
            "parquet", data_files=str(path), split=split, streaming=streaming, cache_dir=str(tmp_path / "cache")
        )

    monkeypatch.setattr(datasets, "load_dataset", local)
    folder = prep.prepare("fineweb", data_dir=str(tmp_path), val_tokens=500, shard_tokens=1000)
    found = prep_read(folder)
    assert [text.decode() for text in found["val"] + found["train"]] == texts
    assert prep.read_meta(folder)["tokenizer"] == "gpt2" and len(list(folder.glob("*_train_*.bin"))) > 5
    early = prep.prepare("fineweb", name="early", data_dir=str(tmp_path), val_tokens=500, tokens=2000)
    assert 2000 <= prep.read_meta(early)["train_tokens"] < 2100
    # interrupted after some shards: the rest comes from the stream's skip()
    writer, closed = prep.Writer.close, []

    def failing(self):
        writer(self)
        closed.append(1)
        if len(closed) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(prep.Writer, "close", failing)
    with pytest.raises(KeyboardInterrupt):
        prep.prepare("fineweb", data_dir=str(tmp_path / "b"), val_tokens=500, shard_tokens=1000)
    with pytest.raises(prep.DataError, match="shard_tokens=1000, now shard_tokens=999"):
        prep.prepare("fineweb", data_dir=str(tmp_path / "b"), val_tokens=500, shard_tokens=999)
    assert prep_hashes(
        prep.prepare("fineweb", data_dir=str(tmp_path / "b"), val_tokens=500, shard_tokens=1000)
    ) == prep_hashes(folder)

    def offline(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(prep.DataError, match="fineweb: download failed.*no network"):
        prep.prepare("fineweb", name="c", data_dir=str(tmp_path))


def test_prepare_pretokenized(tmp_path, monkeypatch, prep_gpt2):
    hub, asked = pytest.importorskip("huggingface_hub"), []

    def fetch(repo, filename, repo_type, local_dir):
        assert repo == "kjj0/fineweb10B-gpt2" and repo_type == "dataset"
        asked.append(filename)
        prep.write_shard(Path(local_dir, filename), prep.encode(prep_gpt2, b"the inn " * 50))
        return str(Path(local_dir, filename))

    monkeypatch.setattr(hub, "hf_hub_download", fetch)
    folder = prep.prepare("fineweb10B-gpt2", data_dir=str(tmp_path), tokens=150_000_000)
    assert asked == ["fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"]
    meta = prep.read_meta(folder)
    assert (
        prep_read(folder)["train"] == [b"the inn " * 50] * 2 and meta["shards"][0] == "fineweb10B-gpt2_train_000001.bin"
    )
    (folder / "meta.json").unlink()  # as if stopped before the end: nothing is fetched twice
    with pytest.raises(prep.DataError, match="made with tokens=150000000, now tokens=100000000"):
        prep.prepare("fineweb10B-gpt2", data_dir=str(tmp_path), tokens=100_000_000)
    prep.prepare("fineweb10B-gpt2", data_dir=str(tmp_path), tokens=150_000_000)
    assert len(asked) == 3 and prep.read_meta(folder) == meta
    prep.write_shard(folder / "fineweb10B-gpt2_train_000002.bin", [prep_gpt2.eot_token + 1])
    with pytest.raises(prep.DataError, match="train_000002.bin: token"):
        (folder / "meta.json").unlink()
        prep.prepare("fineweb10B-gpt2", data_dir=str(tmp_path), tokens=150_000_000)

    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(hub, "hf_hub_download", offline)
    with pytest.raises(prep.DataError, match="download failed.*no network"):
        prep.prepare("fineweb10B-gpt2", data_dir=str(tmp_path), name="other")


def test_prepare_does_not_depend_on_workers(tmp_path, prep_gpt2):
    source = str(prep_jsonl(tmp_path / "a.jsonl", prep_documents(2000)))
    one, four = (
        prep.prepare(source, data_dir=str(tmp_path / str(n)), tokenizer="gpt2", workers=n, shard_tokens=5000)
        for n in (1, 4)
    )
    assert prep_hashes(one) == prep_hashes(four) and len(prep_hashes(one)) > 10


def test_prepare_survives_kills(tmp_path):
    source = prep_jsonl(tmp_path / "a.jsonl", prep_documents(5_000))
    options = [f"--source={source}", "--shard_tokens=3000", "--workers=2"]
    assert prep_run(*options, f"--data_dir={tmp_path / 'whole'}")[0] == 0
    folder, kills, rng = tmp_path / "cut" / "a", 0, random.Random(0)
    for _ in range(100):
        before = len(list(folder.glob("*.bin")))
        process = subprocess.Popen(
            [*PREP, *options, f"--data_dir={tmp_path / 'cut'}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None and len(list(folder.glob("*.bin"))) < before + 12:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.02))
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    assert process.returncode == 0 and kills
    assert prep_hashes(tmp_path / "cut" / "a") == prep_hashes(tmp_path / "whole" / "a")


def test_prepare_refuses_a_second_instance(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / "stdlib").mkdir()
    with open(tmp_path / "stdlib" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, out, err = prep_run(f"--data_dir={tmp_path}")
    assert code == 2 and "another prepare.py" in err and err.count("\n") == 1
    assert prep_run(f"--data_dir={tmp_path}")[0] == 0


def test_prepare_meta(tmp_path):
    with pytest.raises(prep.DataError, match="meta.json: no such file"):
        prep.read_meta(tmp_path)
    good = json.loads((prep.prepare(data_dir=str(tmp_path)) / "meta.json").read_text())
    for damaged in (
        "{",
        "[1]",
        json.dumps({**good, "val_bytes": "5"}),
        json.dumps({**good, "complete": False}),
        json.dumps({**good, "vocab_size": True}),
        json.dumps({k: good[k] for k in good if k != "versions"}),
    ):
        (tmp_path / "meta.json").write_text(damaged)
        with pytest.raises(prep.DataError, match="meta.json"):
            prep.read_meta(tmp_path)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.csv", b"x", "ends in '.csv'"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "line 2: not JSON"),
        ("a.jsonl", b'{"txt": "a"}\n', "line 1: expected a field `text`"),
        ("a.jsonl", b'{"text": 5}\n', "line 1: `text` is int"),
        ("a.jsonl", b'{"text": "only one"}\n', "expected some to train on"),
        ("a.parquet", b"PAR1 no", "not readable as parquet"),
        ("a.txt", b"", "no text found"),
    ],
)
def test_prepare_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(prep.DataError, match=message) as error:
        prep.prepare(str(tmp_path / name), data_dir=str(tmp_path / "data"))
    assert "\n" not in str(error.value) and name in str(error.value)


def test_prepare_bad_columns(tmp_path):
    pq.write_table(pa.table({"body": ["a", "b"]}), tmp_path / "a.parquet")
    with pytest.raises(prep.DataError, match="columns body, expected a column `text`"):
        prep.prepare(str(tmp_path / "a.parquet"), data_dir=str(tmp_path))
    pq.write_table(pa.table({"text": ["a", None]}), tmp_path / "b.parquet")
    with pytest.raises(prep.DataError, match="`text` is NoneType"):
        prep.prepare(str(tmp_path / "b.parquet"), data_dir=str(tmp_path))


def test_prepare_command_errors(tmp_path):
    for option, message in [
        ("--tokenizr=bytes", "the nearest is --tokenizer"),
        ("--tokens=many", "many"),
        ("--tokens=0", "at least 1"),
        ("--source=finweb", "the nearest is fineweb"),
        ("--tokenizer=byte", "the nearest is bytes"),
        ("fineweb", "--source=fineweb"),
        ("--name=../x", "expected letters"),
    ]:
        code, out, err = prep_run(option, f"--data_dir={tmp_path}")
        assert code == 2 and message in err and err.count("\n") == 1 and not out, err
    assert not list(tmp_path.iterdir())
    assert prep_run("--help")[0] == 0


def test_prepare_force_and_unknown_shards(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n' * 50)
    (tmp_path / "a").mkdir()
    prep.write_shard(tmp_path / "a" / "a_train_000009.bin", [1, 2])
    with pytest.raises(prep.DataError, match="unknown origin"):
        prep.prepare(str(tmp_path / "a.jsonl"), data_dir=str(tmp_path))
    folder = prep.prepare(str(tmp_path / "a.jsonl"), data_dir=str(tmp_path), force=True)
    assert [path.name for path in sorted(folder.glob("*.bin"))] == ["a_train_000001.bin", "a_val_000000.bin"]


# train.py and sample.py ==============================================================================================

TRAIN_ARCHS = PRE_NORM + SPHERE
TRAIN_HOME = Path(trainer.__file__).parent
TRAIN_TINY = dict(
    n_embd=32,
    n_layer=2,
    n_head=2,
    block_size=32,
    batch_size=4,
    total_batch_size=128,
    max_steps=20,
    eval_interval=10,
    eval_tokens=2000,
    log_interval=2,
    device="cpu",
    dtype="float32",
    compile="false",
)
# Adam's step is g / (|g| + eps): with this eps a smooth function of the gradient, and one of its size
TRAIN_SMOOTH = dict(eps=0.03, max_steps=5, log_interval=1, eval_interval=2, weight_decay=0.1, warmup_ratio=0.4)
train_every_arch = pytest.mark.parametrize("arch", TRAIN_ARCHS)


@pytest.fixture(autouse=True)
def train_quick(monkeypatch):
    """Neither a benchmark of matrix products nor a plot in every run; those of the command itself have both."""
    monkeypatch.setattr(trainer, "matmul_flops", lambda *_: 1e11)
    monkeypatch.setattr(trainer, "draw", lambda *_: None)


@pytest.fixture(scope="session")
def train_corpus(tmp_path_factory):
    """Sums, in several shards."""
    folder, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    lines = ["".join(f"{a}+{b}={a + b}é\n" for a, b in rng.integers(0, 20, (8, 2))) for _ in range(250)]
    (folder / "sums.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return str(prep.prepare(str(folder / "sums.jsonl"), data_dir=str(folder), val_tokens=2500, shard_tokens=3000))


def train_stream(folder, split):
    return np.concatenate([prep.read_shard(path) for path in sorted(Path(folder).glob(f"*_{split}_*.bin"))]).astype(int)


@pytest.fixture
def train_run(tmp_path, train_corpus):
    """Runs train() in a folder of that name -> (log, checkpoint)."""

    def run(name="run", **options):
        options = {**TRAIN_TINY, "data": train_corpus, "out_dir": str(tmp_path / name), **options}
        log = trainer.train(TrainConfig(**options), say=None)
        return log, torch.load(tmp_path / name / "ckpt.pt", weights_only=True)

    return run


@pytest.fixture
def train_at(monkeypatch):
    """train_at(step, action): once that many steps are done, calls action(model); after every step for None."""
    original = trainer.optimizer_step

    def at(step, action):
        def optimizer_step(number, forward, model, *rest):
            result = original(number, forward, model, *rest)
            if step in (None, number + 1):
                action(model)
            return result

        monkeypatch.setattr(trainer, "optimizer_step", optimizer_step)

    return at


def train_terminate(_):
    signal.raise_signal(signal.SIGTERM)


@pytest.fixture
def train_command(monkeypatch, capsys):
    """Runs a script as __main__ with these words -> (exit code, stdout, stderr)."""

    def command(script, *words):
        monkeypatch.setattr(sys, "argv", [script, *map(str, words)])
        try:
            runpy.run_path(str(TRAIN_HOME / script), run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return command


def train_words(options):
    return [f"--{key}={value}" for key, value in options.items()]


def train_leaves(tree, path=""):
    """A nest of dicts and lists as {path: leaf}."""
    if not isinstance(tree, (dict, list, tuple)):
        return {path: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {name: leaf for key, value in items for name, leaf in train_leaves(value, f"{path}/{key}").items()}


def train_same(a, b, tol=0.0):
    a, b = train_leaves(a), train_leaves(b)
    assert a.keys() == b.keys()
    for name in a:
        if isinstance(a[name], (torch.Tensor, float)):
            x, y = torch.as_tensor(a[name]).double(), torch.as_tensor(b[name]).double()
            assert x.shape == y.shape and (x - y).abs().max() <= tol, (name, x, y)
        else:
            assert a[name] == b[name], name


def train_weights(state):
    return {k: v for k, v in state["model"].items() if not k.endswith(".nu")}


def train_told(log):
    """The log without what a clock or the machine measures, and without diagnoses, which are of rank 0 alone."""
    hidden = {"seconds", "tokens_per_s", "mfu", "memory_gb", "config", *DIAGNOSES}
    return [{k: v for k, v in r.items() if k not in hidden} for r in log]


DIAGNOSES = ["residual_norm", "grad_l1", "scale", "row_norm", "row_norm_max", "momentum_var"]


# Options -------------------------------------------------------------------------------------------------------------

TABLE_F1 = {
    "32m": (256, 6, 4, 32.05, 32.11, 32.10),
    "62m": (384, 10, 6, 62.24, 62.33, 62.28),
    "125m": (512, 18, 8, 127.03, 127.16, 127.08),
    "250m": (768, 18, 12, 247.17, 247.34, 247.21),
    "0.5b": (1024, 24, 16, 505.73, 506.00, 505.78),
    "1b": (1280, 36, 20, 1073, 1073, 1073),
}
GIVEN = dict(
    eval_tokens=999,
    vocab_size=700,
    block_size=24,
    n_layer=1,
    n_head=2,
    n_embd=64,
    rope_fraction=0.25,
    max_steps=77,
    batch_size=3,
    total_batch_size=144,
    learning_rate=0.123,
    warmup_ratio=0.3,
    weight_decay=0.7,
    pn_warmup=9,
)


@pytest.mark.parametrize("size", trainer.SIZES)
def test_train_given_options_win_over_recipe_and_size(size):
    assert set(GIVEN) >= set(trainer.SIZES[size]) and all(set(GIVEN) >= set(r) for r in trainer.RECIPES.values())
    for arch in TRAIN_ARCHS:
        config = trainer.resolve(trainer.parse(TrainConfig, train_words(GIVEN | {"size": size, "arch": arch}), ""))
        assert {key: getattr(config, key) for key in GIVEN} == GIVEN
        assert None not in [getattr(config, f.name) for f in fields(config) if not f.name.endswith("_scale")]


@pytest.mark.parametrize("size", TABLE_F1)
def test_train_sizes_are_table_f1_and_recipes_table_f2(size):
    width, layers, heads, *millions = TABLE_F1[size]
    for arch, count in zip(("rmsnorm", "ngpt", "angpt"), millions):
        c = trainer.resolve(TrainConfig(arch=arch, size=size))
        assert (c.n_embd, c.n_layer, c.n_head) == (width, layers, heads)
        assert (c.vocab_size, c.block_size, c.rope_fraction, c.dropout, c.bias) == (50304, 2048, 0.5, 0.0, False)
        assert (c.beta1, c.beta2, c.eps, c.grad_clip, c.min_lr_ratio) == (0.9, 0.95, 1e-9, 1.0, 0.01)
        assert (c.weight_decay, c.warmup_ratio) == ((0.1, 0.2) if arch == "rmsnorm" else (0.0, 0.0))
        assert abs(c.max_steps * c.total_batch_size / (20e6 * count) - 1) < 1e-3


def test_train_recipe_wins_over_size(monkeypatch):
    monkeypatch.setitem(trainer.SIZES, "laptop", {**trainer.SIZES["laptop"], "weight_decay": 7.0, "warmup_ratio": 0.7})
    monkeypatch.setitem(trainer.RECIPES, "ngpt", {**trainer.RECIPES["ngpt"], "n_layer": 2})
    c = trainer.resolve(TrainConfig(arch="ngpt"))
    assert (c.weight_decay, c.warmup_ratio, c.n_layer) == (0.0, 0.0, 2)
    monkeypatch.setitem(trainer.RECIPES, "ngpt", {})
    c = trainer.resolve(TrainConfig(arch="ngpt", learning_rate=1.0))
    assert (c.weight_decay, c.warmup_ratio, c.n_layer) == (7.0, 0.7, 4)


def test_train_order_of_words_does_not_matter():
    words = ["--arch=angpt", "--size=32m", "--weight_decay=0.3", "--warmup_ratio=0.1", "--learning_rate=0.5"]
    configs = [trainer.parse(TrainConfig, list(order), "") for order in itertools.permutations(words)]
    assert all(config == configs[0] for config in configs)
    c = trainer.resolve(configs[0])
    assert (c.n_embd, c.weight_decay, c.warmup_ratio, c.learning_rate) == (256, 0.3, 0.1, 0.5)


def test_train_derived_values_follow_what_was_given():
    def resolve(world_size=1, **options):
        return trainer.resolve(TrainConfig(**{"arch": "powernorm", **options}), world_size=world_size)

    base = resolve()
    assert resolve(n_embd=512).learning_rate == pytest.approx(base.learning_rate / 2)  # 1 / sqrt(width)
    assert resolve(n_embd=512, learning_rate=base.learning_rate).learning_rate == base.learning_rate
    assert resolve(max_steps=50).pn_warmup == 10 and resolve(max_steps=50, warmup_ratio=0.5).pn_warmup == 25
    assert resolve(pn_warmup=0).pn_warmup == 0
    # A validation's tokens, at half the price of training's, are a hundredth of those between two of them.
    paper = resolve(size="0.5b")
    for config in (base, paper, resolve(eval_tokens=10**6), resolve(total_batch_size=4096, eval_tokens=20000)):
        between = config.eval_interval * config.total_batch_size
        assert 0 <= between - 50 * config.eval_tokens < config.total_batch_size
        assert config.checkpoint_interval == min(config.eval_interval, config.max_steps // 5)
    assert paper.eval_tokens > base.eval_tokens and resolve(eval_tokens=1000).eval_interval == 100
    assert resolve(size="32m", max_steps=100).eval_tokens == 2 * paper.total_batch_size  # a fiftieth
    assert resolve(size="32m", max_steps=1).eval_tokens == resolve(max_steps=1).eval_tokens == base.eval_tokens
    assert resolve(max_steps=100, eval_tokens=10**6).eval_tokens == 10**6 and resolve(max_steps=100).checkpoint_interval == 100
    assert resolve(eval_interval=7).checkpoint_interval == 7
    assert (
        base.out_dir == "out/powernorm"
        and resolve(arch="ngpt").out_dir == "out/ngpt"
        and resolve(out_dir="a").out_dir == "a"
    )
    for world_size, block_size, total in itertools.product((1, 2, 4, 8), (128, 256), (None, 2048, 6144)):
        c = resolve(world_size, block_size=block_size, total_batch_size=total)
        assert (
            c.total_batch_size == (total or 2048) and c.total_batch_size % (c.batch_size * block_size * world_size) == 0
        )
    assert resolve(block_size=300).total_batch_size == 2100 and resolve(batch_size=3).total_batch_size == 2304
    small, wide = (trainer.resolve(TrainConfig(size="32m", total_batch_size=n * 2**18)) for n in (1, 4))
    assert small.max_steps == pytest.approx(4 * wide.max_steps, abs=4)


@pytest.mark.parametrize(
    "words, says",
    [
        ("--learning_rat=1", "did you mean --learning_rate?"),
        ("--n-embd=64", "did you mean --n_embd?"),
        ("--lr=1", "did you mean --learning_rate?"),
        ("--steps=1", "did you mean --max_steps?"),
        ("--bs=1", "did you mean --block_size or --batch_size?"),
        ("--seed=-1", "seed=-1: expected 0 to 2 ** 32 - 1"),
        ("--seed=4294967296", "seed=4294967296: expected 0 to 2 ** 32 - 1"),
        ("--epochs=3", "unknown option --epochs=3; --help"),
        ("fast", "fast"),
        ("--max_steps=many", "max_steps: expected a whole number, given 'many'"),
        ("--n_layer=2.5", "expected a whole number"),
        ("--learning_rate=fast", "learning_rate: expected a number"),
        ("--bias=maybe", "bias: expected true or false"),
        ("--max_steps", "max_steps: expected one argument"),
        ("--diagnose --resume nowhere", "resume='nowhere': expected one of auto, true, false"),
        ("--n_embd=129 --n_head=3", "turns 43 of a head's n_embd / n_head = 43 channels"),
        ("--max_steps=0", "max_steps=0"),
        ("--warmup_ratio=2", "warmup_ratio=2"),
        ("--arch=angptt", "did you mean angpt?"),
        ("--arch=rmsnorm+qk_norm", "expected --arch=rmsnorm --qk_norm=true"),
        ("--size=126m", "did you mean 125m?"),
        ("--dtype=float16", "bfloat16"),
        ("--compile=maybe", "compile='maybe'"),
        ("--resid_scale=true --arch=ngpt", "arch=normformer"),
        ("--mlp=swiglo", "did you mean swiglu?"),
        ("--n_embd=64 --n_head=7", "n_head=7 does not divide n_embd=64: the nearest that does is 8"),
        ("--vocab_size=256", "at least 257"),
        ("--batch_size=4 --block_size=32 --total_batch_size=1000", "4 x 32 x 1 = 128; the nearest is 1024"),
        ("--block_size=300 --total_batch_size=2000", "the nearest is 2100"),
        ("--data=nowhere", "nowhere: no corpus"),
        ("--resume=true", "ckpt.pt: no such checkpoint"),
        ("--block_size=4000", "block_size=4000"),
    ],
)
def test_train_options_that_do_not_fit_are_one_line(train_command, train_corpus, tmp_path, words, says):
    code, out, err = train_command(
        "train.py", f"--data={train_corpus}", f"--out_dir={tmp_path / 'out'}", "--device=cpu", *words.split()
    )
    assert code == 2 and says in err and err.startswith("train.py: ") and err.count("\n") == 1 and not out


def test_train_bad_files_are_one_line(train_run, train_command, train_corpus, tmp_path):
    def refused(says, **options):
        code, out, err = train_command(
            "train.py", *train_words({**TRAIN_TINY, "data": train_corpus, "out_dir": tmp_path / "run", **options})
        )
        assert code == 2 and says in err and err.startswith("train.py: ") and err.count("\n") == 1, err

    train_run(arch="ngpt", max_steps=2)
    path = tmp_path / "run" / "ckpt.pt"
    whole = path.read_bytes()
    refused("made with arch=ngpt, now arch=angpt", arch="angpt", resume="true", max_steps=2)
    refused("made with max_steps=2, now max_steps=3", arch="ngpt", resume="true", max_steps=3)
    refused("made with seed=1337, now seed=1", arch="ngpt", resume="auto", max_steps=2, seed=1)
    refused("mlp=swiglu, now mlp=gelu; max_steps=2, now max_steps=3; give", arch="ngpt", resume="auto", max_steps=3, mlp="gelu")
    state = torch.load(path, weights_only=True)
    torch.save({**state, "tokenizer": "gpt2"}, path)
    refused("tokenizer", arch="ngpt", resume="true", max_steps=2)
    torch.save(
        {**state, "model": {k: v for k, v in state["model"].items() if k != "s_z.weight"}}, path
    )  # of another model.py
    refused("ckpt.pt", arch="ngpt", resume="true", max_steps=2)
    torch.save({"model": state["model"]}, path)
    refused("config", arch="ngpt", resume="true", max_steps=2)
    for damaged in (whole[: len(whole) // 2], whole[:-1], b"", b"not a checkpoint"):
        path.write_bytes(damaged)
        refused("ckpt.pt: not a whole checkpoint", arch="ngpt", resume="true", max_steps=2)
        assert path.read_bytes() == damaged

    def corpus(tokens):
        folder = tmp_path / "corpus"
        folder.mkdir(exist_ok=True)
        (folder / "meta.json").write_bytes(Path(train_corpus, "meta.json").read_bytes())
        for name in ("a_val_000000.bin", "a_train_000001.bin"):
            prep.write_shard(folder / name, tokens)
        return folder

    for bad in (257, 65535):
        refused(
            f"token {bad}, expected less than vocab_size=257",
            data=corpus([0] * 400 + [bad] + [0] * 400),
            vocab_size=300,
        )
    refused("40 tokens, expected more than block_size=64", data=corpus([0] * 40), block_size=64, total_batch_size=256)
    (corpus([0] * 900) / "a_train_000001.bin").write_bytes(b"x" * 3000)
    refused("a_train_000001.bin: magic number", data=tmp_path / "corpus")
    (tmp_path / "corpus" / "a_train_000001.bin").unlink()
    refused("no train shards", data=tmp_path / "corpus")
    meta = json.loads((tmp_path / "corpus" / "meta.json").read_text())
    (corpus([0] * 900) / "meta.json").write_text(json.dumps({**meta, "vocab_size": 258}))
    refused("vocab_size 258", data=tmp_path / "corpus")
    (tmp_path / "corpus" / "meta.json").write_text("{}")
    refused("meta.json", data=tmp_path / "corpus")


@pytest.mark.parametrize("words", ["train.py --max_step=3", "sample.py --out_dir=nowhere", "sample.py --promt=a"])
def test_train_commands_fail_in_one_line(words, tmp_path):
    script, word = words.split()
    done = subprocess.run([sys.executable, TRAIN_HOME / script, word], cwd=tmp_path, capture_output=True, text=True)
    assert (
        done.returncode == 2
        and done.stderr.startswith(f"{script}: ")
        and done.stderr.count("\n") == 1
        and not done.stdout
    )


# Data ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def train_counting(tmp_path):
    """A corpus whose n-th token is n, in shards of awkward lengths."""
    at = 0
    for number, size in enumerate((100, 3, 1, 250, 37, 249), 1):
        prep.write_shard(tmp_path / f"count_train_{number:06d}.bin", np.arange(at, at + size))
        at += size
    return trainer.Tokens(tmp_path, "train", 32, 640)


def test_train_windows_cross_shards(train_counting):
    assert train_counting.windows == 19  # the 20th would lack its last target
    for i in range(19):
        assert train_counting.window(i).tolist() == list(range(32 * i, 32 * i + 33))


def train_place(rank=0, world_size=1):
    return SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"))


def test_train_loader_visits_every_window_once_an_epoch_whoever_reads(train_counting):
    def epochs(world_size, batch_size, seed=1, steps=range(19)):
        config = TrainConfig(seed=seed, block_size=32, total_batch_size=8 * 32, batch_size=batch_size)
        loaders = [trainer.Loader(train_counting, config) for _ in range(world_size)]
        for step in steps:
            seen = []
            for rank, loader in enumerate(loaders):
                batches = list(loader.batches(step, config, train_place(rank, world_size)))
                assert len(batches) == 8 // world_size // batch_size
                for x, y in batches:
                    assert x.shape == y.shape == (batch_size, 32) and torch.equal(y, x + 1)
                    seen += (x[:, 0] // 32).tolist()
            yield seen

    one = list(epochs(1, 8))  # 19 steps of 8: 8 epochs of 19 windows
    places = np.concatenate(one).reshape(8, 19)
    assert (np.sort(places) == np.arange(19)).all() and len({tuple(epoch) for epoch in places}) == 8
    assert not any((epoch == np.sort(epoch)).all() for epoch in places)
    for world_size, batch_size in ((1, 1), (1, 2), (2, 4), (2, 1), (4, 2), (8, 1)):
        assert [sorted(seen) for seen in epochs(world_size, batch_size)] == [sorted(seen) for seen in one]
    assert list(epochs(1, 8, steps=[17, 3])) == [one[17], one[3]]  # of the step alone
    assert list(epochs(1, 8, seed=2)) != one


def test_validation_without_a_byte_of_text_has_no_bits_per_byte(train_corpus, monkeypatch):
    tokens, model = trainer.Tokens(train_corpus, "val", 8, 257), GPT(GPTConfig(n_layer=1, n_embd=16, n_head=2, block_size=8))
    monkeypatch.setattr(tokens, "window", lambda i: np.full(9, 256))  # empty documents
    config = TrainConfig(block_size=8, batch_size=2, eval_tokens=32)
    lengths = torch.from_numpy(trainer.bytes_per_token(prep.get_tokenizer("bytes")))
    machine = trainer.Machine("cpu")
    machine.use("float32")
    nats, bits = trainer.evaluate(model, tokens, config, machine, lengths)
    assert 0 < nats < 10 and math.isnan(bits)


@train_every_arch
def test_train_validation_does_not_depend_on_ranks_or_batches(train_corpus, arch):
    torch.manual_seed(0)
    model = GPT(GPTConfig(arch=arch, n_embd=32, n_layer=1, n_head=2, block_size=32, dropout=0.5)).train()
    tokens, stream = trainer.Tokens(train_corpus, "val", 32, 257), torch.from_numpy(train_stream(train_corpus, "val"))
    lengths = torch.from_numpy(trainer.bytes_per_token(prep.get_tokenizer("bytes")))
    for eval_tokens in (10**9, 33 * 32 + 5, 1):
        n = max(1, min((len(stream) - 1) // 32, eval_tokens // 32))
        x, y = stream[: n * 32].view(n, 32), stream[1 : n * 32 + 1].view(n, 32)
        with torch.no_grad():
            want = model.eval()(x, y)[1].item()
        bits = want / math.log(2) * y.numel() / (y != 256).sum().item()  # a byte a token, but for end-of-text
        for world_size, batch_size in ((1, 4), (1, 1), (1, 64), (2, 4), (3, 5)):
            total = 0

            def add(part):
                nonlocal total
                total = total + part
                return total

            for rank in range(world_size):
                place = SimpleNamespace(
                    **vars(train_place(rank, world_size)), sum=add, autocast=lambda: torch.enable_grad()
                )
                config = TrainConfig(block_size=32, batch_size=batch_size, eval_tokens=eval_tokens)
                got = trainer.evaluate(model.train(), tokens, config, place, lengths)
            assert got == pytest.approx((want, bits), rel=1e-6) and model.training


# Training ------------------------------------------------------------------------------------------------------------


@train_every_arch
def test_train_lowers_the_held_out_loss_and_logs_it(train_run, train_corpus, tmp_path, arch):
    log, state = train_run(
        arch=arch, max_steps=30, eval_interval=20, log_interval=4, learning_rate=0.01, eval_tokens=10**6
    )
    assert log == [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").open()]
    always, train, held = (
        {"step", "tokens", "seconds"},
        {"loss", "lr", "grad_norm", "tokens_per_s", "mfu", "memory_gb"},
        {"val_loss", "val_bpb"},
    )
    assert [r["step"] for r in log] == [0, 4, 8, 12, 16, 20, 24, 28, 30]
    for r in log:
        want = always | (train if r["step"] else set()) | (held if r["step"] in (0, 20, 30) else set())
        assert (
            set(r) - {"config"} == want
            and r["tokens"] == 128 * r["step"]
            and all(math.isfinite(r[key]) for key in want)
        )
    assert [r["seconds"] for r in log] == sorted(r["seconds"] for r in log)
    losses = [r["val_loss"] for r in log if "val_loss" in r]
    assert (
        losses[-1] < losses[0] - 1 and abs(log[-1]["loss"] - losses[-1]) < 0.7 and state["best_val_loss"] == min(losses)
    )

    model, tokenizer, again = trainer.load_model(tmp_path / "run" / "ckpt.pt")
    assert not model.training and tokenizer.name == "bytes" and again["step"] == 30
    stream = torch.from_numpy(train_stream(train_corpus, "val"))
    n = (len(stream) - 1) // 32 * 32
    with torch.no_grad():
        want = model(stream[:n].view(-1, 32), stream[1 : n + 1].view(-1, 32))[1].item()
    size = len(tokenizer.decode_bytes([t for t in stream[1 : n + 1].tolist() if t != 256]))
    assert log[-1]["val_loss"] == pytest.approx(want, rel=1e-5) and log[-1]["val_bpb"] == pytest.approx(
        want / math.log(2) * n / size, rel=1e-5
    )

    for name, p in state["model"].items():
        if arch in ("ngpt", "angpt") and p.dim() == 2:
            norms = p.norm(dim=0 if arch == "ngpt" and ("w_o." in name or "w_down." in name) else 1)
            assert norms.max() < 1 + 1e-5 and (arch == "angpt" or norms.min() > 1 - 1e-5), name


def test_train_log_begins_with_the_config(train_run):
    log, state = train_run(max_steps=2)
    assert log[0]["config"] == state["config"]


@train_every_arch
def test_train_is_the_loop_written_out(train_run, train_corpus, arch):
    options = dict(
        TRAIN_SMOOTH,
        arch=arch,
        max_steps=6,
        warmup_ratio=0.5,
        grad_clip=0.5,
        total_batch_size=256,
        learning_rate=0.3,
        pn_warmup=2,
        batch_size=8,
    )
    log, state = train_run(**options)
    config = trainer.resolve(TrainConfig(**{**TRAIN_TINY, **options}))
    loader = trainer.Loader(trainer.Tokens(train_corpus, "train", 32, 257), config)
    torch.manual_seed(1337)
    model = GPT(config.model_config()).train()
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    for step in range(6):
        rate = 0.3 * ((step + 1) / 3 if step < 3 else 0.01 + 0.99 * (1 + math.cos(math.pi * (step - 3) / 2)) / 2)
        rows = torch.from_numpy(np.stack([loader.tokens.window(i) for i in loader.indices(step)]))
        model.zero_grad()
        loss = model(rows[:, :-1], rows[:, 1:])[1]
        loss.backward()
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
        with torch.no_grad():
            for name, p in model.named_parameters():
                g, (m, v) = p.grad * min(1, 0.5 / norm), moments[name]
                m.lerp_(g, 0.1)
                v.lerp_(g * g, 0.05)
                p *= 1 - rate * (0.1 if p.dim() > 1 else 0)
                p -= rate * m / (1 - 0.9 ** (step + 1)) / ((v / (1 - 0.95 ** (step + 1))).sqrt() + 0.03)
        model.project_()
        record = log[step + 1]
        assert record["step"] == step + 1 and record["lr"] == pytest.approx(rate)
        assert (record["loss"], record["grad_norm"]) == pytest.approx((loss.item(), norm), rel=1e-4)
    train_same(model.state_dict(), state["model"], 2e-5)


@train_every_arch
def test_train_gradient_accumulation(train_run, arch):
    options = dict(TRAIN_SMOOTH, arch=arch, pn_warmup=0)
    (whole, a), (parts, b) = (train_run(f"run{n}", **options, batch_size=n) for n in (4, 1))
    train_same(train_told(whole), train_told(parts), 2e-5)
    train_same(a["model"], b["model"], 1e-5)


@train_every_arch
def test_train_in_bfloat16_keeps_float32_weights(train_run, arch):
    log, state = train_run(arch=arch, dtype="bfloat16", learning_rate=0.01)
    assert log[-1]["val_loss"] < log[0]["val_loss"] - 0.5
    assert {v.dtype for v in train_leaves([state["model"], state["optimizer"]["state"]]).values()} == {torch.float32}
    exact = train_run("exact", arch=arch, learning_rate=0.01)[0]
    assert 0 < abs(exact[-1]["val_loss"] - log[-1]["val_loss"]) < 0.1


def test_train_takes_a_seventh_arch(train_run, monkeypatch):
    class Mine(NGPTBlock):
        def forward(self, h, *rest, **more):
            return (h + super().forward(h, *rest, **more)) / 2

    monkeypatch.setitem(ARCHS, "mine", Mine)
    log, state = train_run(arch="mine", max_steps=5, learning_rate=0.01)
    assert log[-1]["val_loss"] < log[0]["val_loss"] and state["config"]["arch"] == "mine"
    assert (state["model"]["blocks.0.w_o.weight"].norm(dim=0) - 1).abs().max() < 1e-5
    monkeypatch.delitem(ARCHS, "mine")
    with pytest.raises(prep.DataError, match="mine"):
        trainer.load_model(Path(state["config"]["out_dir"], "ckpt.pt"))


def test_train_rates_and_groups():
    def rates(arch, **options):
        c = trainer.resolve(TrainConfig(arch=arch, **{**TRAIN_TINY, "max_steps": 50, **options}))
        return c, np.array([trainer.learning_rate(c, step) for step in range(50)])

    for arch in TRAIN_ARCHS:
        c, r = rates(arch)
        start = 0 if arch in ("ngpt", "angpt") else 10
        assert r.max() == r[start] == c.learning_rate and (np.diff(r[start:]) < 0).all() and r.min() > 0
        assert np.allclose(r[:start], c.learning_rate * np.arange(1, 11)[:start] / 10) and r[-1] == pytest.approx(
            0.01 * c.learning_rate
        )
        c, r = rates(arch, warmup_ratio=0.2, min_lr_ratio=0.3, learning_rate=2.0)
        assert r[9] == r[10] == 2 and r[-1] == pytest.approx(0.6) and r[0] == pytest.approx(0.2)
        for bias, tie, qk_norm in itertools.product((False, True), repeat=3):
            c.bias, c.tie, c.qk_norm, c.weight_decay = bias, tie, qk_norm, 0.4
            model = GPT(c.model_config())
            names = {id(p): name for name, p in model.named_parameters()}
            groups = trainer.make_optimizer(model, c).param_groups
            assert sorted(names[id(p)] for g in groups for p in g["params"]) == sorted(names.values())
            for p, decay in [(p, g["weight_decay"]) for g in groups for p in g["params"]]:
                assert decay == (0.4 if names[id(p)].endswith("weight") and p.dim() == 2 else 0.0), names[id(p)]
            assert {(*g["betas"], g["eps"]) for g in groups} == {(0.9, 0.95, 1e-9)}


def test_a_new_run_keeps_what_it_finds(train_run, tmp_path, monkeypatch):
    run, start = tmp_path / "run", functools.partial(train_run, arch="rmsnorm")

    def found(folder=run):
        return [(folder / name).read_bytes() for name in ("ckpt.pt", "log.jsonl", "loss.png")]

    monkeypatch.setattr(trainer, "draw", lambda records, path: path.write_text(str(records)))
    start(max_steps=2)
    for steps in (3, 4):
        earlier = found()
        _, state = start(max_steps=steps)
        assert found(run / "before") == earlier and state["step"] == steps
    earlier = found()
    for resume in ("false", "auto"):  # no checkpoint comes of these, nor is anything of the last run lost
        with pytest.raises(ConfigError):
            start(attention="flash_attn")
        with pytest.raises(Diverged):  # auto: the run before is not this one, which has other options
            start(max_steps=9, learning_rate=1e30, grad_clip=0.0, resume=resume)
        assert found(run / "before") == earlier and (run / "ckpt.pt").read_bytes() == earlier[0]
    log, _ = start(max_steps=4, resume="true")  # so it is the last run that goes on
    assert found() == earlier and log[-1]["step"] == 4
    shorter = [start(max_steps=2) and found() for _ in range(3)]  # a longer run is not lost to tries
    assert found(run / "before") == shorter[1] and found(run / "before/before") == earlier
    start(max_steps=5)
    assert found(run / "before") == shorter[2] and found(run / "before/before") == earlier
    start(max_steps=1)
    assert not (run / "before/before/before").exists() and found(run / "before/before") == earlier
    for folder, length in ((run / "before", 640), (run, 128)):  # a killed run's last line may be cut
        assert trainer.length(folder) == length
        with (folder / "log.jsonl").open("a") as file:
            file.write('{"ste')
        assert trainer.length(folder) == length
    (run / "before/before/log.jsonl").unlink()
    assert trainer.length(run / "before/before") == -1
    five = found(run / "before")
    for _ in range(3):
        start(max_steps=1)
    assert found(run / "before/before") == five and trainer.length(run / "before") == 128
    for name in ("ckpt.pt", "log.jsonl"):  # someone goes back to the run before: it is no leftover
        shutil.copy(run / "before" / name, run)
    assert not trainer.unsaved(run)


def test_train_says_where_it_is(train_corpus, tmp_path, monkeypatch, capsys):
    config, said = TrainConfig(**{**TRAIN_TINY, "data": train_corpus, "out_dir": str(tmp_path)}), []
    resumed = []
    trainer.train(config, say=None)
    assert capsys.readouterr() == ("", "")
    trainer.train(config, say=lambda line, **_: said.append(line))
    head, *lines = said
    begins = f"{tmp_path}: a new run; the last one is in {tmp_path}/before"
    assert all(word in head for word in ("angpt: 49,603 parameters", "20 steps of 128 tokens", "float32, plain", begins))
    trainer.train(dataclasses.replace(config, resume="true"), say=lambda line, **_: resumed.append(line))
    assert f"{tmp_path}: goes on after step 20\n" in resumed[0] and len(resumed) == 1
    assert [int(line.split()[1].split("/")[0]) for line in lines] == [0, 10, 20] and "held out" in lines[1]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    trainer.train(config, say=lambda line, **_: said.append(line))
    assert re.search(r"step +4/20 +loss \d\.\d{3} +[\d,]+ tokens/s +0:\d\d left", said[-9]) and len(said) == 4 + 1 + 11


# Several processes ---------------------------------------------------------------------------------------------------

TRAIN_JOINT = {
    **{arch: dict(arch=arch) for arch in TRAIN_ARCHS},
    "warming": dict(arch="powernorm", pn_warmup=99),
    "warm": dict(arch="powernorm", pn_warmup=0),
    "bias": dict(arch="powernorm", bias=True, tie=True, qk_norm=True),
    "diagnosed": dict(arch="powernorm", pn_warmup=2, diagnose=True),
}


def train_joint(name, data, out, batch_size, **options):
    """Of each run 5 steps of 8 sequences in two micro-steps."""
    return TrainConfig(
        **{
            **TRAIN_TINY,
            **TRAIN_SMOOTH,
            "total_batch_size": 256,
            "data": data,
            "out_dir": f"{out}/{name}",
            "batch_size": batch_size,
            **TRAIN_JOINT[name],
            **options,
        }
    )


def train_layer(rank, world_size):
    """Two updates of a PowerNorm, once warming up and once not -> its outputs, input gradients and statistics."""
    gen, layer, results = torch.Generator().manual_seed(0), PowerNorm(8, GPTConfig(pn_warmup=1)), []
    for _ in range(3):
        x, w = torch.randn(2, 4, 5, 8, generator=gen) * (1 + torch.arange(4).view(4, 1, 1))
        x = x[rank::world_size].clone().requires_grad_()
        y = layer(x)
        (y * w[rank::world_size]).sum().backward()
        layer.update_()
        results.append([y.detach(), x.grad, layer.psi2.clone(), layer.nu.clone()])
    return results


def train_rank(rank, port, data, out):
    """What each of two processes does."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    trainer.matmul_flops, trainer.draw = lambda *_: 1e11, lambda *_: None
    step, compiled, seeds = trainer.optimizer_step, torch.compile, []
    logs = {name: trainer.train(train_joint(name, data, out, 2), say=None) for name in TRAIN_JOINT}
    torch.compile = lambda model: compiled(model, backend="aot_eager")
    logs["compiled"] = trainer.train(train_joint("powernorm", data, f"{out}/compiled", 2, compile="true"), say=None)

    def stopping(number, *rest):
        if number == 1 and rank == 1:
            train_terminate(None)
        result = step(number, *rest)
        seeds.append(torch.initial_seed())
        return result

    trainer.optimizer_step = stopping
    logs["stopped"] = trainer.train(train_joint("powernorm", data, f"{out}/stopped", 2), say=None)
    torch.save([logs, train_layer(rank, 2), seeds], f"{out}/rank{rank}.pt")
    torch.distributed.destroy_process_group()


def test_train_two_processes_equal_one(train_corpus, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    two, one = tmp_path / "two", tmp_path / "one"
    two.mkdir()
    torch.multiprocessing.spawn(train_rank, (port, train_corpus, str(two)), nprocs=2)
    (logs, layers, seeds), (others, more, seeds2) = (torch.load(two / f"rank{rank}.pt") for rank in (0, 1))

    def state(folder, name):
        return torch.load(folder / name / "ckpt.pt", weights_only=True)

    for name in TRAIN_JOINT:
        log = trainer.train(train_joint(name, train_corpus, one, 4), say=None)
        train_same(train_told(log), train_told(logs[name]), 1e-5)
        train_same(train_told(log), train_told(others[name]), 1e-5)
        assert train_told(logs[name]) == train_told(map(json.loads, (two / name / "log.jsonl").open()))
        train_same(train_weights(state(one, name)), train_weights(state(two, name)), 1e-5)
    for log, has in ((logs["diagnosed"], True), (others["diagnosed"], False)):
        assert all(({*DIAGNOSES} <= set(r)) == (has and "val_loss" in r) for r in log)
    train_same(train_told(logs["compiled"]), train_told(logs["powernorm"]), 1e-5)
    train_same(state(two, "compiled/powernorm")["model"], state(two, "powernorm")["model"], 1e-5)

    assert len({*seeds, *seeds2}) == len(seeds + seeds2) == 4  # of dropout
    assert (
        state(two, "stopped/powernorm")["step"] == 2
        and logs["stopped"][-1]["step"] == others["stopped"][-1]["step"] == 2
    )
    log = trainer.train(
        train_joint("powernorm", train_corpus, two / "stopped", 4, resume="true"), say=None
    )  # goes on alone
    train_same(train_told(log), train_told(logs["powernorm"]), 1e-5)
    train_same(state(two, "stopped/powernorm")["model"], state(one, "powernorm")["model"], 1e-5)

    for (y, dx, *statistics), a, b in zip(train_layer(0, 1), layers, more):
        for i, joint in enumerate((y, dx)):
            train_same([joint[0::2], joint[1::2]], [a[i], b[i]], 1e-5)
        train_same([statistics, statistics], [a[2:], b[2:]], 1e-5)


# Checkpoints ---------------------------------------------------------------------------------------------------------


def train_kept(state):
    return {key: state[key] for key in ("model", "optimizer", "step", "tokenizer", "best_val_loss")}


@pytest.mark.parametrize("arch, dropout", [(arch, 0.0) for arch in TRAIN_ARCHS] + [("normformer", 0.2)])
def test_train_goes_on_where_it_stopped(train_run, train_at, arch, dropout):
    options = dict(arch=arch, dropout=dropout, total_batch_size=256, learning_rate=0.01)
    straight, end = train_run("straight", **options)
    train_at(9, train_terminate)
    log, state = train_run(**options)
    assert log[-1]["step"] == 8 and state["step"] == 9
    log, state = train_run(**options, resume="true")
    train_same(train_told(log), train_told(straight))
    train_same(train_kept(state), train_kept(end))
    again, state = train_run(**options, resume="auto")  # nothing is left to do
    assert again == log
    train_same(train_kept(state), train_kept(end))


def test_train_goes_on_after_a_crash_with_other_batches(train_run, train_at, tmp_path):
    def crash(_):
        raise MemoryError

    straight, end = train_run("straight", resume="auto")  # auto without a checkpoint: from the start
    train_at(17, crash)
    with pytest.raises(MemoryError):
        train_run()
    train_at(0, crash)
    with (tmp_path / "run" / "log.jsonl").open("a") as file:
        file.write('{"step": 18, "lo')
    assert (
        json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[-2])["step"] == 16
    )  # the checkpoint has 10
    log, state = train_run(resume=True, batch_size=1, log_interval=2)
    assert log == [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").open()]
    train_same(train_told(log[:6]), train_told(straight[:6]))
    train_same(train_told(log), train_told(straight), 1e-3)
    assert state["config"]["batch_size"] == 1 and end["config"]["batch_size"] == 4
    fresh, _ = train_run()  # without resume: all anew
    train_same(train_told(fresh), train_told(straight))


def test_train_goes_on_without_its_log(train_run, train_command, train_corpus, tmp_path):
    train_run(max_steps=4)
    (tmp_path / "run" / "log.jsonl").unlink()
    code, out, err = train_command(
        "train.py",
        *train_words(
            {**TRAIN_TINY, "data": train_corpus, "out_dir": tmp_path / "run", "max_steps": 4, "resume": "true"}
        ),
    )
    assert code == 0 and "sample" in out and not err


def test_train_saves_on_sigterm_and_says_how_to_go_on(train_run, train_corpus, tmp_path):
    options = {
        **TRAIN_TINY,
        "arch": "powernorm",
        "max_steps": 250,
        "eval_interval": 100,
        "data": train_corpus,
        "out_dir": tmp_path / "a run",
    }
    environment, log = {**os.environ, "OMP_NUM_THREADS": "1"}, tmp_path / "a run" / "log.jsonl"
    process = subprocess.Popen(
        [sys.executable, "train.py", "--resume", "false", *train_words(options)],
        cwd=TRAIN_HOME,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") > 10):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 0 and not err
    stopped = trainer.read_checkpoint(log.with_name("ckpt.pt"))["step"]
    assert 20 <= stopped < 250 and log.with_name("loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    command = shlex.split(re.search("To go on: (.*)", out)[1])
    assert command[:2] == ["python", "train.py"]
    done = subprocess.run(
        [sys.executable, *command[1:]], cwd=TRAIN_HOME, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr and "A sample" in done.stdout, done.stderr
    assert f"goes on after step {stopped}\n" in done.stdout
    straight, end = train_run(**{**options, "out_dir": str(tmp_path / "straight")}, name="straight")
    train_same(train_kept(trainer.read_checkpoint(log.with_name("ckpt.pt"))), train_kept(end))
    train_same(train_told(map(json.loads, log.open())), train_told(straight))


def test_torchrun_ends_well_when_its_processes_are_told_to_stop(train_corpus, tmp_path):
    if not (proc := Path("/proc/self/task")).exists():
        return  # nothing here tells a process's children
    words = train_words({**TRAIN_TINY, "data": train_corpus, "out_dir": tmp_path, "max_steps": 3000, "batch_size": 1})
    torchrun = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py", *words],
        cwd=TRAIN_HOME,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
    )
    log = tmp_path / "log.jsonl"
    while torchrun.poll() is None and not (log.exists() and log.read_text().count("\n") > 3):
        time.sleep(0.01)
    for child in (proc.parents[1] / str(torchrun.pid)).glob("task/*/children"):
        for number in child.read_text().split():
            os.kill(int(number), signal.SIGTERM)
    out = torchrun.communicate()[0]
    assert torchrun.returncode == 0 and "To go on: torchrun --nproc_per_node=2 train.py" in out
    assert 0 < trainer.read_checkpoint(tmp_path / "ckpt.pt")["step"] < 3000


def test_train_ends_a_step_on_ctrl_c_and_draws_new_dropout_in_each(train_run, train_at):
    before, seeds = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)], []

    def note(_):
        seeds.append(torch.initial_seed())
        if len(seeds) == 7:
            signal.raise_signal(signal.SIGINT)

    train_at(None, note)
    try:
        log, state = train_run(dropout=0.1)
    except KeyboardInterrupt:
        pytest.fail("not caught")
    assert state["step"] == 7 and len(set(seeds)) == len(seeds) == 7
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_ctrl_c_in_the_first_step_spares_the_compilers(train_run, train_at):
    """A terminal sends it to all its processes; with a compiler dead the step would fail, and nothing be saved."""
    made = []

    def compiling(_):
        code = "import time; time.sleep(0.5); print('made')"
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        child.send_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        made.append(child.communicate()[0])

    train_at(1, compiling)
    _, state = train_run()
    assert state["step"] == 1 and made == ["made\n"]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


def test_an_option_alone_is_true():
    config = parse(TrainConfig, ["--compile", "--resume", "--bias", "--diagnose", "--arch=ngpt", "--tie"], "")
    assert config.compile == config.resume == "true" and config.bias is config.diagnose is config.tie is True
    assert parse(TrainConfig, ["--resume=auto", "--bias", "false"], "") == TrainConfig(resume="auto")


@pytest.mark.parametrize("log_interval, seconds", [(2, [1, 1]), (1, [100, 1, 1, 1]), (4, [1])])
def test_the_first_step_tells_no_speed_but_its_own(train_run, train_at, monkeypatch, log_interval, seconds):
    usual = trainer.optimizer_step
    train_at(1, train_terminate)
    train_run("resumed", max_steps=5, log_interval=5)
    monkeypatch.setattr(trainer, "optimizer_step", usual)
    clock, before = itertools.count(step=0.001), trainer.optimizer_step
    steps = itertools.chain([100], itertools.repeat(1))  # seconds; the first compiles

    def optimizer_step(*args):
        nonlocal clock
        clock = itertools.count(next(clock) + next(steps), 0.001)
        return before(*args)

    monkeypatch.setattr(trainer, "optimizer_step", optimizer_step)
    monkeypatch.setattr(trainer, "time", SimpleNamespace(perf_counter=lambda: next(clock), monotonic=time.monotonic))
    log, state = train_run(max_steps=4, log_interval=log_interval)
    tokens = state["config"]["total_batch_size"]
    assert [tokens / r["tokens_per_s"] for r in log[1:] if "mfu" in r] == pytest.approx(seconds, abs=0.01)
    steps = itertools.chain([100], itertools.repeat(1))
    log, _ = train_run("resumed", max_steps=5, log_interval=5, resume="true")
    assert tokens / log[-1]["tokens_per_s"] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("size, says", [(None, ""), (300, ""), (600, " (of 600 tokens 257 can occur: --vocab_size=257 ")])
def test_train_tells_of_rows_that_no_token_uses(train_corpus, tmp_path, size, says):
    config = TrainConfig(**{**TRAIN_TINY, "data": str(train_corpus), "out_dir": str(tmp_path), "vocab_size": size})
    told = trainer.describe(trainer.Run(config))
    assert f" parameters{says}" in told and ("--vocab_size" in told) == (size == 600)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory"),
        MemoryError(),
        None,
    ],
)
def test_out_of_memory_is_one_line(train_command, train_corpus, tmp_path, monkeypatch, error):
    def fails(*_, **__):
        if error is None:
            torch.empty(2**50)
        raise error

    monkeypatch.setattr(torch.optim, "AdamW", fails)
    words = train_words({**TRAIN_TINY, "data": train_corpus, "out_dir": tmp_path / "run"})
    code, _, err = train_command("train.py", *words)
    assert code == 2 and err.startswith("train.py: out of memory; a smaller --batch_size takes less (")
    assert "tried to allocate" in err if error is None else str(error).split("\n")[-1] in err
    assert err.count("\n") == 1


def test_other_errors_are_not_taken_for_memory(train_command, train_corpus, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("The tensor has a non-zero number of elements, but its data is not allocated yet.")

    monkeypatch.setattr(torch.optim, "AdamW", fails)
    with pytest.raises(RuntimeError, match="not allocated yet"):
        train_command("train.py", *train_words({**TRAIN_TINY, "data": train_corpus, "out_dir": tmp_path / "run"}))


def test_train_remembers_its_best_held_out_loss(train_run, train_at, monkeypatch):
    losses = iter([(0.5, 0.5), (1.0, 1.0), (2.0, 2.0), (1.5, 1.5)])  # the first is of the untrained model
    monkeypatch.setattr(trainer, "evaluate", lambda *_: next(losses))
    train_at(15, train_terminate)
    assert (
        train_run(max_steps=30)[1]["best_val_loss"] == 1
        and train_run(max_steps=30, resume="true")[1]["best_val_loss"] == 1
    )


def test_train_goes_on_in_the_precision_it_began_with(train_run, train_at):
    straight, end = train_run("straight", dtype="bfloat16")
    train_at(9, train_terminate)
    train_run(dtype="bfloat16")
    log, state = train_run(dtype="auto", resume="true")  # here auto alone is float32
    assert (
        state["config"]["dtype"] == "bfloat16"
        and train_run("auto", dtype="auto", max_steps=1)[1]["config"]["dtype"] == "float32"
    )
    train_same(train_kept(state), train_kept(end))


@train_every_arch
def test_train_stops_where_numbers_end(train_run, train_at, tmp_path, arch):
    def poison(model):
        next(model.parameters()).data[:] = math.nan

    train_at(13, poison)
    with pytest.raises(trainer.Diverged, match="step 14: .*nan.*learning rate"):
        train_run(arch=arch)
    state = trainer.read_checkpoint(tmp_path / "run" / "ckpt.pt")
    assert state["step"] == 10 and all(v.isfinite().all() for v in state["model"].values())
    assert json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[-1])["step"] == 12


def test_train_command_says_that_it_diverged(train_command, train_corpus, tmp_path):
    options = {
        **TRAIN_TINY,
        "arch": "layernorm",
        "learning_rate": 1e30,
        "warmup_ratio": 0,
        "min_lr_ratio": 1,
        "checkpoint_interval": 1,
    }
    code, out, err = train_command("train.py", *train_words({**options, "data": train_corpus, "out_dir": tmp_path}))
    assert code == 3 and re.match(r"train.py: step 2: .*nan.* 1e\+30\. ", err) and err.count("\n") == 1
    state = trainer.read_checkpoint(tmp_path / "ckpt.pt")
    assert state["step"] == 1 and all(v.isfinite().all() for v in state["model"].values())
    assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_train_checkpoint_is_plain_and_whole(train_run, train_corpus, tmp_path, monkeypatch):
    compiled, calls = torch.compile, []
    monkeypatch.setattr(torch, "compile", lambda model: calls.append(1) or compiled(model, backend="aot_eager"))
    torch._dynamo.reset()
    options = dict(arch="powernorm", compile="true", max_steps=5, vocab_size=300, eval_interval=5)
    log, state = train_run(**options)
    assert calls and {"model", "optimizer", "step", "config", "tokenizer", "versions", "best_val_loss"} <= set(state)
    config = trainer.resolve(
        TrainConfig(**{**TRAIN_TINY, **options, "data": train_corpus, "out_dir": str(tmp_path / "run")})
    )
    assert state["config"] == vars(config) and state["config"]["vocab_size"] == 300
    assert state["model"].keys() == GPT(config.model_config()).state_dict().keys()
    assert state["step"] == 5 and state["tokenizer"] == "bytes" and state["versions"]["torch"] == torch.__version__
    plain = train_run("plain", **{**options, "compile": False})
    train_same(train_told(log), train_told(plain[0]), 1e-4)

    path = tmp_path / "run" / "ckpt.pt"
    before, save = path.read_bytes(), torch.save

    def full_disk(state, file):
        file.write(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(prep.DataError, match="ckpt.pt: cannot be written, .* MB are free there.*No space left"):
        train_run(**options)

    def stopped(state, file):  # as torch.save ends where a signal raises in it
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("unexpected pos 12 vs 34")

    monkeypatch.setattr(torch, "save", stopped)
    with pytest.raises(KeyboardInterrupt):
        train_run(**options)
    monkeypatch.setattr(torch, "save", save)
    assert path.read_bytes() == before and not list(path.parent.glob("*.tmp"))


def compile_as_for_a_gpu(model, monkeypatch, **options):
    """train.compile_ as it is where the weights are on a GPU."""
    with monkeypatch.context() as gpu:
        gpu.setattr(torch.nn.Parameter, "is_cuda", True, raising=False)
        gpu.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2 ** 40))
        trainer.compile_(model, **options)
    assert model.logits_at_once == 2 ** 33 and {"loss_sum", "project_"} <= set(model.__dict__)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "blocks"])
def test_diagnosis_of_a_model_compiled_for_a_gpu(whole, monkeypatch):
    """With the loss in pieces the backward makes logits anew: uncompiled, as the forward did."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: compiled(f, backend="aot_eager"))
    torch._dynamo.reset()
    config = TrainConfig(arch="rmsnorm", n_embd=32, n_layer=2, n_head=2, block_size=32, vocab_size=50, dtype="float32")
    config = trainer.resolve(config, 50)
    torch.manual_seed(0)
    model, idx, machine = GPT(config.model_config()).train(), tokens(2, 32) % 50, trainer.Machine("cpu")
    machine.dtype = torch.float32
    optimizer = trainer.make_optimizer(model, config)
    want = trainer.diagnose(model, optimizer, idx, idx, machine)
    compile_as_for_a_gpu(model, monkeypatch, whole=whole)
    model.logits_at_once = 2 * 50 * 8
    model(idx, idx, loss_only=True)[1].backward()
    train_same(trainer.diagnose(model, optimizer, idx, idx, machine), want, 1e-5)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"])
def test_a_copy_of_a_compiled_model_has_weights_of_its_own(duplicate, monkeypatch):
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: compiled(f, backend="aot_eager"))
    torch._dynamo.reset()
    model, idx = GPT(GPTConfig(arch="ngpt", n_embd=32, n_layer=2, n_head=2)).train(), tokens(2, 9)
    compile_as_for_a_gpu(model, monkeypatch, whole=True)
    model.project_()
    before, other = model(idx, idx, loss_only=True)[1].item(), duplicate(model)
    with torch.no_grad():
        other.s_z.weight.zero_()
        other.wte.weight.mul_(3)
    other.project_()
    close(other.wte.weight.norm(dim=1), torch.ones(257), 1e-6)
    close(other(idx, idx, loss_only=True)[1], math.log(257), 1e-6)
    close(model(idx, idx, loss_only=True)[1], before, 1e-6)


@pytest.mark.parametrize("how", ["true", "whole"])
def test_train_compiles_once_and_for_training_alone(how, train_run, monkeypatch):
    compiled, graphs = torch.compile, []
    backend = lambda graph, inputs: graphs.append(graph) or graph.forward
    monkeypatch.setattr(torch, "compile", lambda model: compiled(model, backend=backend))
    for diagnose in (False, True):
        graphs.clear()
        train_run(arch="rmsnorm", compile=how, diagnose=diagnose, n_layer=3, max_steps=4, eval_interval=2)
        assert len(graphs) == 1  # three blocks, one code; validation has none
        products = sum(node.target is torch.nn.functional.linear or "linear" in str(node.target) for node in graphs[0].graph.nodes)
        assert products == (4 if how == "true" else 3 * 4 + 1)
        assert not any("embedding" in str(node.target) for node in graphs[0].graph.nodes)


def test_freed_memory_is_kept_where_the_library_can(monkeypatch):
    class Library:
        calls, advised, most = [], [], 2**25

        def mallopt(self, what, value):
            self.calls.append((what, value))
            return int(what != -3 or value <= self.most)

        def madvise(self, start, length, advice):
            self.advised.append((start.value % 4096, length.value % 4096, advice))

    monkeypatch.setattr(trainer.sys, "platform", "linux")
    monkeypatch.setattr(trainer.ctypes, "CDLL", lambda name: Library())
    trainer.keep_freed_memory()
    assert Library.calls == [(-3, 2**30), (-3, 2**25), (-1, 2**31 - 1)]
    assert set(Library.advised) <= {(0, 0, 14)}  # whole pages of each part of the heap, if there is one
    Library.calls.clear()
    Library.advised.clear()
    Library.most = 0  # then nothing else is touched: the second setting alone would slow it down
    trainer.keep_freed_memory()
    assert Library.calls == [(-3, 2**30), (-3, 2**25)] and not Library.advised
    monkeypatch.setattr(trainer.ctypes, "CDLL", lambda name: object())  # another C library
    trainer.keep_freed_memory()
    monkeypatch.setattr(trainer.ctypes, "CDLL", lambda name: pytest.fail("somebody has chosen otherwise"))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    trainer.keep_freed_memory()


@pytest.mark.skipif(
    not os.path.exists("/sys/kernel/mm/transparent_hugepage") or platform.libc_ver()[0] != "glibc",
    reason="only Linux with glibc and a kernel with transparent huge pages gives them on request",
)
def test_the_heap_asks_for_huge_pages():
    code = "import train; train.keep_freed_memory(); print(open('/proc/self/smaps').read())"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=TRAIN_HOME, env=environment)
    flags = [line.split() for line in found.stdout.split("[heap]")[1].splitlines() if line.startswith("VmFlags")][0]
    assert "hg" in flags


@pytest.mark.parametrize("says, trusted", [("12\n", True), ("13.2.0\n", True), ("9.4.0\n", None), ("", None)])
def test_a_recent_compiler_is_not_tested(says, trusted, monkeypatch, tmp_path):
    from torch._inductor import config

    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n[ $1 = -dumpversion ] && printf '{says}'\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with config.patch({"cpp.vec_isa_ok": None}):
        trainer.trust_compiler()
        assert config.cpp.vec_isa_ok is (trusted if sys.platform == "linux" else None)
    with config.patch({"cpp.vec_isa_ok": False}):
        trainer.trust_compiler()
        assert config.cpp.vec_isa_ok is False  # somebody's choice
    with config.patch({"cpp.vec_isa_ok": None}):
        monkeypatch.setenv("CXX", "no such compiler")
        trainer.trust_compiler()
        assert config.cpp.vec_isa_ok is None


def test_headers_are_begun_with_the_settings_of_what_follows(monkeypatch):
    from torch._inductor import codecache, config

    headers, precompile = [], codecache._precompile_header

    def watched(*args, **kwargs):
        headers.append((config.cpp.vec_isa_ok, precompile(*args, **kwargs)))
        return headers[-1][1]

    monkeypatch.setattr(codecache, "_precompile_header", watched)
    codecache.CppPythonBindingsCodeCache.cache_clear()
    never_seen = float(torch.rand((), dtype=torch.float64))
    with config.patch({"cpp.vec_isa_ok": True}):
        trainer.begin_compiling().join()
        assert len(headers) == 1 and Path(headers[0][1] + ".gch").exists()
        torch.compile(lambda x: x * never_seen)(torch.ones(4096))
    assert headers[0][0] is True and headers[1:] == headers[:1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch's compiler
def test_compiled_graphs_with_a_backward_by_hand_are_kept_for_later_runs():
    from torch._dynamo.utils import counters

    idx, grads = torch.arange(12).view(1, 12), []
    model = GPT(GPTConfig(arch="powernorm", n_layer=1, n_head=2, n_embd=16, block_size=12))  # PowerScale, CompiledAttention
    for stance in ("force_eager", "default", "default"):
        torch.compiler.reset()
        counters.clear()
        trainer.compile_(model)
        with torch.compiler.set_stance(stance):
            grads.append(torch.autograd.grad(model(idx, idx, loss_only=True)[1], list(model.parameters())))
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    for eager, compiled, kept in zip(*grads):
        close(compiled, eager, 1e-5)
        assert torch.equal(kept, compiled)


def test_headers_that_fail_stop_nothing(monkeypatch):
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    tried = []

    def fails(*args):
        tried.append(args)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding", fails)
    thread = trainer.begin_compiling()
    thread.join()
    assert tried and thread.daemon


# Kernels -------------------------------------------------------------------------------------------------------------


@train_every_arch
@pytest.mark.parametrize("mlp, how", [("swiglu", "whole"), ("gelu", "cpu"), ("swiglu", "cuda")])
def test_train_compiled_equals_eager(arch, mlp, how, monkeypatch):
    """As one graph, the loss in pieces, and as train.py compiles for CPUs (the blocks) and GPUs (loss and project_ too)."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = GPTConfig(arch=arch, mlp=mlp, vocab_size=50, n_embd=32, n_layer=2, n_head=2, block_size=32, pn_warmup=1)
    eager, other = GPT(config).train(), GPT(config).train()
    other.load_state_dict(eager.state_dict())
    compiled, pieces = other, how != "cpu"
    if pieces:
        monkeypatch.setattr(GPT, "logits_at_once", 2 * 50 * 20)
    if how == "whole":
        compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    else:
        compile_ = torch.compile
        monkeypatch.setattr(torch, "compile", lambda f: compile_(f, fullgraph=True, backend="aot_eager"))
        compile_as_for_a_gpu(other, monkeypatch) if how == "cuda" else trainer.compile_(other)
        other.__dict__.pop("logits_at_once", None)
        assert how == "cuda" or not {"loss_sum", "project_"} & set(other.__dict__)
    for step in range(3):
        rows = torch.randint(50, (2, 33))
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            losses = [model(rows[:, :-1], rows[:, 1:], loss_only=pieces)[1] for model in (eager, compiled)]
            for loss in losses:
                loss.backward()
        train_same(*losses, 1e-6)
        train_same(*([p.grad for p in model.parameters()] for model in (eager, other)), 1e-6)
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            eager.project_(), other.project_()
        train_same(eager.state_dict(), other.state_dict(), 1e-6)


def train_flash(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """flash_attn_func, slowly: (B, T, H, d), a query sees the keys up to its own place counted from the end."""
    assert q.shape[0] == k.shape[0] and q.shape[2:] == k.shape[2:] and k.shape == v.shape and dropout_p == 0
    out, ahead = torch.empty_like(q), k.shape[1] - q.shape[1]
    for b, t, h in itertools.product(*map(range, q.shape[:3])):
        seen = ahead + t + 1 if causal else k.shape[1]
        weights = (softmax_scale * (k[b, :seen, h] @ q[b, t, h])).exp()
        out[b, t, h] = (weights / weights.sum()) @ v[b, :seen, h]
    return out


@train_every_arch
def test_train_flash_attention_equals_the_plain_path(monkeypatch, arch):
    config = GPTConfig(arch=arch, vocab_size=17, n_embd=32, n_layer=2, n_head=4, block_size=12)
    torch.manual_seed(0)
    model, idx = GPT(config).double().eval(), torch.randint(17, (2, 12))
    q, k, v = torch.randn(3, 2, 4, 7, 8, dtype=torch.float64)

    def results():
        cache = Cache(2, config, v)
        steps = [attend(*(x[:, :, s] for x in (q, k, v)), 0.3, cache) for s in (slice(5), slice(5, 6), slice(6, 7))]
        greedy = torch.stack(list(model.generate(idx[:, :4], 15, temperature=0)))
        return attend(q, k, v, 0.3), attend(q, k, v, 1.7), torch.cat(steps, 2), greedy, model(idx, idx)[0].detach()

    plain = results()
    calls = []
    monkeypatch.setattr(model_py, "flash_attn_func", lambda *a, **b: calls.append(1) or train_flash(*a, **b))
    monkeypatch.setattr(model_py, "attention_kernel", lambda *_: "flash_attn")
    train_same(plain, results(), 1e-10)
    train_same(plain[2], plain[0], 1e-12)
    assert len(calls) == 3 + 2 * 2 + 2  # not for a single token


# Sampling ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def train_trained(train_corpus, tmp_path_factory):
    """Two short runs, one with a padded vocabulary; the folder that holds them."""
    folder = tmp_path_factory.mktemp("out")
    for arch, vocab_size in (("ngpt", 257), ("rmsnorm", 300)):
        trainer.train(
            TrainConfig(
                **{
                    **TRAIN_TINY,
                    "max_steps": 80,
                    "eval_interval": 80,
                    "arch": arch,
                    "learning_rate": 0.02,
                    "vocab_size": vocab_size,
                    "data": train_corpus,
                    "out_dir": str(folder / arch),
                }
            ),
            say=None,
        )
    return folder


def test_sample_continues_what_it_learnt(train_trained):
    model, tokenizer, _ = trainer.load_model(train_trained / "ngpt" / "ckpt.pt")

    def text(prompt="1+1=2é\n", **options):
        return "".join(sampler.stream(model, tokenizer, prompt, **{"max_new_tokens": 60, **options}))

    greedy = [
        t.item() for t in model.generate(torch.tensor([[256, *"1+1=2é\n".encode()]]), 60, temperature=0, stop=256)
    ]
    assert (
        text(temperature=0)
        == text(top_k=1)
        == text(top_p=1e-6)
        == tokenizer.decode_bytes([t for t in greedy if t != 256]).decode()
    )
    assert text() == text() == text(b"1+1=2\xc3\xa9\n") and len({text(seed=s) for s in range(5)}) > 1
    assert (
        len(text(max_new_tokens=1)) <= 1 and set(text(temperature=0)) <= set("0123456789+=é\n") and text() != text("9")
    )
    assert text("") and text("x" * 1000) and not model.training  # longer than block_size


def test_sample_stops_at_end_of_text_and_survives_any_token(train_trained, monkeypatch):
    model, tokenizer, _ = trainer.load_model(train_trained / "rmsnorm" / "ckpt.pt")
    assert model.config.vocab_size == 300
    written = [65, 0xC3, 0xA9, 299, 257, 0xFF, 0xE6, 0x97, 0xA5, 66, 0xC3]

    def spell(tokens):
        """From here on the model writes these tokens."""
        rest = iter(tokens)
        monkeypatch.setattr(model_py, "pick", lambda *_: torch.tensor([next(rest)]))
        return "".join(sampler.stream(model, tokenizer, "abc", max_new_tokens=len(written)))

    assert spell(written) == "Aé�日B�"
    assert spell([65, 66, 256, 67]) == "AB" and spell([256]) == ""
    monkeypatch.undo()
    text = "".join(
        sampler.stream(model, tokenizer, "1", max_new_tokens=300, temperature=50.0)
    )  # ids beyond 256, cut UTF-8
    assert "�" in text


def test_sample_command(train_trained, train_command, tmp_path):
    one, other = (str(train_trained / arch) for arch in ("ngpt", "rmsnorm"))
    options = ["--prompt=3+4=", "--max_new_tokens=40", "--device=cpu"]
    code, first, err = train_command("sample.py", f"--out_dir={one}", *options)
    assert (code, err) == (0, "") and first.startswith("3+4=") and len(first) > 10
    assert train_command("sample.py", f"--out_dir={one}", *options)[1] == first
    assert train_command("sample.py", f"--out_dir={one}", *options, "--seed=5")[1] != first
    (tmp_path / "story.txt").write_text("3+4=")
    (tmp_path / "crlf.txt").write_bytes(b"3\r\n")
    assert "3\r\n" in train_command("sample.py", f"--out_dir={one}", *options, f"--prompt=FILE:{tmp_path / 'crlf.txt'}")[1]
    shutil.copytree(one, tmp_path / "a, b")
    assert train_command("sample.py", f"--out_dir={tmp_path / 'a, b'}", *options)[1] == first
    assert (
        train_command("sample.py", f"--out_dir={one}", *options, f"--prompt=FILE:{tmp_path / 'story.txt'}")[1] == first
    )
    _, greedy, _ = train_command("sample.py", f"--out_dir={one}", *options, "--temperature=0")
    for limit in ("--top_k=1", "--top_p=1e-9"):
        assert train_command("sample.py", f"--out_dir={one}", *options, "--temperature=2", limit)[1] == greedy != first
    _, second, _ = train_command("sample.py", f"--out_dir={other}", *options)
    code, both, _ = train_command("sample.py", f"--out_dir={one},{other}", *options, "--num_samples=2")
    _, third, _ = train_command("sample.py", f"--out_dir={other}", *options, "--seed=1338")
    assert both.endswith(f"{second}---\n{third}") and third != second
    assert code == 0 and 0 <= both.find(first) < both.find(other) < both.find(second) and both.count("3+4=") == 4
    assert "ngpt, step 80, best held-out loss " in both and "rmsnorm, step 80, best held-out loss " in both
    state = torch.load(Path(one, "ckpt.pt"), weights_only=True)
    state |= {"step": 7, "best_val_loss": math.inf}  # stopped before its first validation
    torch.save(state, tmp_path / "ckpt.pt")
    assert "ngpt, step 7\n" in train_command("sample.py", f"--out_dir={tmp_path},{other}", *options)[1]
    (tmp_path / "ckpt.pt").write_bytes(b"garbage")
    (tmp_path / "raw").write_bytes(b"\xff\xfe\x00")
    for words, says in (
        ([f"--out_dir={tmp_path}"], "not a whole checkpoint"),
        (["--prompt=FILE:nothing"], "nothing: cannot be read"),
        ([f"--prompt=FILE:{tmp_path / 'raw'}"], "raw: cannot be read"),
        (["--temperature=hot"], "expected a number"),
        (["--top_k=2.5"], "expected a whole number"),
        (["--topp=1"], "did you mean --top_p?"),
        (["--seed=4294967296"], "expected 0 to 2 ** 32 - 1"),
    ):
        code, _, err = train_command("sample.py", f"--out_dir={one}", *words)
        assert code == 2 and says in err and err.startswith("sample.py: ") and err.count("\n") == 1, err


# Faults ---------------------------------------------------------------------------------------------------------------


def fault_run(tmp_path):
    """A tiny corpus and the options of a short run on it."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} of the text to learn\n" for i in range(2000)))
    prep.prepare(str(text), name="tiny", data_dir=str(tmp_path / "data"))
    return dict(
        data=str(tmp_path / "data/tiny"),
        out_dir=str(tmp_path / "out"),
        max_steps=40,
        n_layer=1,
        n_embd=16,
        n_head=2,
        block_size=16,
        eval_tokens=256,
        dtype="float32",
        compile="false",
        device="cpu",
    )


def damaged(data, rng):
    """data with some bytes changed, cut off, added or replaced."""
    data, kind = bytearray(data), rng.randrange(5)
    if kind == 0:
        for _ in range(rng.choice([1, 3, 30])):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == 1:
        del data[rng.randrange(len(data)) :]
    elif kind == 2:
        data[rng.randrange(len(data)) : 0] = rng.randbytes(rng.choice([1, 100]))
    elif kind == 3:
        start = rng.randrange(len(data))
        del data[start : start + rng.choice([1, 2, 50])]
    else:
        start = rng.randrange(min(64, len(data)))
        data[start : start + 8] = rng.randbytes(8)
    return bytes(data)


@pytest.mark.parametrize("kind", ["shard", "checkpoint", "meta.json"])
def test_damaged_files_end_in_one_line(kind, tmp_path, rounds=50):
    """The run works all the same, or ends in a DataError of one line that names the file."""
    options = fault_run(tmp_path)
    train(TrainConfig(**{**options, "max_steps": 2}), say=None)
    folder = Path(options["data"])
    path = {
        "shard": next(folder.glob("*_train_*.bin")),
        "meta.json": folder / "meta.json",
        "checkpoint": Path(options["out_dir"], "ckpt.pt"),
    }[kind]
    whole, rng, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(rounds):
        path.write_bytes(damaged(whole, rng))
        try:
            if kind == "checkpoint":
                train(TrainConfig(**{**options, "max_steps": 2, "resume": "true"}), say=None)
                load_model(path)
            else:
                train(
                    TrainConfig(**{**options, "max_steps": 1, "eval_tokens": 16, "out_dir": str(tmp_path / "other")}),
                    say=None,
                )
        except DataError as error:
            refused += 1
            assert path.name in str(error) or kind == "meta.json", error
            assert "\n" not in str(error)
    assert refused > rounds / 4


def test_a_damaged_log_counts_as_far_as_it_can_be_read(tmp_path):
    options = fault_run(tmp_path) | {"max_steps": 3, "log_interval": 1}
    records = train(TrainConfig(**options), say=None)
    path, rng = Path(options["out_dir"], "log.jsonl"), random.Random(0)
    whole = path.read_bytes()
    assert trainer.read_log(path.parent) == records and trainer.length(path.parent) == records[-1]["tokens"]
    for _ in range(300):
        path.write_bytes(damaged(whole, rng))
        assert all({"step", "tokens"} <= record.keys() for record in trainer.read_log(path.parent))
        trainer.length(path.parent)
    first, second, *others = whole.splitlines(keepends=True)
    for bad in (b"\xff" + second, second[:9], second.replace(b"tokens", b"tokers"), b"7\n"):
        path.write_bytes(b"".join([first, bad, *others]))
        assert trainer.read_log(path.parent) == records[:1]
        assert train(TrainConfig(**options, resume="true"), say=None) == records[:1]


def test_damaged_command_lines_end_in_one_line():
    rng, refused = random.Random(0), 0
    names = [f.name for f in dataclasses.fields(TrainConfig)]
    for _ in range(200):
        words = [
            f"--{rng.choice(names)}={rng.choice(['1', '-3', 'x', '0.5', 'true', '', 'nan', '1e9', 'ngpt'])}"
            for _ in range(3)
        ]
        word = rng.randrange(3)
        words[word] = damaged(words[word].encode(), rng).decode("latin-1")
        try:
            resolve(parse(TrainConfig, words, ""))
        except ConfigError as error:
            refused += 1
            assert "\n" not in str(error).replace(words[word], "")
        except SystemExit:  # --help
            pass
    assert refused > 50


def survives_kills(tmp_path, kills, seed):
    """Kills a run `kills` times at random moments, continues it, and compares its end with an undisturbed one."""
    options = fault_run(tmp_path) | dict(
        arch="angpt", max_steps=300, checkpoint_interval=7, eval_interval=50, dropout=0.1
    )
    train(TrainConfig(**options), say=None)
    want, rng = torch.load(Path(options["out_dir"], "ckpt.pt"), weights_only=True), random.Random(seed)
    options["out_dir"] += "_killed"
    words = [f"--{name}={value}" for name, value in options.items()] + ["--resume=auto"]
    command = [sys.executable, str(Path(__file__).with_name("train.py")), *words]
    for _ in range(kills):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            process.wait(rng.uniform(1.5, 6))
        except subprocess.TimeoutExpired:
            process.kill()
        process.wait()
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
    got = torch.load(Path(options["out_dir"], "ckpt.pt"), weights_only=True)
    assert got["step"] == want["step"] == 300
    assert all(torch.equal(got["model"][name], tensor) for name, tensor in want["model"].items())
    steps = [json.loads(line)["step"] for line in Path(options["out_dir"], "log.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps)) and steps[-1] == 300


def test_a_run_killed_at_random_moments_ends_as_if_nothing_had_happened(tmp_path):
    survives_kills(tmp_path, kills=2, seed=0)


# Diagnoses -----------------------------------------------------------------------------------------------------------


@train_every_arch
def test_diagnoses_are_their_definitions_and_change_nothing(train_run, train_at, train_corpus, arch):
    options = dict(arch=arch, max_steps=6, eval_interval=2, dropout=0.1, bias=arch == "layernorm", pn_warmup=3, seed=5)
    options |= dict(learning_rate=0.02, qk_norm=arch == "rmsnorm", pos="learned" if arch == "angpt" else "rope")
    plain, undisturbed = train_run("plain", **options)
    hooks = []
    train_at(None, lambda model: hooks.extend(block._forward_hooks for block in model.blocks))
    log, state = train_run(**options, diagnose=True)
    assert train_told(log) == train_told(plain) and len(hooks) == 12 and not any(hooks)
    assert all(np.array_equal(state["model"][name], p) for name, p in undisturbed["model"].items())
    train_same(state["optimizer"]["state"], undisturbed["optimizer"]["state"])
    assert not any({*DIAGNOSES} & set(r) for r in plain)
    assert [r["step"] for r in log if {*DIAGNOSES} <= set(r)] == [0, 2, 4, 6]
    assert all(v == 0 for layers in log[0]["momentum_var"].values() for v in layers)

    c = trainer.resolve(TrainConfig(**{**TRAIN_TINY, **options})).model_config()
    model = GPT(c).eval()
    model.load_state_dict(state["model"])
    stream, got = torch.from_numpy(train_stream(train_corpus, "val")), log[-1]
    x, y = stream[: 4 * 32].view(4, 32), stream[1 : 4 * 32 + 1].view(4, 32)
    model(x, y)[1].backward()
    h = array(model.wte.weight)[x.numpy()] + (array(model.wpe.weight) if c.pos == "learned" else 0)
    norms = [np.linalg.norm(h, axis=-1).mean()]
    for block in model.blocks:
        h = ref_block(block, c, h, angles(32, 16 if c.pos == "rope" else 0))
        norms.append(np.linalg.norm(h, axis=-1).mean())
    assert got["residual_norm"] == pytest.approx(norms, rel=1e-4) and len(norms) == 3

    names = ["wte", "lm_head"] + ["wpe"] * (c.pos == "learned")
    matrices = {name: [getattr(model, name).weight] for name in names}
    matrices |= {n: [getattr(b, n).weight for b in model.blocks] for n in ("w_qkv", "w_o", "w_up", "w_down")}
    ids = [id(p) for p in model.parameters() if p.dim() == 2]  # AdamW numbers these first
    moments = {
        name: [state["optimizer"]["state"][ids.index(id(p))]["exp_avg"] for p in ps] for name, ps in matrices.items()
    }
    for key, value_of, of in (
        ("grad_l1", lambda p: np.abs(array(p.grad)).mean(), matrices),
        ("row_norm", lambda p: np.sqrt((array(p) ** 2).sum(1)).mean(), matrices),
        ("row_norm_max", lambda p: np.sqrt((array(p) ** 2).sum(1)).max(), matrices),
        ("momentum_var", lambda m: np.var(array(m)), moments),
    ):
        want = {name: pytest.approx([value_of(p) for p in ps], rel=1e-3) for name, ps in of.items()}
        assert got[key] == want, key

    small = {"ngpt": 32**-0.5, "angpt": 0.01}.get(arch)
    scales = {"alpha_a": (0.05, small), "alpha_m": (0.05, small)} if arch in SPHERE else {"norm1": 1, "norm2": 1}
    scales |= {
        "ngpt": {"s_qk": (1, small), "s_u": (1, 1), "s_v": (1, 1)},
        "normformer": {"norm_attn": 1, "norm_ffn": 1},
    }.get(arch, {})
    want = {
        n: [value(getattr(b, n), *how) if arch in SPHERE else getattr(b, n).weight for b in model.blocks]
        for n, how in scales.items()
    }
    want |= {"s_z": [value(model.s_z, 1, small)]} if arch in SPHERE else {"norm_f": [model.norm_f.weight]}
    want |= {
        n: [getattr(b, n) for b in model.blocks]
        for n in {"angpt": ["g"], "rmsnorm": ["g"], "normformer": ["head_scale"]}.get(arch, [])
    }
    assert got["scale"] == {n: pytest.approx([np.abs(array(v)).mean() for v in vs], rel=1e-4) for n, vs in want.items()}


def test_diagnoses_may_begin_when_a_run_goes_on(train_run, train_at):
    options = dict(arch="powernorm", max_steps=6, pn_warmup=2, dropout=0.1, eval_interval=2)
    _, want = train_run("whole", **options)
    train_at(3, train_terminate)
    train_run(**options)
    train_at(99, None)
    log, state = train_run(**options, diagnose=True, resume="true")
    assert [r["step"] for r in log if "scale" in r] == [4, 6]
    train_same(train_kept(state), train_kept(want))


def test_the_stability_test_raises_the_rate_evenly():
    words = re.findall(r"python train.py (.*warmup_ratio.*)", trainer.__doc__)[0].split()
    c = trainer.resolve(parse(TrainConfig, [*words, "--arch=powernorm"], ""))
    rates = [trainer.learning_rate(c, step) for step in range(c.max_steps)]
    assert np.allclose(np.diff([0, *rates]), 5e-5, rtol=1e-6) and c.grad_clip == 0 and c.pn_warmup < c.max_steps


# bench.py ============================================================================================================

BENCH_TINY = "--n_layer=1 --n_head=2 --n_embd=16 --block_size=16 --vocab_size=32 --device=cpu --threads=1".split()


def bench_run(tmp_path, name, *options):
    """The JSON of a tiny benchmark."""
    bench.main([name, f"--out_dir={tmp_path}", *BENCH_TINY, *options])
    png = (tmp_path / f"{name}.png").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) > 5000
    return json.loads((tmp_path / f"{name}.json").read_text())


def bench_is_spread(s):
    return set(s) == {"median", "p10", "p90"} and 0 < s["p10"] <= s["median"] <= s["p90"]


def test_bench_paired_ratio():
    # Twice as long in every round, though the rounds themselves differ tenfold.
    assert bench.paired_ratio([2, 20, 4], [1, 10, 2]) == {"median": 2, "p10": 2, "p90": 2}
    # 1, 3, 2: the median of the ratios, 2, is not the ratio of the medians, 6/4.
    got = bench.paired_ratio([4, 6, 8], [4, 2, 4])
    assert got == {"median": 2, "p10": pytest.approx(1.2), "p90": pytest.approx(2.8)}


def test_bench_speed(tmp_path, capsys):
    report = bench_run(
        tmp_path,
        "speed",
        "--archs=rmsnorm+qk_norm,ngpt",
        "--steps=3",
        "--warmup=1",
        "--batch_size=2",
        "--compile=false",
        "--dtype=float32",
    )
    table = capsys.readouterr().out
    assert report["baseline"] == "rmsnorm+qk_norm" and list(report["archs"]) == ["rmsnorm+qk_norm", "ngpt"]
    for name, arch in report["archs"].items():
        assert f"\n{name} " in table
        assert len(arch["seconds"]) == len(arch["project_seconds"]) == 3
        assert all(0 < part < whole for part, whole in zip(arch["project_seconds"], arch["seconds"]))
        assert all(bench_is_spread(arch[key]) for key in ("step", "project", "project_share", "ratio"))
        assert arch["tokens_per_s"] == pytest.approx(2 * 16 / arch["step"]["median"]) and arch["mfu"] > 0
        # float32 weights, gradients and two moments at once, and some activations
        assert 16 * arch["parameters"] < arch["memory_gb"] * 1e9 < 16 * arch["parameters"] + 3e6
    assert report["archs"]["rmsnorm+qk_norm"]["ratio"] == {"median": 1, "p10": 1, "p90": 1}
    machine = report["machine"]
    assert machine["threads"] == 1 and machine["dtype"] == "float32" and machine["compile"] is False
    assert machine["processor"] in table and machine["torch"] in table


@pytest.mark.parametrize("how, told, wholes", [("false", False, []), ("true", True, [False]), ("whole", "whole", [True])])
def test_bench_speed_compiles_as_asked(how, told, wholes, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "compile_", lambda model, whole: asked.append(whole))
    report = bench_run(tmp_path, "speed", "--archs=ngpt", "--steps=1", "--warmup=1", f"--compile={how}", "--dtype=float32")
    assert report["machine"]["compile"] == told and asked == wholes


def test_bench_speed_compiles_each_arch_as_train_would(tmp_path, monkeypatch):
    """Numbers like 1e-5 and Scale's init / scale are constants, though several archs take turns at one piece of code."""
    compiled, inputs = torch.compile, []

    def backend(graph, given):
        inputs.extend(given)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda model: compiled(model, backend=backend))
    torch.compiler.reset()
    bench_run(tmp_path, "speed", "--archs=ngpt,angpt", "--steps=1", "--warmup=1", "--compile=whole", "--dtype=float32")
    assert inputs and all(isinstance(x, torch.Tensor) and (x.dim() or x.requires_grad) for x in inputs)


def test_bench_speed_compares_kernels_of_attention(tmp_path, monkeypatch):
    before, used = bench.optimizer_step, []
    monkeypatch.setattr(bench, "optimizer_step", lambda *a: used.append(model_py.ATTENTION) or before(*a))
    options = "--archs=ngpt,angpt --attention=plain,sdpa-math --steps=2 --warmup=1 --compile=false --dtype=float32"
    report = bench_run(tmp_path, "speed", *options.split())
    assert list(report["archs"]) == ["ngpt plain", "ngpt sdpa-math", "angpt plain", "angpt sdpa-math"]
    assert report["machine"]["attention"] == "plain,sdpa-math"
    monkeypatch.setattr(bench, "Trainee", lambda *_: pytest.fail("too late"))
    with pytest.raises(ConfigError, match="attention=sdpa-cudnn does not train this model here, on cpu in float32"):
        bench_run(tmp_path, "speed", "--attention=plain,sdpa-cudnn", "--dtype=float32")
    assert used.count("plain") == used.count("sdpa-math") == len(used) / 2 and model_py.ATTENTION == "auto"


@pytest.mark.parametrize("name", ["ngpt", "angpt"])
def test_bench_steps_are_whole_training_steps(name):
    """Weights move and are projected; every round runs the job, and the warm-up's results are left out."""
    config = bench.SpeedConfig(
        archs=name,
        n_layer=1,
        n_head=2,
        n_embd=16,
        block_size=16,
        vocab_size=32,
        batch_size=2,
        device="cpu",
        dtype="float32",
        steps=2,
        warmup=3,
    )
    c = bench.train_configs(config)[name]
    trainee, calls = bench.Trainee(c, bench.machine_for(c), compiles=False), []
    before = trainee.model.lm_head.weight.detach().clone()
    results = bench.rounds({name: lambda: calls.append(trainee.step()) or calls[-1]}, config)
    assert len(calls) == 5 and results == {name: calls[3:]}
    after = trainee.model.lm_head.weight.detach()
    assert not after.equal(before) and after.norm(dim=1).max() < 1 + 1e-5


@pytest.mark.parametrize("fold", ["false", "true"])
def test_bench_sample(tmp_path, fold):
    report = bench_run(
        tmp_path,
        "sample",
        f"--fold={fold}",
        "--archs=layernorm,angpt",
        "--batch_sizes=1,2",
        "--prompt_tokens=4",
        "--new_tokens=5",
        "--steps=2",
        "--warmup=1",
    )
    for arch in report["archs"].values():
        assert list(arch) == ["1", "2"]
        assert all(len(r["tokens_per_s"]) == 2 and bench_is_spread(r["rate"]) for r in arch.values())
    assert all(r["ratio"]["p10"] == r["ratio"]["p90"] == 1 for r in report["archs"]["layernorm"].values())


@pytest.mark.parametrize(
    "words, expected",
    [
        (["speed", "--archs=rmsnorm,ngtp"], "did you mean ngpt?"),
        (["speed", "--archs=rmsnorm+qknorm"], "did you mean qk_norm?"),
        (["sample", "--new_tokens=300"], "block_size=256"),
        (["sped"], "did you mean speed?"),
    ],
)
def test_bench_errors_are_one_line(words, expected):
    done = subprocess.run([sys.executable, bench.__file__, *words], capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("bench.py: ") and done.stderr.count("\n") == 1 and expected in done.stderr


# The race ------------------------------------------------------------------------------------------------------------


def test_race_reads_known_speed_ups_off_power_laws():
    tokens, law = np.array([1e6, 2e6, 4e6]), lambda n: 3 * n**-0.1
    for factor in (0.4, 1, 1.7, 3, 20):  # within the lengths, and beyond them on both sides
        assert bench.tokens_to_reach(law(4e6), tokens, law(factor * tokens)) == pytest.approx(4e6 / factor)
    kinked = [1, 2, 8], [4, 2, 1]
    assert [bench.tokens_to_reach(loss, *kinked) for loss in (8, 4, 3, 2**0.5, 1, 0.5)] == pytest.approx(
        [0.5, 1, 2 ** math.log2(4 / 3), 4, 8, 32]
    )
    assert bench.tokens_to_reach(1.5, [1, 2, 4, 8], [2, 1, 3, 1]) == pytest.approx(2 ** math.log2(2 / 1.5))  # the first
    assert bench.tokens_to_reach(1, [1, 2, 4], [3, 2, 2]) == math.inf  # it never will
    for diverged in ([3, math.inf, 1], [math.inf, 3, 1]):
        assert bench.tokens_to_reach(2, [1, 2, 4], diverged) == math.inf
    assert math.isnan(bench.tokens_to_reach(1, [1], [2]))


def test_race_pairs_seeds_in_its_interval():
    tokens, law = np.array([1e6, 2e6, 4e6]), lambda n: 3 * n[:, None] ** -0.1
    luck = np.array([[1.02, 0.99, 1.0]])  # of a seed, the same for both: it cancels
    got = bench.speedup(tokens, law(tokens) * luck, law(1.4 * tokens) * luck, seed=1)
    assert got == pytest.approx({"factor": 1.4, "low": 1.4, "high": 1.4, "tokens": 4e6 / 1.4})

    rng = np.random.default_rng(0)
    a, b = (law(n) * rng.uniform(0.99, 1.01, (3, 3)) for n in (tokens, 1.4 * tokens))
    every = []  # of the 27 draws each has more than 2.5%, so the interval goes from the least to the largest factor
    for draw in itertools.product(range(3), repeat=3):
        target, own = a[-1, list(draw)].mean(), b[:, list(draw)].mean(1)
        i = next((i for i in (0, 1) if own[i + 1] <= target), 1)
        slope = math.log(own[i + 1] / own[i]) / math.log(2)
        every.append(4e6 / (tokens[i] * 2 ** (math.log(target / own[i]) / slope / math.log(2))))
    got = bench.speedup(tokens, a, b, seed=1)
    assert (got["low"], got["high"]) == pytest.approx((min(every), max(every))) and got["low"] < got["factor"] < got[
        "high"
    ]
    assert bench.speedup(tokens, a, b, seed=1) == got
    assert bench.speedup(tokens, a[:, :2], b[:, :2], seed=1)["low"] is None
    a[-1, 0] = math.inf  # no target
    assert math.isnan(bench.speedup(tokens, a, b, seed=1)["factor"])


def test_race_basin():
    def got(slope, places):
        return bench.basin({0.01 * 2.0**k: 1 + slope * abs(k) for k in places})

    want = {"low": 0.01 / 2**2.5, "high": 0.01 * 2**2.5, "factor": 32, "at_least": False}
    assert got(0.008, (3, -3, 0, 1, -1, 2, -2)) == pytest.approx(want)
    assert got(0.008, (-3, -2, -1, 0, 1)) == pytest.approx({**want, "high": 0.02, "factor": 2**3.5, "at_least": True})
    jump = bench.basin({1.0: 2.0, 2.0: 1.0, 4.0: math.inf})  # where between 2 and 4 it diverges is not known
    assert jump == pytest.approx({"low": 2**0.98, "high": 2, "factor": 2**0.02, "at_least": True})


def test_race_widens_its_sweep_while_the_best_is_at_an_edge():
    def tried(loss):
        losses = {}
        while new := set(bench.rates_to_try(1.0, losses)) - set(losses):
            losses |= {rate: loss(math.log2(rate)) for rate in new}
        return sorted(math.log2(rate) for rate in losses)

    assert tried(lambda k: abs(k)) == [-1, 0, 1]
    assert tried(lambda k: abs(k - 3)) == [-1, 0, 1, 2, 3, 4]
    assert tried(lambda k: abs(k + 2)) == [-3, -2, -1, 0, 1]
    assert tried(lambda k: k if k < -2 else math.inf) == list(range(-7, 2))  # nine, and no more
    assert tried(lambda k: -k) == list(range(-1, 8))


@pytest.fixture
def race_config(tmp_path, train_corpus, monkeypatch):
    monkeypatch.setattr(bench, "matmul_flops", lambda *_: 1e11)

    def config(**options):
        tiny = dict(n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=4, total_batch_size=64, eval_tokens=500)
        tiny |= dict(
            data=train_corpus, device="cpu", dtype="float32", runs_dir=f"{tmp_path}/runs", out_dir=f"{tmp_path}/bench"
        )
        return bench.RaceConfig(**{**tiny, "tokens": 640, "timing": False, "workers": 1, **options})

    return config


@pytest.fixture
def race_inside(monkeypatch):
    """The runs of a race happen at once, in this process -> (command, environment, cores) of each."""
    ran = []

    class Inside:
        def __init__(self, command, env, stdout, stderr):
            ran.append([command, env])
            self.pid, self.returncode = "pid", 0
            try:
                trainer.train(parse(TrainConfig, command[2:], ""), say=None)
            except (trainer.Diverged, ConfigError) as error:
                self.returncode = 3 if isinstance(error, trainer.Diverged) else 2
                stderr.write(f"a warning\ntrain.py: {error}\n")

        def poll(self):
            return self.returncode

    monkeypatch.setattr(bench.subprocess, "Popen", Inside)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: ran[-1].append((pid, cores)), raising=False)
    monkeypatch.setattr(bench.time, "sleep", lambda _: None)
    return ran


def test_race_plans_sweeps_then_every_length_and_seed(race_config, monkeypatch):
    meta = bench.read_meta
    monkeypatch.setattr(bench, "read_meta", lambda folder: {**meta(folder), "vocab_size": 300})
    race = bench.Race(race_config(archs="rmsnorm+qk_norm,angpt", lengths=3, seeds=2, seed=7))
    assert {c.vocab_size for c in race.configs.values()} == {300}
    paper = bench.Race(race_config(archs="angpt", size="32m", batch_size=1))
    assert paper.configs["angpt"].vocab_size == 50304  # as train.py would have it
    start = {arch: c.learning_rate for arch, c in race.configs.items()}
    assert start == pytest.approx({"rmsnorm+qk_norm": 2e-3 * 8**0.5, "angpt": 4e-3 * 8**0.5})
    best, asked = {"rmsnorm+qk_norm": 4 * start["rmsnorm+qk_norm"], "angpt": start["angpt"]}, []
    while todo := [run for run in race.wanted() if run not in race.losses]:
        asked.append(todo[0])
        race.losses[todo[0]] = 1 + abs(math.log2(todo[0].rate / best[todo[0].arch]))
    for arch, octaves in (("rmsnorm+qk_norm", [-1, 0, 1, 2, 3]), ("angpt", [-1, 0, 1])):
        mine = [run for run in asked if run.arch == arch]
        sweep, rest = mine[: len(octaves)], mine[len(octaves) :]
        assert sweep == [bench.RaceRun(arch, start[arch] * 2.0**k, 5, 7) for k in octaves]  # 640 tokens are 10 steps
        assert rest == [bench.RaceRun(arch, best[arch], *run) for run in ((10, 7), (10, 8), (5, 8), (2, 7), (2, 8))]
    race.losses = {run: math.inf for run in race.losses}
    with pytest.raises(trainer.Diverged, match="angpt|rmsnorm"):
        while todo := [run for run in race.wanted() if run not in race.losses]:
            race.losses[todo[0]] = math.inf


def test_race_report(race_config, race_inside, tmp_path, train_corpus, monkeypatch, capsys):
    monkeypatch.setattr(bench, "MOST_RATES", 3)
    batches, original = {}, trainer.Tokens.batch

    def batch(tokens, indices, device):
        x, y = original(tokens, indices, device)
        batches.setdefault(len(race_inside), []).append((x.tolist(), y.tolist()))
        return x, y

    monkeypatch.setattr(trainer.Tokens, "batch", batch)
    options = dict(archs="rmsnorm+qk_norm,angpt", lengths=2, timing=True, steps=2, warmup=1, workers=2)
    bench.race(race_config(**options))
    table, report = capsys.readouterr().out, json.loads((tmp_path / "bench" / "race.json").read_text())
    assert len(race_inside) == 16 and (tmp_path / "bench" / "race.png").stat().st_size > 5000

    # The same tokens in the same order, in training and validation, for one seed, and others for another
    read, logs = {}, {}
    for i, (command, env, (pid, cores)) in enumerate(race_inside, 1):
        c = parse(TrainConfig, command[2:], "")
        logs[c.arch, c.learning_rate, c.max_steps, c.seed] = log = [
            json.loads(r) for r in Path(c.out_dir, "log.jsonl").open()
        ]
        read.setdefault((c.max_steps, c.seed), []).append(batches[i])
        assert (
            command[:2] == [sys.executable, trainer.__file__]
            and pid == "pid"
            and env["OMP_NUM_THREADS"] == str(len(cores))
        )
        assert not Path(c.out_dir, "ckpt.pt").exists() and [r["step"] for r in log if "val_loss" in r] == [
            0,
            c.max_steps,
        ]
        assert log[0]["config"]["qk_norm"] == (c.arch == "rmsnorm") and (c.compile, c.resume) == ("false", "auto")
    assert sorted(read) == [(n, seed) for n in (5, 10) for seed in (1337, 1338, 1339)]
    assert all(one == same[0] for same in read.values() for one in same) and read[10, 1337][0] != read[10, 1338][0]

    assert report["tokens"] == [320, 640] and report["baseline"] == "rmsnorm+qk_norm"
    for name, r in report["archs"].items():
        arch, rate = name.split("+")[0], r["learning_rate"]
        assert r["losses"] == [
            [logs[arch, rate, n, seed][-1]["val_loss"] for seed in (1337, 1338, 1339)] for n in (5, 10)
        ]
        sweep = {float(k): v for k, v in r["sweep"]["losses"].items()}
        assert sweep == {k: logs[arch, k, 10, 1337][-1]["val_loss"] for k in sweep} and len(sweep) == 3
        assert rate == min(sweep, key=sweep.get) and r["at_edge"] == (rate != sorted(sweep)[1])
        assert (f"{name}: the best learning rate is at the edge" in table) == r["at_edge"]
        assert r["mean"] == pytest.approx(np.mean(r["losses"], 1)) and r["std"] == pytest.approx(
            np.std(r["losses"], 1, ddof=1)
        )
        assert all(f"{mean:.4f} +- {std:.4f}" in table for mean, std in zip(r["mean"], r["std"]))
        ratio = json.loads((tmp_path / "bench" / "race" / "speed.json").read_text())["archs"][name]["ratio"]
        assert r["time_ratio"] == ratio and r["speedup_in_time"]["factor"] == pytest.approx(
            r["speedup"]["factor"] / ratio["median"]
        )
    base, own = report["archs"].values()
    assert base["speedup"] == {"factor": 1, "low": None, "high": None, "tokens": 640} and base["steps_needed"] == 10
    needed = bench.tokens_to_reach(base["mean"][-1], [320, 640], own["mean"])
    assert own["speedup"]["tokens"] == pytest.approx(needed) and own["speedup"]["factor"] == pytest.approx(640 / needed)
    assert own["steps_needed"] == pytest.approx(needed / 64) and own["speedup"]["low"] <= own["speedup"]["high"]

    monkeypatch.setattr(bench, "draw_race", lambda *_: SimpleNamespace(savefig=lambda *_, **__: None))
    bench.race(race_config(**{**options, "timing": False}))
    assert len(race_inside) == 16  # all was there
    capsys.readouterr()
    bench.race(race_config(**{**options, "timing": False, "archs": "angpt", "seeds": 1, "lengths": 1}))
    assert len(race_inside) == 16 and "No intervals" in (out := capsys.readouterr().out) and "No speed-up" in out
    assert "+-" not in out and "nan" not in out
    bench.race(race_config(**{**options, "timing": False, "archs": "angpt", "seeds": 1, "lengths": 1, "mlp": "gelu"}))
    assert len(race_inside) == 19  # other options, other runs
    bench.race(race_config(**{**options, "timing": False}))
    assert len(race_inside) == 19  # beside which the first ones stay
    monkeypatch.setitem(trainer.RECIPES, "angpt", {**trainer.RECIPES["angpt"], "weight_decay": 0.01})
    bench.race(race_config(**{**options, "timing": False, "archs": "angpt", "seeds": 1, "lengths": 1}))
    assert len(race_inside) == 22  # another recipe


def test_race_remembers_a_divergence_and_ends_with_a_failure(race_config, race_inside, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench, "rates_to_try", lambda start, losses: [start / 2, start, start * 2.0**100])
    for _ in range(2):
        bench.race(race_config(archs="layernorm", lengths=1, seeds=1))
        assert len(race_inside) == 3 and "Diverged: layernorm at rate" in capsys.readouterr().out
    report = json.loads((tmp_path / "bench" / "race.json").read_text())  # plain JSON, which has no infinity
    assert list(report["archs"]["layernorm"]["sweep"]["losses"].values())[-1] is None
    assert [json.loads(p.with_name("log.jsonl").open().readline())["step"] for p in tmp_path.rglob("diverged.txt")] == [
        0
    ]
    with pytest.raises(DataError, match="exit code 2: train.py: vocab_size=99: the corpus needs at least 257"):
        bench.race(race_config(archs="layernorm", vocab_size=99))


@pytest.mark.parametrize("number, rank, ends", [("SIGINT", None, True), ("SIGTERM", None, False), ("SIGINT", "0", False)])
def test_a_second_ctrl_c_ends_a_step_at_once(number, rank, ends, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(trainer.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("RANK", rank) if rank else monkeypatch.delenv("RANK", raising=False)
    with trainer.Interrupts() as interrupts:
        for later in (0, 0.5, 0.4):  # `timeout` sends two, one right after the other
            now[0] += later
            signal.raise_signal(getattr(signal, number))
        assert interrupts.asked
        now[0] += 0.2
        with pytest.raises(KeyboardInterrupt) if ends else contextlib.nullcontext():
            signal.raise_signal(getattr(signal, number))


def test_race_goes_on_where_it_was_stopped(race_config, monkeypatch, capsys, tmp_path, request):
    """A real run, stopped in its midst; it goes on to the same end as one that nobody stopped."""
    monkeypatch.setattr(bench, "rates_to_try", lambda start, losses: [start])
    options = dict(archs="angpt", tokens=200 * 64, lengths=1, seeds=1, keep=True)
    sleep = time.sleep

    def waiting(seconds):
        sleep(0.02)
        for log in tmp_path.glob("runs/*/*/log.jsonl"):
            if len(log.read_text().splitlines()) > 2:  # step 20
                signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(bench.time, "sleep", waiting)
        bench.race(race_config(**options))
    said = capsys.readouterr().out
    again = shlex.split(said.split("To go on: ")[1])
    assert again[:3] == ["python", "bench.py", "race"] and not (tmp_path / "bench").exists()
    assert parse(bench.RaceConfig, again[3:], "") == race_config(**options)
    (path,) = tmp_path.glob("runs/*/*/ckpt.pt")
    stopped, begun = torch.load(path, weights_only=True)["step"], path.with_name("log.jsonl").read_text()
    assert 20 <= stopped < 200

    ran = request.getfixturevalue("race_inside")
    bench.race(race_config(**options))
    bench.race(race_config(**options, runs_dir=f"{tmp_path}/whole"))
    assert len(ran) == 2
    log = path.with_name("log.jsonl").read_text()
    assert [json.loads(line)["step"] for line in log.splitlines()] == list(range(0, 201, 10)) and log.startswith(begun)
    (other,) = tmp_path.glob("whole/*/*/ckpt.pt")
    got, want = (torch.load(p, weights_only=True) for p in (path, other))
    assert got["step"] == want["step"] == 200
    train_same(got["model"], want["model"])


@pytest.mark.parametrize(
    "words, expected",
    [
        (["race", "--device=gpu"], "device='gpu': expected one of auto, cpu, cuda, mps"),
        (["race", "--dtype=float99"], "dtype='float99': expected one of auto, float32, bfloat16"),
        (["race", "--tokens=1000"], "expected at least 8192"),
        (["race", "--archs=angtp"], "did you mean angpt?"),
        (["race", "--data=nowhere"], "nowhere: no corpus here"),
        (["race", "--seeds=0"], "seeds=0: expected at least 1"),
    ],
)
def test_race_errors_are_one_line(words, expected, train_corpus):
    data = [] if "--data=nowhere" in words else [f"--data={train_corpus}"]
    with pytest.raises((ConfigError, DataError), match=re.escape(expected)) as error:
        bench.main(["race", "--dtype=float32", "--device=cpu", *data, *words[1:]])
    assert "\n" not in str(error.value)

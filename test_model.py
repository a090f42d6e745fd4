"""Every block against its formula written out, then all else: python -m pytest"""
import builtins
import contextlib
import copy
import errno
import functools
import gzip
import hashlib
import io
import json
import math
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from unittest.mock import patch
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken
import torch
import torch.nn.functional as F

import bench
import model as model_py
import prepare as prep
import sample as sampler
import train as train_py
from model import ARCHS, attend, Cache, ConfigError, GPT, GPTConfig, PowerNorm, unit
from prepare import DataError, prepare, read_meta, read_shard, run_script, write_json, write_shard
from train import (batches, Diverged, evaluate, learning_rate, load_model, make_optimizer,
                   optimizer_step, Process, read_checkpoint, read_log, RECIPES, resolve, Tokens,
                   train, TrainConfig)

# For its --help, each command parses the source of train.py and model.py. Once is enough here.
prep.read_comments = functools.cache(prep.read_comments)

# ==================================================================================================
# model.py

torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other

PRE_NORM = ["layernorm", "rmsnorm", "powernorm", "normformer"]
SPHERE = ["ngpt", "angpt"]
SEVEN = {arch: dict(arch=arch) for arch in PRE_NORM + SPHERE}
SEVEN["gpt+"] = dict(arch="rmsnorm", qk_norm=True)
TINY = dict(vocab_size=17, block_size=12, n_layer=2, n_head=2, n_embd=16)
GPT2 = dict(pos="learned", mlp="gelu", bias=True, tie=True)
every_arch = pytest.mark.parametrize("arch", SEVEN)
eval_and_train = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])


def tiny_gpt(arch, **options):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)         # for the rope tables too
    try:
        return GPT(GPTConfig(**TINY | SEVEN.get(arch, dict(arch=arch)) | options)).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def gaussian(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some_tokens(*shape, vocab=17, seed=2):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


IDX = some_tokens(3, 12)
TARGETS = some_tokens(3, 12, seed=5)


@torch.no_grad()
def roughened(model):
    """Every number moved from its first value, so that a forgotten gain or a swapped axis shows."""
    for seed, (name, p) in enumerate(model.state_dict().items()):
        noise = gaussian(*p.shape, seed=seed)
        if p.dim() == 2:
            p.copy_(noise / p.shape[1] ** 0.5)
        elif name.endswith("psi2"):                # stays positive
            p.copy_(0.5 + noise ** 2)
        elif not name.endswith("steps"):
            p.copy_(p * (1 + 0.3 * noise) + 0.3 * noise * (p == 0))
        if "alpha" in name:
            p[::3] *= -1                           # the forward takes |alpha|
    return model


def assert_close(got, want, tol=1e-11):
    assert got.shape == want.shape
    assert (got - want).abs().max() <= tol * want.abs().max()


def assert_same_state(state, want, tol=0.0):
    assert state.keys() == want.keys()
    for name, tensor in state.items():
        assert_close(tensor, want[name], tol)


def assert_same_gradients(model, other):
    for p, q in zip(model.parameters(), other.parameters()):
        assert_close(p.grad, q.grad)


def generated(model, idx, n, **options):
    return torch.stack(list(model.generate(idx, n, **options)), 1)


# ---- The equations once more: elementary operations, one head at a time, nothing of model.py -----

def ref_unit(x):
    return x / (x * x).sum(-1, keepdim=True).sqrt()


def ref_silu(x):
    return x / (1 + (-x).exp())


def ref_nu_acf():
    """1 / sqrt(E[SiLU(t)^2]) where t = sqrt(d) z has variance 1/4: z is on a unit sphere in 4d."""
    t = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    density = (-2 * t ** 2).exp() / math.sqrt(math.pi / 2)
    return torch.trapezoid(ref_silu(t) ** 2 * density, t) ** -0.5


def ref_turn(x, pairs):
    """Channels i, i + pairs of (B, T, d_k) are a point in a plane, turned by t 10000^(-i/pairs)."""
    angle = torch.arange(x.shape[1])[:, None] * 10000.0 ** -(torch.arange(pairs).double() / pairs)
    z = torch.complex(x[..., :pairs], x[..., pairs:2 * pairs]) * torch.exp(1j * angle)
    return torch.cat((z.real, z.imag, x[..., 2 * pairs:]), -1)


def plain_attention(q, k, v, scale):
    """softmax(scale q k^T + M) v of (..., T, d_k), with moderate scores; queries are the last."""
    weights = (scale * q @ k.transpose(-2, -1)).exp().tril(k.shape[-2] - q.shape[-2])
    return (weights / weights.sum(-1, keepdim=True)).type_as(v) @ v


def ref_group_scale(x):
    groups = x.reshape(*x.shape[:2], 4, -1)
    return (groups / ((groups ** 2).mean(-1, keepdim=True) + 1e-5).sqrt()).reshape(x.shape)


def ref_norm(arch, x, weight, bias=0, psi2=None, nu=None, steps=0, warmup=None):
    """A norm layer; warmup=None means evaluation."""
    if arch == "rmsnorm":
        xhat = x / ((x ** 2).mean(-1, keepdim=True) + 1e-6).sqrt()
    elif arch == "powernorm":
        x = ref_group_scale(x)
        if warmup is not None and steps < warmup:
            psi2 = (x.detach() ** 2).mean((0, 1))
        xhat = x / (psi2 + 1e-5).sqrt()
        if warmup is not None:  # the published backward: (g - nu xhat) / psi, psi a constant
            xhat.register_hook(lambda g: g - nu * xhat.detach())
    else:
        x = x - x.mean(-1, keepdim=True)
        xhat = x / ((x ** 2).mean(-1, keepdim=True) + 1e-5).sqrt()
    return weight * xhat + bias


def under(p, name):
    """Of parameters by name those of one module."""
    own = [key for key in p if key.startswith(name + ".")]
    return {key.removeprefix(name + "."): p[key] for key in own}


def linear(p, name, x):
    return x @ p[name + ".weight"].T + p.get(name + ".bias", 0)


class Written:
    """A whole GPT, written out, with a model's parameters.

    The method of an arch is its block. It takes p, the block's own parameters by name, and h.
    """
    unit = staticmethod(ref_unit)

    def __init__(self, model):
        self.c = model.config
        self.d = self.c.n_embd
        self.d_k = self.d // self.c.n_head
        self.warmup = self.c.pn_warmup if model.training else None
        self.block = getattr(self, self.c.arch, self.pre_norm)
        self.p = copy.deepcopy(model.state_dict())
        for name, _ in model.named_parameters():
            self.p[name].requires_grad_()

    def norm(self, p, name, x):
        return ref_norm(self.c.arch, x, **under(p, name), warmup=self.warmup)

    def attention(self, qkv, of_qk, scale):
        """Head by head; of_qk(x, own) is done to a head's turned q and k, own are its channels."""
        pairs = int(self.c.rope_fraction * self.d_k / 2) if self.c.pos == "rope" else 0
        q, k, v = qkv.split(self.d, -1)
        outputs = []
        for own in torch.arange(self.d).split(self.d_k):
            q_h = of_qk(ref_turn(q[..., own], pairs), own)
            k_h = of_qk(ref_turn(k[..., own], pairs), own)
            outputs.append(plain_attention(q_h, k_h, v[..., own], scale))
        return torch.cat(outputs, -1)

    def pre_norm_heads(self, p, h):
        qkv = linear(p, "w_qkv", self.norm(p, "norm1", h))
        if self.c.qk_norm:
            return self.attention(qkv, lambda x, own: self.unit(x), p["g"])
        return self.attention(qkv, lambda x, own: x, self.d_k ** -0.5)

    def pre_norm_inner(self, p, h):
        x = linear(p, "w_up", self.norm(p, "norm2", h))
        if self.c.mlp == "gelu":
            return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))
        return x[..., :4 * self.d] * ref_silu(x[..., 4 * self.d:])

    def pre_norm(self, p, h):                                                     # nGPT eq. 4, 5
        h = h + linear(p, "w_o", self.pre_norm_heads(p, h))
        return h + linear(p, "w_down", self.pre_norm_inner(p, h))

    def normformer(self, p, h):  # sections 2.1 and 3
        y = self.pre_norm_heads(p, h) * p["head_scale"].repeat_interleave(self.d_k)
        h = h + self.norm(p, "norm_attn", linear(p, "w_o", y))
        inner = self.norm(p, "norm_ffn", self.pre_norm_inner(p, h))
        return p.get("resid_scale", 1) * h + linear(p, "w_down", inner)

    def ngpt(self, p, h):
        root_d = math.sqrt(self.d)
        s_qk = p["s_qk.weight"] * root_d  # stored at 1 / sqrt(d): section 2.6
        alpha_a = abs(p["alpha_a.weight"] * 0.05 * root_d)
        alpha_m = abs(p["alpha_m.weight"] * 0.05 * root_d)
        of_qk = lambda x, own: self.unit(x) * s_qk[own]                           # (15), (16)
        y = self.attention(linear(p, "w_qkv", h), of_qk, math.sqrt(self.d_k))  # (12), (13), 2.3.2
        h_a = self.unit(linear(p, "w_o", y))                                      # (14)
        h = self.unit(h + alpha_a * (h_a - h))                                    # (10)
        u, v = linear(p, "w_up", h).split(4 * self.d, -1)                     # (17)
        u = u * p["s_u.weight"]                                                   # (20)
        v = v * p["s_v.weight"] * root_d                                          # (21)
        h_m = self.unit(linear(p, "w_down", u * ref_silu(v)))                     # (18), (19)
        return self.unit(h + alpha_m * (h_m - h))                                 # (11)

    def angpt(self, p, h):  # Table 1, sections 4.2 and 4.3
        d = self.d
        d_h = self.d_k
        alpha_a = abs(p["alpha_a.weight"] * 0.05 / 0.01)
        alpha_m = abs(p["alpha_m.weight"] * 0.05 / 0.01)
        qkv = linear(p, "w_qkv", h) * math.sqrt(d / d_h)
        y = self.attention(qkv, lambda x, own: self.unit(x), p["g"])
        h_a = self.unit(linear(p, "w_o", y) * math.sqrt(d_h / d))
        h = (h + alpha_a * (h_a - h)) / (1 - 2 * alpha_a + 2 * alpha_a ** 2).sqrt()
        u, z = (linear(p, "w_up", h) * math.sqrt(d / (4 * d))).split(4 * d, -1)
        inner = u * ref_silu(z * math.sqrt(d)) * ref_nu_acf()                     # README, choice 2
        h_m = self.unit(linear(p, "w_down", inner) * math.sqrt(4 * d / d))
        return (h + alpha_m * (h_m - h)) / (1 - 2 * alpha_m + 2 * alpha_m ** 2).sqrt()

    def logits(self, idx):
        h = self.p["wte.weight"][idx]
        if self.c.pos == "learned":
            h = h + self.p["wpe.weight"][:idx.shape[1]]
        for i in range(self.c.n_layer):
            h = self.block(under(self.p, f"blocks.{i}"), h)
        if self.c.arch in PRE_NORM:
            head = "wte" if self.c.tie else "lm_head"
            return linear(self.p, head, self.norm(self.p, "norm_f", h))
        stored = 1 / math.sqrt(self.d) if self.c.arch == "ngpt" else 0.01
        return linear(self.p, "lm_head", h) * self.p["s_z.weight"] / stored       # nGPT eq. 3


OPTIONS = [(arch, {}) for arch in SEVEN] + [
    ("layernorm", GPT2),
    ("rmsnorm", dict(rope_fraction=0.7, bias=True)),
    ("powernorm", dict(GPT2, pn_warmup=0)),
    ("normformer", dict(resid_scale=True)),
    ("normformer", dict(GPT2, qk_norm=True, checkpoint_blocks=True)),
    ("ngpt", dict(pos="learned")),
    ("angpt", dict(rope_fraction=0.5)),
]


@pytest.mark.parametrize("arch, options", OPTIONS)
@eval_and_train
def test_logits_loss_and_gradients_equal_the_papers_equations(arch, options, training):
    model = roughened(tiny_gpt(arch, **options)).train(training)
    written = Written(model)
    logits, loss = model(IDX, TARGETS.masked_fill(TARGETS == 3, -1))
    want = written.logits(IDX)
    nats = want.exp().sum(-1).log() - want.gather(-1, TARGETS[..., None])[..., 0]
    want_loss = nats[TARGETS != 3].mean()
    assert_close(logits, want)
    assert_close(loss, want_loss)
    loss.backward()
    want_loss.backward()
    for name, p in model.named_parameters():
        assert_close(p.grad, written.p[name].grad)
        assert p.grad.abs().max() > 0, name        # every parameter learns
    assert_close(model(IDX)[0], want[:, -1:])      # as in generation, for the last position only


def test_angpt_has_the_factors_that_its_norms_undo(monkeypatch):
    model = roughened(tiny_gpt("angpt"))
    written = Written(model)
    written.unit = lambda x: x
    monkeypatch.setattr(model_py, "unit", written.unit)
    assert abs(model.blocks[0].nu_acf - ref_nu_acf()) < 1e-5
    assert_close(model(IDX, TARGETS)[0], written.logits(IDX), 1e-5)


# ---- The pieces ----------------------------------------------------------------------------------

def test_unit_has_norm_one_and_survives_zero():
    x = gaussian(5, 16)
    for factor in (1e-30, 1, 1e10):
        assert_close(unit(x * factor), ref_unit(x), 1e-14)
    zero = torch.zeros(3, 16, requires_grad=True)
    unit(zero).sum().backward()
    assert torch.equal(unit(zero), zero)
    assert torch.equal(zero.grad, zero)
    half = unit(gaussian(64, 3000).bfloat16())     # a norm rounded to bfloat16 would be off by 2e-3
    assert half.dtype == torch.bfloat16
    assert (half.double().norm(dim=-1) - 1).abs().max() < 1e-3


def test_rope_is_exact_at_far_places():
    far = GPT(GPTConfig(**TINY | dict(block_size=5000)))
    angle = torch.arange(5000)[:, None] * 10000.0 ** -(torch.arange(4).double() / 4)
    assert_close(far.cos, angle.cos(), 1e-7)
    assert_close(far.sin, angle.sin(), 1e-7)


def queries_keys_values(B, T, d_k=4):
    return [gaussian(B, 3, T, d_k, seed=seed) for seed in range(3)]


@pytest.mark.parametrize("T", [1, 2, 300, 600])  # above 512 torch's kernel does it
def test_attend_is_causal_softmax_attention(T):
    inputs = [x.requires_grad_() for x in queries_keys_values(2, T) + [gaussian()]]
    got = attend(*inputs)
    want = plain_attention(*inputs)
    assert_close(got, want)
    w = want.detach().cos()
    gradients = [torch.autograd.grad((y * w).sum(), inputs) for y in (got, want)]
    for pair in zip(*gradients):
        assert torch.allclose(*pair, rtol=1e-10, atol=1e-12)


def test_attend_behind_a_cache_is_the_last_of_all_queries():
    q, k, v = queries_keys_values(2, 9)
    want = plain_attention(q, k, v, 0.5)
    cache = Cache()
    for part in (slice(0, 4), slice(4, 8), slice(8, 9)):
        own = [x[:, :, part] for x in (q, k, v)]
        y = attend(*own, 0.5, cache)
        assert_close(y, want[:, :, part])


@pytest.mark.parametrize("T", [6, 600])
def test_attend_drops_weights_and_keeps_their_average(T):
    q, k, v = queries_keys_values(1200 // T, T, 1)
    torch.manual_seed(0)
    y = attend(q, k, torch.ones_like(v), 0.1, dropout=0.25)  # sums of kept weights, over 3/4
    assert abs(y.mean() - 1) < 0.02
    assert len(y.unique()) > 1000


def test_attend_takes_flash_attn_for_half_precision_on_gpus_before_hopper(monkeypatch):
    def flash(q, k, v, dropout_p, softmax_scale, causal):                         # (B, T, H, d_k)
        calls.append((q.shape[1], dropout_p, causal))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return plain_attention(q, k, v, softmax_scale).transpose(1, 2)

    calls = []
    monkeypatch.setattr(model_py, "flash_attn_func", flash)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(model_py, "on_hopper", lambda device: is_hopper)
    is_hopper = False
    double = queries_keys_values(2, 9)
    half = [x.half() for x in double]
    assert_close(attend(*half, 0.5).double(), plain_attention(*double, 0.5), 2e-3)
    attend(*double, 0.5)
    cache = Cache()
    cache.extend(*half[1:])
    one = [x[:, :, :1] for x in half]
    attend(*one, 0.5, cache)                       # as in generation
    is_hopper = True                               # torch's own kernel is faster there
    attend(*half, 0.5)
    assert calls == [(9, 0, True)]


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_powernorm_moves_by_means_over_a_step_s_micro_batches(micro_batches):
    config = GPTConfig(arch="powernorm", bias=True, pn_warmup=2)
    layer = roughened(PowerNorm(8, config)).double().train()
    for step in range(5):
        p = copy.deepcopy(layer.state_dict())
        means = 0.0
        for micro in range(micro_batches):
            x = ((1 + step) * gaussian(3, 5, 8, seed=10 * step + micro)).requires_grad_()
            y = layer(x)
            assert_close(y, ref_norm("powernorm", x, **p, warmup=2))
            g = gaussian(3, 5, 8, seed=77 + micro)
            y.backward(g)
            z = ref_group_scale(x)
            xhat = (y - p["bias"]) / p["weight"]
            squares = torch.stack((z ** 2, xhat ** 2, g * p["weight"] * xhat))
            means += squares.mean((1, 2)) / micro_batches
        layer.update_()
        assert_close(layer.psi2, 0.9 * p["psi2"] + 0.1 * means[0])
        assert_close(layer.nu, p["nu"] * (1 - 0.1 * means[1]) + 0.1 * means[2])
        assert layer.steps == step + 1


# ---- The whole model: causality, loss, generation ------------------------------------------------

@eval_and_train
@pytest.mark.parametrize("arch, pn_warmup", [
    *((arch, 0) for arch in SEVEN), ("powernorm", 1)])
def test_no_logit_sees_the_future_but_in_powernorms_warm_up(arch, pn_warmup, training):
    model = roughened(tiny_gpt(arch, pn_warmup=pn_warmup)).train(training)
    other = IDX.clone()
    other[:, 6] = (other[:, 6] + 1) % 17
    change = model(IDX, IDX)[0] - model(other, other)[0]
    change = change.abs().amax((0, 2))             # position by position
    assert change[6:].min() > 1e-9
    assert (change[:6].max() > 1e-12) == (training and pn_warmup > 0)


@pytest.mark.parametrize("arch", ["normformer", "angpt"])
@pytest.mark.parametrize("positions_at_once, chunks", [(12, [12]), (11, [6, 6]), (5, [3] * 4),
                                                       (0.1, [1] * 12)])
def test_loss_in_chunks_is_the_whole_loss(arch, positions_at_once, chunks, monkeypatch):
    def counted(self, h, targets, summed_loss=GPT.summed_loss):
        sizes.append(h.shape[1])
        return summed_loss(self, h, targets)

    targets = TARGETS.masked_fill(TARGETS == 3, -1)
    whole = roughened(tiny_gpt(arch))
    in_chunks = copy.deepcopy(whole)
    want = whole(IDX, targets)[1]
    want.backward()
    sizes = []
    monkeypatch.setattr(GPT, "summed_loss", counted)
    monkeypatch.setattr(GPT, "most_logits", 3 * 17 * positions_at_once)
    logits, loss = in_chunks(IDX, targets, loss_only=True)
    assert logits is None
    assert sizes == chunks                         # equal ones, which are compiled once
    assert_close(loss, want)
    loss.backward()
    recomputed = [] if chunks == [12] else chunks  # the backward pass computes the logits again
    assert sizes == chunks + recomputed
    assert_same_gradients(in_chunks, whole)


def test_checkpointed_blocks_run_twice():
    runs = []
    model = tiny_gpt("angpt", checkpoint_blocks=True).train()
    model.blocks[0].register_forward_pre_hook(lambda block, given: runs.append(block))
    model(IDX, TARGETS)[1].backward()
    assert len(runs) == 2


@torch.no_grad()
@pytest.mark.parametrize("arch, options", [
    *[(arch, {}) for arch in SEVEN],
    ("layernorm", GPT2),
    ("rmsnorm", dict(block_size=1)),
    ("angpt", dict(block_size=300))])
def test_cached_generation_equals_recomputation_past_a_full_window(arch, options):
    model = roughened(tiny_gpt(arch, **options))
    size = model.config.block_size
    prompt = some_tokens(2, size + 5)
    window = prompt[:, -size:]                     # of a longer prompt the last block_size tokens
    for token in model.generate(prompt, 23, temperature=0):
        if window.shape[1] > size:                 # of a full window the second half is kept
            window = window[:, -max(1, size // 2):]
        assert torch.equal(token, model(window)[0][:, -1].argmax(-1))
        window = torch.cat((window, token[:, None]), 1)


@pytest.mark.parametrize("pos", ["rope", "learned"])
def test_more_tokens_than_the_context_are_refused(pos):
    model = tiny_gpt("angpt", pos=pos)
    caches = [Cache() for _ in model.blocks]
    model(IDX, caches=caches)
    for idx, given in ((some_tokens(1, 13), None), (IDX[:, :1], caches)):
        with pytest.raises(ValueError, match="^got 13 tokens, but block_size is 12$"):
            model(idx, caches=given)


@eval_and_train
def test_generation_is_in_eval_mode_and_restores_the_mode(training):
    model = roughened(tiny_gpt("powernorm", dropout=0.5))
    before = copy.deepcopy(model.state_dict())
    gradients = []                                 # they would keep every activation in memory
    model.lm_head.register_forward_pre_hook(lambda *_: gradients.append(torch.is_grad_enabled()))
    want = generated(model, IDX[:, :5], 6, temperature=0)
    assert gradients == 6 * [False]
    model.train(training)
    assert torch.equal(generated(model, IDX[:, :5], 6, temperature=0), want)
    stream = model.generate(IDX[:, :5], 6)
    next(stream)
    stream.close()                                 # the reader may leave early
    assert all(module.training == training for module in model.modules())
    assert_same_state(model.state_dict(), before)


@pytest.mark.parametrize("temperature, top_k", [
    (1.0, None), (2.0, 3), (0, 99)])
def test_samples_follow_the_softmax_of_the_top_k(temperature, top_k):
    model = roughened(tiny_gpt("layernorm", vocab_size=6))
    prompt = some_tokens(1, 5, vocab=6)
    logits = model(prompt)[0][0, -1].detach()
    lowest = logits.topk(min(top_k or 6, 6)).values[-1]
    want = (logits / (temperature or 1e-5)).softmax(-1) * (logits >= lowest)
    drawn = generated(model, prompt.expand(4000, 5), 1,
                      temperature=temperature, top_k=top_k,
                      generator=torch.Generator().manual_seed(7))
    frequency = drawn[:, 0].bincount(minlength=6) / 4000
    assert (frequency - want / want.sum()).abs().max() < 0.03
    assert torch.equal(frequency > 0, want > 1e-9)


# ---- Projection, initialization, names, counts ---------------------------------------------------

@every_arch
@torch.no_grad()
def test_projection_is_the_papers_constraint_and_leaves_all_else(arch):
    model = roughened(tiny_gpt(arch, pos="learned"))
    matrices = {name: p for name, p in model.named_parameters() if p.dim() == 2}
    for p in matrices.values():
        p *= 0.2 + torch.arange(p.shape[1]) % 3
        p[3] = 0.0
        p[:, 5] = 0.0
    want = copy.deepcopy(model.state_dict())
    for name in matrices:
        of_columns = arch == "ngpt" and name.endswith(("w_o.weight", "w_down.weight"))
        norm = want[name].norm(dim=0 if of_columns else 1, keepdim=True)
        if arch == "ngpt":
            want[name] /= norm.masked_fill(norm == 0, 1)
        elif arch == "angpt":
            want[name] /= norm.clamp(min=1)
    model.project_()
    assert_same_state(model.state_dict(), want, 1e-15)


@pytest.mark.parametrize("arch", ["layernorm", "gpt+", "powernorm", "normformer"])
@pytest.mark.parametrize("tie", [False, True])
def test_pre_norm_initialization(arch, tie):
    options = dict(GPT2, tie=tie, n_layer=3, n_embd=128, vocab_size=99, embed_std=0.5)
    model = tiny_gpt(arch, **options)
    stds = {"wte": 0.5, "wpe": 0.5, "w_o": 0.02 / 6 ** 0.5, "w_down": 0.02 / 6 ** 0.5}
    for name, p in model.named_parameters():
        if p.dim() == 2:
            std = stds.get(name.split(".")[-2], 0.02)
            assert abs(p.std() / std - 1) < 0.05, name
        elif name.endswith("bias"):
            assert not p.any(), name
    assert (model.lm_head.weight is model.wte.weight) == tie


VECTORS = {                                        # of a block, and their starts: d = 64, d_k = 16
    "layernorm": "norm_f.weight=1 norm1.weight=1 norm2.weight=1",
    "rmsnorm": "norm_f.weight=1 norm1.weight=1 norm2.weight=1",
    "gpt+": "norm_f.weight=1 norm1.weight=1 norm2.weight=1 g=4",
    "powernorm": "norm_f.weight=1 norm_f.psi2=1 norm_f.nu=0 norm_f.steps=0 "
                 "norm1.weight=1 norm1.psi2=1 norm1.nu=0 norm1.steps=0 "
                 "norm2.weight=1 norm2.psi2=1 norm2.nu=0 norm2.steps=0",
    "normformer": "norm_f.weight=1 norm1.weight=1 norm2.weight=1 "
                  "norm_attn.weight=1 norm_ffn.weight=1 head_scale=1 resid_scale=1",
    "ngpt": "s_z.weight=0.125 s_qk.weight=0.125 s_u.weight=1 s_v.weight=1 "
            "alpha_a.weight=0.125 alpha_m.weight=0.125",
    "angpt": "s_z.weight=0.01 g=4 alpha_a.weight=0.01 alpha_m.weight=0.01",
}


@every_arch
def test_names_are_those_of_older_checkpoints_and_vectors_start_as_in_the_papers(arch):
    model = tiny_gpt(arch, pos="learned", n_layer=1, n_embd=64, n_head=4,
                     resid_scale=arch == "normformer")
    state = {name.removeprefix("blocks.0."): p for name, p in model.state_dict().items()}
    starts = dict(vector.split("=") for vector in VECTORS[arch].split())
    matrices = {f"{name}.weight" for name in "wte wpe w_qkv w_o w_up w_down lm_head".split()}
    assert state.keys() == starts.keys() | matrices
    for name, start in starts.items():
        assert (state[name] == float(start)).all(), name
    if arch in ("ngpt", "angpt"):
        for name in matrices:
            of_columns = arch == "ngpt" and name in ("w_o.weight", "w_down.weight")
            norms = state[name].norm(dim=0 if of_columns else 1)
            assert (norms - 1).abs().max() < 1e-6, name


@every_arch
def test_a_gain_of_any_shape_and_name_keeps_the_value_that_its_block_gives_it(arch, monkeypatch):
    """Only linear maps and embeddings are drawn, zeroed and constrained."""
    block = ARCHS[tiny_gpt(arch).config.arch]

    class WithGains(block):
        def __init__(self, config):
            super().__init__(config)
            self.alpha_bias = torch.nn.Parameter(torch.full((2, 8), 5.0))
            self.own_norm = torch.nn.LayerNorm((2, 8))

    monkeypatch.setitem(ARCHS, "gains", WithGains)
    model = tiny_gpt("gains", qk_norm=arch == "gpt+")
    model.project_()
    for block in model.blocks:
        assert (block.alpha_bias == 5).all()
        assert (block.own_norm.weight == 1).all()


def parameters_of(arch, **options):
    return bench.count_parameters(GPTConfig(arch=arch, **options))


@pytest.mark.parametrize("arch, d, layers, printed", [
    ("rmsnorm", 1024, 24, 468.2),
    ("rmsnorm", 1280, 36, 1025.7),
    ("ngpt", 1024, 24, 468.4),
    ("ngpt", 1280, 36, 1026.1)])
def test_parameters_of_ngpt_table_2_which_truncates(arch, d, layers, printed):
    n = parameters_of(arch, vocab_size=32000, n_embd=d, n_layer=layers, n_head=d // 64)
    assert printed == n // 10 ** 5 / 10


@pytest.mark.parametrize("bias, added", [(False, 46_224), (True, 92_304)])
def test_parameters_of_gpt2_and_what_normformer_adds(bias, added):
    gpt2 = GPT2 | dict(bias=bias, vocab_size=50257, block_size=1024,
                       n_embd=768, n_layer=12, n_head=12)
    plain = parameters_of("layernorm", **gpt2)
    assert plain == 124_439_808 or not bias
    assert parameters_of("normformer", **gpt2) - plain == added
    assert parameters_of("normformer", **gpt2, resid_scale=True) - plain == added + 12 * 768


# ---- Options, dropout, a seventh arch, the compiler ----------------------------------------------

@pytest.mark.parametrize("name, expected", [
    ("arch", "layernorm or rmsnorm"), ("mlp", "swiglu or gelu"), ("pos", "rope or learned")])
def test_words_that_a_model_does_not_know_are_refused(name, expected):
    with pytest.raises(ConfigError, match=f"^{name}=typo: expected {expected}"):
        GPTConfig(**{name: "typo"})


@every_arch
def test_dropout_acts_in_training_alone_on_embeddings_attention_and_branches(arch, monkeypatch):
    def dropout(x, p, training=True, inplace=False):
        if p and training:
            places.append((*x.shape, p))
        return x

    places = []
    monkeypatch.setattr(F, "dropout", dropout)
    model = tiny_gpt(arch, dropout=0.4)
    for training in (False, True):
        model.train(training)(IDX)
    channels, weights = (3, 12, 16, 0.4), (3, 2, 12, 12, 0.4)
    assert places == [channels] + 2 * [weights, channels, channels]


@every_arch
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch's compiler
def test_compiled_blocks_are_one_graph_with_eagers_loss_and_gradients(arch):
    torch.compiler.reset()
    eager = roughened(tiny_gpt(arch, pn_warmup=1, n_layer=1)).train()
    compiled = copy.deepcopy(eager)
    compiled.blocks[0].compile(fullgraph=True, backend="aot_eager")  # C++ is compiled by .ci/run
    for _ in range(2):                             # the second is after powernorm's warmup
        for model in (eager, compiled):
            model.zero_grad()
            model(IDX, IDX)[1].backward()
        assert_same_gradients(compiled, eager)
        eager.project_()
        compiled.project_()
        assert_same_state(compiled.state_dict(), eager.state_dict(), 1e-11)


# ==================================================================================================
# prepare.py

TEXTS = [f"the {i} in an thé\r\n<|endoftext|>" * (1 + i % 9) for i in range(300)]
TEXT_BYTES = [text.encode() for text in TEXTS]


@pytest.fixture
def small_gpt2(monkeypatch):
    """Put a small BPE under GPT-2's name: all bytes and a few merges."""
    words = [bytes([i]) for i in range(256)]
    words += [b"th", b"the", b"in", b"an", b" t"]
    ranks = {word: i for i, word in enumerate(words)}
    bpe = tiktoken.Encoding("gpt2", pat_str=r"\s?\S+|\s+", mergeable_ranks=ranks,
                            special_tokens={"<|endoftext|>": 261})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: {"gpt2": bpe}[name])
    return bpe


@pytest.fixture
def texts(tmp_path):
    """Make a folder with TEXTS in a.jsonl and in a.parquet."""
    rows = [{"id": i, "url": "x" * 999, "text": text} for i, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    return tmp_path


def prepare_rows(texts, **options):
    return prepare(f"{texts}/a.jsonl", data_dir=str(texts), **options)


def read_dataset(folder):
    """Check a dataset's counts; return the documents to validate on and to train on as bytes."""
    meta = read_meta(folder)
    tokenizer = prep.get_tokenizer(meta["tokenizer"])
    splits = []
    fingerprint = hashlib.sha256()
    for split in ("val", "train"):
        paths = sorted(folder.glob(f"*_{split}_??????.bin"))
        tokens = np.concatenate([read_shard(path) for path in paths])
        fingerprint.update(tokens)
        starts = [i for i in np.flatnonzero(tokens == tokenizer.eot_token) if i > 0]
        documents = []
        for part in np.split(tokens, starts):
            documents.append(tokenizer.decode_bytes(part[part != tokenizer.eot_token].tolist()))
        assert meta[f"{split}_tokens"] == len(tokens)
        assert meta[f"{split}_bytes"] == sum(map(len, documents))
        splits.append(documents)
    assert meta["fingerprint"] == fingerprint.hexdigest()
    return splits


def text_of(folder):
    """Return the text of a whole dataset."""
    return b"".join(b"".join(split) for split in read_dataset(folder))


def files_of(folder):
    paths = [*folder.glob("*.bin"), *folder.glob("*.json")]
    return {path.name: path.read_bytes() for path in paths}


# ---- Options, errors, files


@pytest.mark.parametrize("name, value, want", [
    ("learning_rate", np.float64(0.5), 0.5),
    ("learning_rate", torch.tensor(2), 2.0),
    ("max_steps", np.int64(7), 7),
    ("max_steps", 2.5, "max_steps=2.5: expected int"),
    ("max_steps", True, "max_steps=True: expected int"),
    ("qk_norm", np.bool_(True), True),
    ("qk_norm", 1, "qk_norm=1: expected one of false, true"),
    ("compile", True, "true"),
    ("mlp", "gleu", "mlp=gleu: .*did you mean gelu"),
    ("out_dir", "~/x", f"{Path.home()}/x"),
    ("lr", 1.0, "lr: no such option; did you mean learning_rate")])
def test_options_become_plain_values_or_an_error(name, value, want):
    if isinstance(want, str) and ":" in want:
        with pytest.raises(ConfigError, match=f"^{want}"):
            prep.clean_options(TrainConfig, {name: value})
    else:
        cleaned = prep.clean_options(TrainConfig, {name: value, "mlp": None})
        assert cleaned == {name: want}
        assert type(cleaned[name]) is type(want)


@pytest.mark.parametrize("words, want", [
    ("--max_steps=1_000 --learning_rate 1", dict(max_steps=1000, learning_rate=1.0)),
    ("--qk_norm --compile", dict(qk_norm=True, compile="true")),
    ("--qk_norm=False --compile=False", dict(qk_norm=False, compile="false"))])
def test_command_lines(words, want):
    assert prep.parse_options(words.split(), "", TrainConfig) == want


def test_help_lists_options_under_their_headings(capsys):
    with pytest.raises(SystemExit):
        prep.parse_options(["--help"], "", TrainConfig)
    text = " ".join(capsys.readouterr().out.split())
    assert "and dropout [1337] Optimizer: --max_steps int optimizer steps (by size) --learn" in text
    assert "--eval_tokens int tokens per validation (0.5% of training tokens" in text
    assert "--mlp {swiglu,gelu} activation of the MLP" in text

    with pytest.raises(SystemExit):
        bench.main(["speed", "--help"])
    text = capsys.readouterr().out
    assert text.index("--rounds") < text.index("--n_layer")      # the benchmark's own come first
    assert not re.search(r"--(arch|resume|eval_only) ", text)    # these are not for benchmarks


@pytest.mark.parametrize("torch_says, error", [
    ("CUDA out of memory. Tried", SystemExit), ("can't allocate memory", SystemExit),
    ("size mismatch", RuntimeError)])
def test_out_of_memory_is_one_line_and_a_bug_is_not(capsys, torch_says, error):
    def fail(words):
        raise RuntimeError(f"{torch_says}\nframe #0")

    with pytest.raises(error):
        run_script(fail)
    assert capsys.readouterr().err.count("\n") == (error is SystemExit)


def test_a_file_that_cannot_be_read_is_one_line(capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        run_script(lambda words: open(tmp_path / "none"))
    assert re.fullmatch(r".*: .*No such file.*none'\n", capsys.readouterr().err)


def test_ctrl_c_ends_a_script_by_the_signal(monkeypatch):
    def stop(words):
        raise KeyboardInterrupt

    handlers = []
    monkeypatch.setattr(signal, "raise_signal",
                        lambda number: handlers.append(signal.getsignal(number)))
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit, match="130"):    # PID 1 survives the signal
            run_script(stop)
    finally:
        signal.signal(signal.SIGINT, before)
    assert handlers == [signal.SIG_DFL]
    monkeypatch.setattr(builtins, "get_ipython", None, raising=False)     # as in a notebook's %run
    with pytest.raises(KeyboardInterrupt):
        run_script(stop)
    assert signal.getsignal(signal.SIGINT) == before


def test_streams_that_are_closed_or_lack_a_character_end_no_script(monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), "cp1252")
    monkeypatch.setattr(sys, "stdout", narrow)
    monkeypatch.setattr(sys, "stderr", None)
    run_script(lambda words: (print("é 日"), sys.stderr.write("nowhere")))
    assert narrow.buffer.getvalue() == b"\xe9 ?\n"

    of_a_notebook = io.StringIO()
    monkeypatch.setattr(sys, "stdout", of_a_notebook)
    run_script(lambda words: print("日"))
    assert of_a_notebook.getvalue() == "日\n"

    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(sys, "stdout", open(writing, "w"))
    with pytest.raises(SystemExit) as end:
        run_script(lambda words: print("to nobody"))
    assert end.value.code == 141
    sys.stdout.close()                             # what is buffered goes nowhere


def test_a_file_system_without_locks_is_noted(tmp_path, monkeypatch, capsys):
    def refuse(*args, **kwargs):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(prep.FileLock, "acquire", refuse)
    with prep.lock_folder(tmp_path / "a", "taken"):
        assert "a: not locked ([Errno 37] No locks available)" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no flock")
def test_without_flock_no_file_is_left_that_would_lock_out_other_machines(
        tmp_path, monkeypatch, capsys):
    def missing(*args):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", missing)
    with prep.lock_folder(tmp_path / "a", "taken"):
        assert "a: not locked" in capsys.readouterr().err


def test_a_link_to_a_locked_folder_is_locked(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with prep.lock_folder(tmp_path / "a", ""):
        with pytest.raises(DataError, match="a: taken"):
            prep.lock_folder(tmp_path / "link", "taken")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such permissions")
def test_other_users_can_lock_a_shared_folder(tmp_path):
    with prep.lock_folder(tmp_path / "a", ""):
        assert (tmp_path / ".a.lock").stat().st_mode & 0o777 == 0o666


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    def renamed(*paths):
        done.append("renamed")
        replace(*paths)

    done, replace = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda file: done.append(os.fstat(file).st_size))
    monkeypatch.setattr(os, "replace", renamed)
    with prep.atomic_write(tmp_path / "a") as file:
        file.write(b"text")
    assert done == [4, "renamed"]


# ---- Tokens and shards

def test_shards_are_llm_c_s(tmp_path):
    path = tmp_path / "a.bin"
    tokens = np.random.default_rng(0).integers(0, 65536, 1000).astype(np.uint16)
    write_shard(path, tokens)
    assert np.fromfile(path, "<i4", 256).tolist() == [20240520, 1, 1000] + [0] * 253
    assert np.array_equal(np.fromfile(path, "<u2", offset=1024), tokens)
    assert not read_shard(path).flags.writeable


def test_training_needs_no_tokenizer_for_the_bytes_of_tokens(texts, small_gpt2, monkeypatch):
    meta = read_meta(prepare_rows(texts, tokenizer="gpt2"))
    want = prep.token_lengths({"tokenizer": "gpt2"})
    monkeypatch.setattr(tiktoken, "get_encoding", None)      # no network
    assert np.array_equal(prep.token_lengths(meta), want)
    assert (want[256], want[257], want[261]) == (2, 3, 0)    # th, the, end of text
    with pytest.raises(DataError, match="tokenizer=gpt2: .*TIKTOKEN_CACHE_DIR.*TypeError"):
        prep.token_lengths({"tokenizer": "gpt2"})


# ---- Which text

def test_the_default_dataset_has_its_texts_in_a_seeded_order(tmp_path, monkeypatch):
    library = tmp_path / "test/.lib"
    monkeypatch.setattr(os, "__file__", str(library / "os.py"))
    paths = sorted(library / f"{i}.py" for i in range(40))
    for path in [*paths, library / "site-packages" / "a.py", library / "b" / "tests" / "c.py"]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {path}\n" * 9)
    random.Random(5).shuffle(paths)
    val, train = read_dataset(prepare(data_dir=str(tmp_path), seed=5))
    assert val + train == [path.read_bytes() for path in paths]


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
@pytest.mark.parametrize("file", ["a.jsonl", "a.parquet"])
def test_rows_are_documents_in_their_order(texts, small_gpt2, tokenizer, file):
    val, train = read_dataset(prepare(f"{texts}/{file}", data_dir=str(texts), tokenizer=tokenizer))
    assert val + train == TEXT_BYTES


def test_a_dataset_is_not_guessed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text("text" * 99)
    prepare("mine.txt")
    with pytest.raises(DataError, match=r"did you mean data/mine\?"):
        read_meta("mine")
    assert prep.PrepareConfig("*.txt").name == "text"


@pytest.mark.parametrize("source, name, expected", [
    ("d", "d", "abefh"),                           # no hidden file, no copy, no other suffix
    ("d/**/*.txt", "d", "abfh"),                   # the links lead back to d
    ("d/**", "d", "abcefh"),                       # in Python 3.11 ** alone finds folders only
    ("d/k[1].txt", "k[1]", "b"),                   # a file of that name wins over the glob
    ("d/[ce].*", "[ce]", "ce"),                    # by name or glob a file may have any suffix
    ("d/.hidden", "hidden", "d"),
    ("d/s.csv", "s", "c")])
def test_each_text_is_read_once(tmp_path, source, name, expected, monkeypatch, capsys):
    # Root, who may run the tests, can read every folder.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed")
    d = tmp_path / "d"
    (d / "closed").mkdir(parents=True)
    files = {"a.txt": "a", "k[1].txt": "b", "c.csv": "c", ".hidden/d.txt": "d", "e.MD": "e",
             "k1.txt": "f", ".a.txt": "g", ".hidden/a.txt": "d", "b.txt": "a", "s.csv": "c",
             "deep/h.txt": "h", "empty.txt": ""}
    for path, letter in files.items():
        (d / path).parent.mkdir(parents=True, exist_ok=True)
        (d / path).write_text(100 * letter)
    for link in ("one", "two"):
        (d / link).symlink_to(d)
    (d / "broken.txt").symlink_to(d / "nothing")
    folder = prepare(f"{tmp_path}/{source}", data_dir=f"{tmp_path}/data")
    assert folder == tmp_path / "data" / name
    assert sorted(text_of(folder)) == sorted(100 * expected.encode())
    said = capsys.readouterr().out
    for skipped in ("d/one", "d/closed"):
        line = f"{skipped}: skipped, because this folder is a link or cannot be read"
        assert (line in said) == (source in ("d", "d/**"))
    line = "2 files skipped that are not .txt, .md, .jsonl, .parquet"
    assert (line in said) == (source == "d")


def test_a_glob_for_folders_finds_no_files(tmp_path):
    (tmp_path / "a.txt").write_text("text" * 99)
    (tmp_path / "deep").mkdir()
    with pytest.raises(DataError, match="no text in it"):
        prep.find_files(f"{tmp_path}/*/", 0)
    assert len(prep.find_files(f"//{tmp_path}/*.txt", 0)) == 1    # begins with three slashes


JAPANESE = "A" + "日本語" * 2000


@pytest.mark.parametrize("name, content, expected", [
    ("a.txt", JAPANESE.encode(), JAPANESE),
    ("a.txt", b"\xef\xbb\xbf" + b"text\n" * 90, "text\n" * 90),
    ("a.txt", b"\xef\xbb\xbfab", "ab"),
    ("a.jsonl", json.dumps({"text": JAPANESE}).encode(), JAPANESE),
    ("a.jsonl", json.dumps({"text": JAPANESE}).encode("utf-8-sig"), JAPANESE),
    ("a.jsonl", json.dumps({"text": " " * 1_000_001}).encode(), " " * 1_000_001),
    ("a.jsonl", json.dumps({"text": "a\ud800b" * 90}).encode(), "a?b" * 90)],
    ids=["long line", "mark", "short with mark", "long row", "row with mark", "spaces", "half"])
def test_tokens_give_back_every_byte(tmp_path, small_gpt2, name, content, expected):
    (tmp_path / name).write_bytes(content)
    for tokenizer in ("bytes", "gpt2"):
        folder = prepare(f"{tmp_path}/{name}", data_dir=str(tmp_path), name=tokenizer,
                         tokenizer=tokenizer)
        assert text_of(folder) == expected.encode()


@pytest.mark.parametrize("name, content, says", [
    ("a.txt", None, "a.txt: does not exist"),
    ("fineweb9B-gpt2", None, "did you mean fineweb10B-gpt2"),
    ("a.txt", b"", "a.txt: no text in it"),
    ("a.txt", "aé".encode("utf-16"), "a.txt: not UTF-8 text at byte 3"),
    ("a.txt", b"some\ntext\n" * 300 + b"\xfcber", "a.txt: not UTF-8 text at byte 3,000"),
    ("a.txt", b"\xef\xbb\xbf" + b"t" * 4000 + b"\xc3", "a.txt: not UTF-8 text at byte 4,003"),
    ("a.txt.gz", gzip.compress(b"text" * 99, mtime=0), "a.txt.gz: not UTF-8 text.*gunzip"),
    ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', "a.jsonl, row 3: expected a string `text`"),
    ("a.jsonl", gzip.compress(b"text" * 99, mtime=0), "a.jsonl: not UTF-8 text.*gunzip"),
    ("a.jsonl", b'{"text": 5}\n', "a.jsonl, row 1: expected .*'int'"),
    ("a.jsonl", b'{"text": "\xed\xa0\xbd\xed\xb8\x80"}\n', "a.jsonl, row 1: .*UnicodeDecodeError"),
    ("a.jsonl", b'{"text": "1"}\n', "a.jsonl: nothing is left to train on"),
    ("a.parquet", b"PAR1 no", "a.parquet, row 1: expected a string `text`")])
def test_bad_sources_are_one_line(tmp_path, name, content, says):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    source = f"{tmp_path}/{name}" if "fineweb" not in name else name
    with pytest.raises(DataError, match=rf"^[^\n]*{says}[^\n]*$"):
        prepare(source, data_dir=f"{tmp_path}/data")
    assert not list(tmp_path.glob("data/a/*_train_*"))


# ---- What is held out, how much, and how it is resumed

@pytest.mark.parametrize("rows", [False, True], ids=["files", "rows"])
@pytest.mark.parametrize("sizes", [
    [50], [5000] * 9, [10, 9000, 9000], [100_000, 410], [1_000_000]])
def test_of_text_of_any_shape_a_twentieth_is_held_out_and_no_more_than_a_tenth(
        tmp_path, sizes, rows):
    documents = [(f"line of {i}\n" * size)[:size] for i, size in enumerate(sizes)]
    source = tmp_path / "d"
    source.mkdir()
    if rows:
        lines = [json.dumps({"text": text, "more": "x" * 50_000}) for text in documents]
        (source / "a.jsonl").write_text("\n".join(lines))
    else:
        for i, text in enumerate(documents):
            (source / f"{i}.txt").write_text(text)
    val, train = read_dataset(prepare(str(source), data_dir=f"{tmp_path}/data"))
    assert len(sizes) <= len(val) + len(train) <= len(sizes) + 1   # one may be cut, where all is
    held = sum(map(len, val))
    assert held + sum(map(len, train)) == sum(sizes)
    assert sum(sizes) / 20 <= held <= sum(sizes) / 10


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_as_many_tokens_as_asked_for_and_none_lost(texts, small_gpt2, tokenizer):
    def made(tokens):
        folder = prepare(f"{texts}/all.txt", data_dir=str(texts), name=f"{tokens}", tokens=tokens,
                         tokenizer=tokenizer, val_tokens=1501, shard_tokens=500)
        assert read_meta(folder)["val_tokens"] == 1501
        shards = [read_shard(path) for path in sorted(folder.glob("*_train_*"))]
        assert {len(shard) for shard in shards[:-1]} == {500}
        return np.concatenate(shards), folder

    (texts / "all.txt").write_bytes(b"".join(TEXT_BYTES[:150]))
    every, folder = made(None)
    assert text_of(folder) == b"".join(TEXT_BYTES[:150])
    assert np.array_equal(made(3001)[0], every[:3001])


def test_no_more_than_ten_million_tokens_are_held_out(tmp_path, monkeypatch):
    chunk = np.zeros(11_000_000, np.uint16), 1, None
    sizes = []
    monkeypatch.setattr(prep, "encode_chunks", lambda *_: iter([chunk]))
    monkeypatch.setattr(prep, "write_shard", lambda path, tokens: sizes.append(len(tokens)))
    progress = dict(shards=0, tokens=0, place=None, left_over="")
    prep.write_shards(tmp_path, prep.PrepareConfig("fineweb"), None, [], progress)
    assert sizes == [10_000_000, 1_000_000]


# The validation shard of x_train_y is not taken for a training shard.
@pytest.mark.parametrize("name", ["a", "x_train_y"])
def test_a_small_dataset_is_noted_and_a_smaller_share_obeyed(name, tmp_path, capsys):
    (tmp_path / f"{name}.txt").write_text("7 bytes")
    options = dict(source=f"{tmp_path}/{name}.txt", data_dir=f"{tmp_path}/data")
    with pytest.raises(DataError, match="txt: nothing is left to train on.*smaller --val_tokens"):
        prepare(**options, val_tokens=100)
    val, train = read_dataset(prepare(**options, val_tokens=2))
    assert val + train == [b"7", b" bytes"]
    assert f"data/{name}: too few to train with --block_size=256" in capsys.readouterr().out
    folder = prepare(**options, name="few", tokens=3)
    assert read_meta(folder)["val_tokens"] == 1    # a twentieth of 3 would be none


def test_an_unfinished_dataset_needs_its_file_names_and_its_shards(tmp_path, monkeypatch):
    d = tmp_path / "d"
    d.mkdir()
    for name in "abc":
        (d / f"{name}.txt").write_text("".join(f"{name}{i}\n" for i in range(500)))
    options = dict(source=str(d), data_dir=f"{tmp_path}/data", shard_tokens=1000)
    write = prep.write_shard

    def write_three(path, tokens):
        if path.name.endswith("3.bin"):
            raise KeyboardInterrupt
        write(path, tokens)

    monkeypatch.setattr(prep, "write_shard", write_three)
    with pytest.raises(KeyboardInterrupt):
        prepare(**options)
    monkeypatch.undo()
    (d / "a.txt").rename(d / "z.txt")              # now the files have another order
    with pytest.raises(DataError, match="data/d: made with other file names; go back to"):
        prepare(**options)
    (d / "z.txt").rename(d / "a.txt")
    folder = tmp_path / "data/d"
    shutil.copytree(folder, tmp_path / "copied/d")
    for name in ("val_000000", "train_000001"):
        shard = folder / f"d_{name}.bin"
        other = shard.with_name("other_000000.bin")    # not one of the dataset's
        shard.rename(other)
        with pytest.raises(DataError, match="data/d: a shard is missing; give another --name"):
            prepare(**options)
        other.rename(shard)
    # Without any training shards it is made again, and so is a complete one.
    whole = prepare(**options | {"data_dir": f"{tmp_path}/whole"})
    assert files_of(prepare(**options | {"data_dir": f"{tmp_path}/copied"})) == files_of(whole)
    for _ in ("unfinished", "complete"):
        for path in folder.glob("*_train_*.bin"):
            path.unlink()
        assert files_of(prepare(**options)) == files_of(whole)
    for path in folder.glob("*.bin"):
        path.unlink()
    monkeypatch.setattr(prep, "write_shard", write_three)
    with pytest.raises(KeyboardInterrupt):
        prepare(**options, val_tokens=100)         # now with other settings
    monkeypatch.undo()
    assert not (folder / "meta.json").exists()     # it would be the earlier dataset's
    prepare(**options, val_tokens=100)
    assert read_meta(folder)["val_tokens"] == 100


def test_a_dataset_that_was_stopped_before_its_meta_json_resumes(texts, monkeypatch):
    def stop(path, value, write=prep.write_json):
        if path.name == "meta.json":
            raise KeyboardInterrupt
        write(path, value)

    monkeypatch.setattr(prep, "write_json", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare_rows(texts)
    monkeypatch.undo()
    assert text_of(prepare_rows(texts)) == b"".join(TEXT_BYTES)


def test_a_text_that_is_edited_to_the_same_size_is_noticed(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(99 * name)
    options = dict(source=f"{tmp_path}/*.txt", data_dir=f"{tmp_path}/data", name="d")
    prepare(**options)
    os.utime(tmp_path / "b.txt", (2e9, 2e9))
    with pytest.raises(DataError, match="the newest of 2033-05-18 03:33:20 UTC; go back"):
        prepare(**options)


def test_a_dataset_in_the_folder_of_its_source_is_noted(tmp_path, capsys):
    (tmp_path / "d/deep").mkdir(parents=True)
    (tmp_path / "d/deep/a.txt").write_text("text" * 99)
    for source, is_inside in (("d", True), ("d/deep/a.txt", False)):
        folder = prepare(f"{tmp_path}/{source}", data_dir=str(tmp_path))
        noted = "goes into the folder of its source" in capsys.readouterr().out
        assert noted == is_inside
        assert text_of(folder) == b"text" * 99


def test_killed_and_resumed_equals_undisturbed_and_a_changed_source_is_noticed(tmp_path):
    source = tmp_path / "long.jsonl"
    rows = [json.dumps({"text": f"{i} " * 20}) for i in range(1000)]
    source.write_text("\n".join([*rows, ""]))
    options = dict(source=str(source), shard_tokens=1500)
    whole = prepare(**options, data_dir=f"{tmp_path}/whole")
    words = [f"--source={source}", "--shard_tokens=1_500", f"--data_dir={tmp_path}"]
    with subprocess.Popen([sys.executable, prep.__file__, *words]) as process:
        while process.poll() is None and len(list(tmp_path.glob("long/*.bin"))) < 9:
            time.sleep(0.001)
        process.kill()
    # It did not end by itself.
    assert process.returncode == (-signal.SIGKILL if os.name == "posix" else 1)
    assert not (tmp_path / "long/meta.json").exists()
    again = prepare(**options, data_dir=str(tmp_path))
    assert files_of(again) == files_of(whole)
    with source.open("a") as file:
        file.write(json.dumps({"text": "more"}))
    with pytest.raises(DataError, match="with files=1 with .*, now 1 with .*remove the folder"):
        prepare(**options, data_dir=str(tmp_path))


@pytest.mark.parametrize("content", ["{}", "[]", '{"options": 3}', '{"title": "my book"}'])
def test_records_of_another_program_are_one_line(texts, content):
    (prepare_rows(texts) / "meta.json").write_text(content)
    with pytest.raises(DataError, match="^[^\n]*meta.json: not written by prepare.py[^\n]*$"):
        prepare_rows(texts)


def test_a_second_at_work_waits_for_the_first(texts, capsys):
    with ThreadPoolExecutor(3) as pool:
        with prep.lock_folder(texts / "a", ""):
            three = [pool.submit(prepare_rows, texts) for _ in range(3)]
            time.sleep(0.2)
            assert not any(future.done() for future in three)
        assert {future.result() for future in three} == {texts / "a"}
    assert "a: another prepare.py is at work here; waiting for it" in capsys.readouterr().err


# ---- FineWeb

@pytest.fixture
def fineweb(texts, monkeypatch):
    """Put TEXTS in FineWeb's place, read by datasets' own stream: its rows in the order in which
    they were read, and the number of one before which the network fails."""
    from datasets import load_dataset

    def stream(repo, **options):
        assert (repo, options["name"]) == ("HuggingFaceFW/fineweb", "sample-100BT")
        return load_dataset("parquet", data_files=f"{texts}/a.parquet", **options).map(read)

    def read(row):
        if row["id"] == web.fails_at:
            raise ConnectionError("no\nnetwork")
        web.rows_read.append(row["id"])
        return row

    web = SimpleNamespace(rows_read=[], fails_at=None)
    monkeypatch.setattr("datasets.load_dataset", stream)
    return web


def test_fineweb_resumes_from_the_last_whole_shard(tmp_path, small_gpt2, fineweb, monkeypatch):
    monkeypatch.setattr(prep, "CHUNK_BYTES", 80)   # most rows are several chunks
    options = dict(source="fineweb", subset="sample-100BT", data_dir=str(tmp_path), val_tokens=900,
                   shard_tokens=400)
    whole = prepare(**options, name="whole")
    assert text_of(whole) == b"".join(TEXT_BYTES)
    begins = []
    for fineweb.fails_at in (151, 210):
        fineweb.rows_read.clear()
        with pytest.raises(DataError, match="last whole shard .ConnectionError: no network"):
            prepare(**options)
        begins.append(fineweb.rows_read[0])
    fineweb.rows_read.clear()
    fineweb.fails_at = None
    assert read_dataset(prepare(**options)) == read_dataset(whole)
    begins.append(fineweb.rows_read[0])
    assert begins[0] == 0                          # the rows of whole shards are not read again
    assert 100 < begins[1] < 151 < begins[2] < 210


@pytest.mark.parametrize("source, tokens, n_shards", [
    ("fineweb10B-gpt2", 150_000_000, 2),
    ("fineweb10B-gpt2", None, 103),
    ("fineweb10B-gpt2", 21_500_000_000, 103),
    ("fineweb100B-gpt2", 21_500_000_000, 215)])
def test_of_fineweb_s_tokens_whole_shards_are_downloaded(
        tmp_path, small_gpt2, monkeypatch, source, tokens, n_shards):
    def snapshot_download(repo, repo_type, local_dir, allow_patterns):
        assert repo == f"kjj0/{source}"
        for name in allow_patterns:
            write_shard(Path(local_dir, name), prep.encode(small_gpt2, b"the inn"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    folder = prepare(source, data_dir=str(tmp_path), tokens=tokens)
    assert read_dataset(folder) == [[b"the inn"], [b"the inn"] * n_shards]


def serve_hub(root):
    """Serve root/<owner>/<name>/... as the Hugging Face hub serves datasets; return the server."""
    def do(self):
        form = r"(?:/api)?/datasets/([^/]+/[^/]+)/(resolve|tree|revision)/[^/?]+/?([^?]*)"
        parts = re.match(form, unquote(self.path))
        if not parts:
            return self.send_error(404)
        repo, verb, path = parts.groups()
        folder = root / repo
        commit = f"{len([*folder.rglob('*')]):040}"  # another one if there are more files
        if verb == "resolve" and not (folder / path).is_file():
            return self.send_error(404)
        if verb == "resolve":
            answer = (folder / path).read_bytes()
        elif verb == "tree":
            answer = json.dumps([
                dict(type="directory" if file.is_dir() else "file", oid=40 * "0",
                     path=str(file.relative_to(folder)), size=file.stat().st_size)
                for file in (folder / path).rglob("*")]).encode()
        else:
            answer = json.dumps(dict(id=repo, sha=commit, siblings=[])).encode()
        self.send_response(200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", hashlib.sha1(answer).hexdigest())
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    methods = dict(do_GET=do, do_HEAD=do, log_message=lambda *args: None)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (BaseHTTPRequestHandler,), methods))
    Thread(target=server.serve_forever, daemon=True).start()
    return server


REAL_CLIENTS = """
import sys, tiktoken
ranks = {bytes([i]): i for i in range(256)}
bpe = tiktoken.Encoding("gpt2", pat_str=r"(?s).{1,64}", mergeable_ranks=ranks,
                        special_tokens={"<|endoftext|>": 256})
tiktoken.get_encoding = lambda name: bpe
from prepare import DataError, prepare
root, data_dir = sys.argv[1:]
prepare("fineweb", data_dir=data_dir, tokens=2000)
options = dict(source="fineweb10B-gpt2", data_dir=data_dir, tokens=100_000_000)
try:
    prepare(**options)
except DataError as error:
    print(error)
open(f"{root}/kjj0/fineweb10B-gpt2/fineweb_val_000000.bin", "wb").write(
    open(f"{root}/kjj0/fineweb10B-gpt2/fineweb_train_000001.bin", "rb").read())
prepare(**options)
"""


def test_the_real_clients_of_the_hugging_face_hub(texts):
    fineweb = texts / "hub/HuggingFaceFW/fineweb"
    tokenized = texts / "hub/kjj0/fineweb10B-gpt2"
    for folder in (fineweb / "sample/10BT", fineweb / "data/CC", tokenized):
        folder.mkdir(parents=True)
    shutil.copy(texts / "a.parquet", fineweb / "sample/10BT/000_00000.parquet")
    shutil.copy(texts / "a.parquet", fineweb / "data/CC/000_00000.parquet")
    (fineweb / "README.md").write_text(
        "---\nconfigs:\n- config_name: sample-10BT\n  data_files:\n  - split: train\n"
        "    path: sample/10BT/*\n---\n")
    write_shard(tokenized / "fineweb_train_000001.bin", np.arange(50, dtype=np.uint16))
    server = serve_hub(texts / "hub")
    done = subprocess.run(
        [sys.executable, "-c", REAL_CLIENTS, f"{texts}/hub", f"{texts}/data"], text=True,
        capture_output=True, cwd=Path(prep.__file__).parent, env=os.environ | {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": f"{texts}/home"})
    server.shutdown()
    assert done.returncode == 0, done.stderr
    assert "fineweb: 2,000 tokens to train on, 100 to validate on" in done.stdout
    assert "resumes (fineweb_val_000000.bin could not be downloaded)" in done.stdout
    assert "fineweb10B-gpt2: 50 tokens to train on, 50 to validate on" in done.stdout
    val, train = (read_shard(texts / f"data/fineweb/fineweb_{split}_00000{i}.bin")
                  for i, split in enumerate(("val", "train")))
    text = np.concatenate([val, train])
    assert bytes(text[text < 256].tolist()) == b"".join(TEXT_BYTES)[:len(text[text < 256])]


# ==================================================================================================
# train.py

HERE = Path(train_py.__file__).resolve().parent
CPU = torch.device("cpu")
TINY_RUN = dict(n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=4, total_batch_size=64,
                device="cpu", dtype="float32", compile="false")
SMALL_RUN = dict(TINY_RUN, n_layer=2, total_batch_size=128, max_steps=6, eval_tokens=128,
                 eval_interval=3, checkpoint_interval=3, log_interval=1)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """A dataset of bytes, "abcd..." with noise: one validation shard, three training shards."""
    folder = tmp_path_factory.mktemp("data") / "tiny"
    folder.mkdir()
    random = np.random.default_rng(0)
    noise = random.random(9000) < 0.1
    letters = 97 + np.arange(9000) % 26
    text = np.where(noise, random.integers(97, 123, 9000), letters)
    text[::500] = 256
    write_shard(folder / "tiny_val_000000.bin", text[:1000])
    write_shard(folder / "tiny_train_000001.bin", text[1000:4000])
    write_shard(folder / "tiny_train_000002.bin", text[4000:4096])  # ends with a window
    write_shard(folder / "tiny_train_000003.bin", text[4096:])
    counts = dict(train_tokens=8000, val_tokens=1000)
    write_json(folder / "meta.json", dict(tokenizer="bytes", vocab_size=257, **counts))
    return folder


@pytest.fixture
def tiny(dataset, tmp_path, monkeypatch):
    """Return a function that makes the TrainConfig of a tiny run, without a picture."""
    monkeypatch.setattr(train_py, "draw_losses", lambda folder: (folder / "loss.png").touch())
    places = dict(data=str(dataset), out_dir=str(tmp_path / "run"))
    return lambda **options: TrainConfig(**SMALL_RUN | places | options)


@pytest.fixture(scope="session")
def trained(dataset, tmp_path_factory):
    """Return the folders of two short runs, of layernorm and ngpt, whose vocabulary is padded."""
    folders = [tmp_path_factory.mktemp("trained") / arch for arch in ("layernorm", "ngpt")]
    for folder in folders:
        train(TrainConfig(**SMALL_RUN, arch=folder.name, pos="learned", vocab_size=300,
                          data=str(dataset), out_dir=str(folder)), say=None)
        assert (folder / "loss.png").stat().st_size > 0
    return folders


@pytest.fixture
def old(trained, tmp_path):
    """Return a copy of the first of them in tmp_path/run."""
    return shutil.copytree(trained[0], tmp_path / "run")


@pytest.fixture
def command(monkeypatch, capsys):
    """Return a function that runs a train.py command: (exit code, stdout, stderr)."""
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        code = 0
        try:
            run_script(train_py.main)
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()
    return run


def words(config):
    return [f"--{name}={value}" for name, value in config.options.items()]


def resumed(config, **options):
    """Return a config that resumes the same run with no other option set again."""
    return TrainConfig(out_dir=config.out_dir, resume="true", **options)


def checkpoint(config):
    return read_checkpoint(config.out_dir)


def weights(config):
    return checkpoint(config)["model"]


def column(log, name):
    """Return (step, value) of each record that has a value of this name."""
    return [(record["step"], record[name]) for record in log if name in record]


# ---- Options

def test_options_that_are_set_win_over_the_recipe_and_the_recipe_over_the_size():
    c = TrainConfig(arch="ngpt", size="125m", n_layer=3, weight_decay=0.5)
    assert (c.n_layer, c.weight_decay) == (3, 0.5)
    assert (c.n_embd, c.vocab_size) == (512, 50304)
    assert c.learning_rate == pytest.approx(RECIPES["ngpt"]["learning_rate"] / 2)  # of width 128
    assert TrainConfig(arch="normformer", tie=True).embed_std == 0.02
    assert TrainConfig(arch="rmsnorm", qk_norm=True).out_dir == "out/rmsnorm+qk_norm"
    assert TrainConfig(n_layer=4, size="1b").n_layer == 4  # a default that is set is set


@pytest.mark.parametrize("arch", [*PRE_NORM, *SPHERE])
def test_each_arch_has_the_recipe_of_its_name(arch):
    config = TrainConfig(arch=arch)                # at this width the learning rate is the recipe's
    assert {name: getattr(config, name) for name in RECIPES[arch]} == RECIPES[arch]


@pytest.mark.parametrize("given, learning_rate, embed_std", [
    (dict(learning_rate=0.01), 0.01, 0.02),
    (dict(embed_std=0.5), 0.002, 0.5)])
def test_a_recipe_of_one_s_own_may_leave_options_out(given, learning_rate, embed_std, monkeypatch):
    monkeypatch.setattr(ARCHS["rmsnorm"], "family", "own")
    monkeypatch.setitem(RECIPES, "own", given)
    config = TrainConfig(arch="rmsnorm")
    assert (config.learning_rate, config.embed_std) == (learning_rate, embed_std)
    assert config.weight_decay == 0.1
    monkeypatch.setitem(RECIPES, "own", dict(embed_sdt=0.5))
    with pytest.raises(ConfigError, match="^embed_sdt: no such option; did you mean embed_std"):
        TrainConfig(arch="rmsnorm")


@pytest.mark.parametrize("size, world_size, options, batch_size", [
    ("laptop", 2, {}, 4),
    ("32m", 32, {}, 8),
    ("250m", 64, {}, 4),
    ("125m", 8, dict(batch_size=32), 32)])
def test_a_preset_s_batch_size_shrinks_to_what_the_processes_can_share(
        size, world_size, options, batch_size):
    c = resolve(TrainConfig(size=size, **options), world_size=world_size)
    assert c.batch_size == batch_size


def test_intervals_are_a_tenth_of_a_run_and_the_last_validation_is_longer():
    c = resolve(TrainConfig(size="0.5b"))
    assert (c.eval_interval, c.checkpoint_interval) == (500, 1930)
    assert (c.eval_tokens, c.final_eval_tokens) == (10_485_760, 10_485_760)
    c = resolve(TrainConfig())
    assert (c.eval_tokens, c.final_eval_tokens) == (16_384, 1_048_576)
    c = resolve(TrainConfig(max_steps=100, eval_tokens=512))
    assert (c.eval_interval, c.checkpoint_interval) == (10, 10)
    assert (c.eval_tokens, c.final_eval_tokens) == (512, 512)
    assert resolve(TrainConfig(arch="powernorm", max_steps=100)).pn_warmup == 20
    assert resolve(TrainConfig(arch="powernorm", pn_warmup=0)).pn_warmup == 0
    config = TrainConfig(max_steps=100)
    assert resolve(config).eval_tokens == 4096
    assert config.eval_tokens is None              # another dataset may complete it, too


@pytest.mark.parametrize("arch, printed", [
    ("gpt+", [32.05, 62.23, 127.03, 247.16, 505.73, 1073]),  # the paper has 62.24 and 247.17
    ("ngpt", [32.11, 62.32, 127.16, 247.34, 506.00, 1073]),                       # and 62.33
    ("angpt", [32.10, 62.28, 127.08, 247.21, 505.78, 1073])])
def test_sizes_and_their_parameters_are_angpt_table_f1(arch, printed):
    for size, millions in zip(list(train_py.SIZES)[1:], printed, strict=True):
        c = resolve(TrainConfig(**SEVEN[arch], size=size))
        n = bench.count_parameters(c)
        assert millions == round(n / 1e6, 2 if n < 1e9 else None)
        assert (c.n_embd // c.n_head, c.block_size, c.rope_fraction) == (64, 2048, 0.5)
        if arch == "gpt+":
            assert c.max_steps == math.ceil(20 * n / 2 ** 19)


@pytest.mark.parametrize("options, says", [line.split("  ") for line in """
--arch=ngtp  did you mean ngpt?
--arch=gpt  GPT+ is --arch=rmsnorm --qk_norm=true
--arch=rmsnorm+  --arch=rmsnorm --qk_norm=true
--arch=nowhere.py:mine  nowhere.py cannot be run, because it does not exist
--arch={file}:mine  mine.txt:mine: expected FILE.py:NAME
--size=125b  did you mean 125m?
--device=gpu  invalid choice: 'gpu'
--dtype=float16  invalid choice: 'float16'
--mlp=relu  invalid choice: 'relu'
--resume=y  invalid choice: 'y'
--n_layer=0  at least 1
--n_head=0  n_head=0: expected at least 1
--n_embd=0  at least 1
--block_size=0  at least 1
--max_steps=0  at least 1
--eval_tokens=0  at least 1
--eval_interval=0  at least 1
--checkpoint_interval=0  at least 1
--log_interval=0  at least 1
--batch_size=0  at least 1
--total_batch_size=0  at least 1
--final_eval_tokens=0  at least 1
--learning_rate=-1  at least 0
--learning_rate=nan  at least 0
--learning_rate=inf  at least 0
--dropout=1.5  from 0 to 1
--dropout=0.1 --device=mps --checkpoint_blocks=true  dropout=0.1: expected 0 with --device=mps
--rope_fraction=-1  at least 0
--min_lr_ratio=2  from 0 to 1
--warmup_ratio=2  from 0 to 1
--beta1=1  less than 1
--beta2=1  less than 1
--resid_scale  resid_scale=True: expected False with arch=angpt
--arch=rmsnorm --resid_scale  resid_scale=True: expected False with arch=rmsnorm
--arch=powernorm --resid_scale  resid_scale=True: expected False with arch=powernorm
--arch=ngpt --resid_scale  resid_scale=True: expected False with arch=ngpt
--arch=ngpt --bias  bias=True: expected False with arch=ngpt
--arch=angpt --tie  tie=True: expected False with arch=angpt
--arch=angpt --mlp=gelu  mlp=gelu: expected swiglu with arch=angpt
--arch=angpt --bias  bias=True: expected False with arch=angpt
--arch=ngpt --mlp=gelu  mlp=gelu: expected swiglu with arch=ngpt
--arch=ngpt --tie  tie=True: expected False with arch=ngpt
--arch=powernorm --checkpoint_blocks  checkpoint_blocks=True: expected False with arch=powernorm
--n_embd=130 --n_head=4  n_embd=130: expected a multiple of n_head=4
--arch=powernorm --n_embd=18  multiple of 4
--vocab_size=100  vocab_size=100: expected at least 257
--total_batch_size=100  = 4 x 16 x 1
--max_steps=x  invalid int value: 'x'
--max_step=3  did you mean max_steps?
--arch=GPT+  did you mean rmsnorm?; GPT+ is --arch=rmsnorm --qk_norm=true
--lr=1  did you mean learning_rate?
--flash=1  --flash=1: no such option (--help lists them)
--gradient_accumulation_steps 4  did you mean total_batch_size?
fast  no such option
out/angpt  as --out_dir=out/angpt
config/x.py  there are no configuration files
--tie=1  tie
--seed=99999999999999999999  seed=99999999999999999999: expected a number less than 2**63
--eps=0  eps=0.0: expected a number greater than 0
--out_dir={file}  File exists
--out_dir={folder}  holds other files (mine.txt)
--out_dir={folder}  give this run its own folder, such as --out_dir={folder}/mine
--out_dir={file}/x  mine.txt
--out_dir=/  /: choose a folder inside it
--data=nowhere  data=nowhere: no complete dataset
--data={file}  data={file}: no complete dataset; python prepare.py --source={file} makes one
--data={data}/meta.json  meta.json: expected the dataset's folder, {data}
--block_size=2000  too few val tokens for one window of --block_size=2000
--init_from={file}  mine.txt: not a whole checkpoint
--resume=true  run: no run here yet; leave out --resume to start one
--eval_only  run: no run here yet; give another --out_dir
--device={missing}  torch cannot use it on this machine
--init_from=nowhere  nowhere: no such checkpoint
--init_from=gpt2-mine  gpt2-mine: no such checkpoint; expected a run's folder, a .pt file, gpt2
--init_from={run} --n_layer=3  made with n_layer=2, now n_layer=3
--init_from={run} --block_size=32  weights do not fit this model
--out_dir={run} --resume --size=32m  made with size=laptop, now size=32m
--out_dir={run} --resume --n_layer=3  made with n_layer=2, now n_layer=3
--out_dir={run} --resume --seed=3  made with seed=1337, now seed=3
--out_dir={run} --resume --total_batch_size=64  made with total_batch_size=128, now
--out_dir={run} --resume --init_from=there  made with init_from=None, now init_from=there; repeat
--out_dir={run} --resume --arch=angpt  made with arch=layernorm, now arch=angpt
""".strip().splitlines()])
def test_a_bad_option_is_one_line_that_says_what_to_type(
        tiny, trained, dataset, command, tmp_path, options, says):
    paths = dict(file=tmp_path / "mine.txt", folder=tmp_path, run=trained[0], data=dataset,
                 missing="cuda" if torch.backends.mps.is_available() else "mps")
    paths["file"].write_text("x")
    code, _, said = command(*words(tiny()), *options.format(**paths).split())
    assert code == 2
    assert said.startswith("train.py: ")
    assert said.count("\n") == 1
    assert says.format(**paths) in said


# ---- Data

def test_a_shard_is_cut_into_windows_and_its_rest_is_left(dataset):
    tokens = Tokens(dataset, "train", 16)
    shards = [read_shard(path) for path in sorted(dataset.glob("*_train_*.bin"))]
    windows = [shard[i:i + 17] for shard in shards for i in range(0, len(shard) - 16, 16)]
    assert tokens.windows == len(windows)
    for i, window in enumerate(windows):
        assert tokens.window(i).tolist() == window.tolist()
    x, y = tokens.batch([3, 193], CPU)             # of the first shard and of the last
    rows = np.stack([windows[3], windows[193]])
    assert np.array_equal(x, rows[:, :-1])
    assert np.array_equal(y, rows[:, 1:])


@pytest.mark.skipif(not os.path.exists("/dev/fd"), reason="needs /dev/fd")
def test_no_more_shards_are_open_than_a_process_may_have(dataset, tmp_path):
    shard = next(dataset.glob("*_train_000003.bin"))
    for i in range(300):
        os.link(shard, tmp_path / f"a_train_{i:06d}.bin")
    before = len(os.listdir("/dev/fd"))
    tokens = Tokens(tmp_path, "train", 16)
    windows = [tokens.window(i) for i in range(0, tokens.windows, tokens.windows // 300)]
    assert len(windows) >= 300
    assert len(os.listdir("/dev/fd")) - before <= 128


def test_a_step_is_a_function_of_seed_and_step_and_an_epoch_sees_all_once(dataset, tiny):
    tokens = Tokens(dataset, "train", 16)

    def windows(step, world_size=1, **options):
        config = tiny(**options)
        rows = []
        for rank in range(world_size):
            process = Process(CPU, rank=rank, world_size=world_size)
            for x, _ in batches(tokens, step, config, process):
                rows += x.tolist()
        return rows

    assert sorted(windows(5)) == sorted(windows(5, 2)) == sorted(windows(5, 4, batch_size=1))
    assert windows(6) != windows(5) == windows(5, batch_size=8) != windows(5, seed=1)
    seen = sum((windows(step) for step in range(125)), [])
    n = tokens.windows                             # an epoch ends within a step
    first, second = seen[:n], seen[n:2 * n]
    assert first != second
    every = [tokens.window(i)[:-1].tolist() for i in range(n)]
    assert sorted(first) == sorted(second) == sorted(every)
    assert train_py.epoch_order.cache_info().currsize == 2       # of three orders so far


def test_validation_is_the_mean_over_windows_spread_evenly_whatever_the_batch(tiny):
    data = train_py.open_dataset(tiny(), Process(CPU))
    torch.manual_seed(0)
    model = GPT(resolve(tiny())).double()
    passes = set()

    def look(module, given):
        passes.add((given[0].shape, module.training, torch.is_grad_enabled()))

    model.wte.register_forward_pre_hook(look)

    def measured(batch_size, eval_tokens):
        config = tiny(batch_size=batch_size)
        return evaluate(model, data, config, Process(CPU), eval_tokens)

    assert data.val.windows == 62                  # ten of them, from the first to the last tenth
    x, y = data.val.batch([0, 6, 12, 18, 24, 31, 37, 43, 49, 55], CPU)
    nats = F.cross_entropy(model(x, y)[0].mT, y, reduction="none").detach()
    bits = float(nats.sum()) / math.log(2)
    n_bytes = int((y != 256).sum())                # an end of text has none
    for batch_size in (1, 3, 10):
        passes.clear()
        result = measured(batch_size, 160)
        # Another shape would be compiled, too. Neither dropout nor gradients are wanted.
        assert passes == {((batch_size, 16), False, False)}
        assert result["val_loss"] == pytest.approx(nats.mean().item())
        assert result["val_bpb"] == pytest.approx(bits / n_bytes)
    error = float(nats.mean(1).std()) / 10 ** 0.5
    assert measured(1, 160)["val_error"] == pytest.approx(error)
    means = [float(part.mean()) for part in nats.split(3)]       # of 3, 3, 3 and 1 windows
    variance = np.cov(means, fweights=[3, 3, 3, 1], ddof=0)
    assert measured(3, 160)["val_error"] == pytest.approx((variance / 3) ** 0.5)
    assert result["val_error"] is None             # of one micro-batch
    assert measured(3, 9)["val_loss"] > 1          # one window at least
    assert measured(3, 992) == measured(3, 9999)   # all there are
    assert model.training


# ---- A step

def test_learning_rate_is_a_line_and_a_cosine():
    config = TrainConfig(max_steps=100, warmup_ratio=0.2, learning_rate=2.0, min_lr_ratio=0.1)
    rates = [learning_rate(config, step) for step in range(100)]
    assert [rates[0], rates[9], rates[99]] == pytest.approx([0.1, 1.0, 0.2])
    assert rates[19] == rates[20] == 2.0
    assert (rates[59] + rates[60]) / 2 == pytest.approx(1.1, rel=1e-2)   # halfway


@pytest.mark.parametrize("arch, batch_size, grad_clip", [
    ("angpt", 4, 0.5), ("powernorm", 4, 0.5), ("angpt", 1, 0)])
def test_train_is_the_loop_written_out(tiny, dataset, arch, batch_size, grad_clip):
    config = tiny(arch=arch, batch_size=batch_size, grad_clip=grad_clip, weight_decay=0.3)
    log = train(config)
    c = resolve(config)
    tokens = Tokens(dataset, "train", 16)
    torch.manual_seed(c.seed)
    model = GPT(c)
    groups = []
    for p in model.parameters():
        groups.append(dict(params=[p], weight_decay=0.3 * (p.dim() == 2)))
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-9)
    order = np.random.default_rng((c.seed, 0)).permutation(tokens.windows)
    losses = []
    for step in range(6):
        losses.append(0.0)
        for part in order[8 * step:8 * step + 8].reshape(-1, batch_size):
            loss = model(*tokens.batch(part, CPU))[1] * batch_size / 8
            loss.backward()
            losses[-1] += loss.item()
        if grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        for group in adam.param_groups:
            group["lr"] = learning_rate(c, step)
        adam.step()
        adam.zero_grad()
        model.project_()
    assert [loss for _, loss in column(log, "loss")] == pytest.approx(losses, rel=1e-5)
    assert_same_state(weights(config), model.state_dict(), 1e-4)


def test_each_step_of_each_rank_draws_its_own_dropout(tiny):
    c = resolve(tiny())
    model = GPT(c)
    optimizer = make_optimizer(model, c)
    seeds = set()
    for step, rank, seed in (0, 0, 1), (0, 1, 1), (1, 0, 1), (0, 0, 2):
        c.seed = seed
        process = Process(CPU, rank=rank, world_size=2)
        optimizer_step(step, model, optimizer, [(IDX, IDX)], c, process)
        seeds.add(torch.initial_seed())
    assert len(seeds) == 4


# ---- Runs

@pytest.mark.filterwarnings("error:Converting a tensor with requires_grad")
def test_a_run_learns_and_leaves_checkpoint_log_and_picture_and_watch_joins_the_log(tiny):
    def watch(model, optimizer, step):
        seen.append(step)
        assert optimizer.param_groups[0]["params"][0] is model.wte.weight
        assert (out / "loss.png").exists() == (step > 20)        # there is none of step 0
        # Our names stay. At step 0 there is no loss of ours yet.
        twice = torch.tensor(2.0 * step, requires_grad=True)
        return {"twice": twice, "step": 99, "loss": 7.0}

    lines, seen = [], []
    config = tiny(arch="rmsnorm", max_steps=60, learning_rate=1e-2, eval_interval=20,
                  checkpoint_interval=60, log_interval=15, final_eval_tokens=320)
    out = Path(config.out_dir)
    log = train(config, watch, lines.append)
    assert sorted(path.name for path in out.iterdir()) == ["ckpt.pt", "log.jsonl", "loss.png"]
    assert "rmsnorm, 16,496 parameters, 1 x cpu, float32" in lines[0]
    assert "steps 0 to 60 of 128 tokens, 0.96 epochs of " in lines[1]
    assert lines[1].endswith("peak learning rate 0.01")
    val_loss = r"   val loss \S+ ± \S+ on 128 tokens \(\S+ bits per byte\)"
    assert re.fullmatch("step 0/60" + val_loss, lines[2])
    assert re.fullmatch(r"step 15/60   loss \S+   \S+ tokens/s   0:00:\d\d left", lines[3])
    assert read_log(out) == log
    assert [step for step, loss in column(log, "loss") if loss != 7] == [15, 20, 30, 40, 45, 60]
    assert column(log, "twice") == [(0, 0), (20, 40), (40, 80), (60, 120)]
    assert column(log, "val_tokens") == [(0, 128), (20, 128), (40, 128), (60, 320)]
    losses = dict(column(log, "val_loss"))
    assert list(losses) == seen == [0, 20, 40, 60]
    assert losses[60] < 0.7 * losses[0]
    assert log[-1].keys() >= {"seconds", "val_bpb", "lr", "grad_norm"}
    assert log[-1]["tokens"] == 60 * 128


@pytest.mark.parametrize("max_steps, warns", [(10 ** 9, False), (10 ** 10, True)])
def test_a_run_that_is_too_long_for_a_cpu_says_so_before_it_begins(tiny, max_steps, warns):
    lines = []

    def stop(model, optimizer, step):
        raise StopIteration

    with pytest.raises(StopIteration):
        train(tiny(arch="rmsnorm", max_steps=max_steps, checkpoint_interval=10), stop, lines.append)
    assert any("This run is meant for GPUs" in line for line in lines) == warns


@pytest.mark.parametrize("name", ["run", "link"])
def test_a_new_run_moves_an_earlier_one_and_says_so(tiny, tmp_path, name):
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "link").symlink_to(run)            # keeps leading to the newest run
    logs, lines = [], []
    for seed, lost in ((1, "ckpt.pt"), (2, "log.jsonl"), (3, "loss.png")):
        config = tiny(seed=seed, max_steps=1, out_dir=str(tmp_path / name))
        logs.append(train(config, say=lines.append))
        os.remove(run / lost)                      # a checkpoint or a log alone is a run, too
    assert read_log(tmp_path / "run.1") == logs[0]
    assert read_checkpoint(tmp_path / "run.2")["config"]["seed"] == 2
    assert read_log(run) == logs[2]
    moves = [line for line in lines if "has moved" in line]
    assert moves == [f"The earlier run in {run} has moved to {run}.{n}" for n in (1, 2)]


def test_a_full_disk_is_one_line_and_leaves_the_checkpoint_whole(tiny, old, monkeypatch):
    def full(state, file):
        file.write(b"x" * 100)
        raise RuntimeError("[enforce fail at inline_container.cc:664]\nunexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(DataError, match="^.*ckpt.pt: cannot be written; is the disk full.*$"):
        train(TrainConfig(out_dir=str(old), resume=True, max_steps=9))
    monkeypatch.undo()
    assert read_checkpoint(old)["step"] == 6
    assert not list(old.glob("*.tmp"))
    path = old / "log.jsonl"
    with patch("builtins.open", side_effect=OSError(28, "No space left on device")):
        with pytest.raises(DataError, match=f"^{path}: cannot be written; is the disk full.*28"):
            train_py.append_log(old, {"step": 7})


def test_a_run_outside_the_main_thread_has_no_signal_handlers(tiny):
    with ThreadPoolExecutor() as pool:
        log = pool.submit(train, tiny(max_steps=2)).result()
    assert log[-1]["step"] == 2


def test_weights_stay_float32_in_bfloat16_and_a_run_keeps_its_dtype(tiny):
    exact = train(tiny(max_steps=2))
    config = tiny(dtype="bfloat16", max_steps=2)
    rounded = train(config)
    assert column(exact, "loss")[-1] != column(rounded, "loss")[-1]
    assert {x.dtype for x in weights(config).values()} == {torch.float32}
    # With a cache, the gradients of the loss's chunks would be added up in bfloat16.
    with Process(CPU, torch.bfloat16).autocast():
        assert not torch.is_autocast_cache_enabled()
    train(resumed(config, max_steps=3))    # auto may be float32
    assert checkpoint(config)["config"]["dtype"] == "bfloat16"


@pytest.mark.parametrize("factor, offset, says", [
    (math.nan, 0, "step 7: loss nan, gradient norm nan; a lower --learning_rate"),
    (1e30, 0, r"step 7: loss \d\S+, gradient norm inf"),
    (1, math.inf, r"step 7: loss inf, gradient norm \d")])
def test_a_run_that_is_not_finite_stops_and_keeps_its_last_good_checkpoint(
        old, monkeypatch, factor, offset, says):
    summed_loss = GPT.summed_loss
    monkeypatch.setattr(GPT, "summed_loss", lambda *given: factor * summed_loss(*given) + offset)
    config = TrainConfig(out_dir=str(old), resume=True, max_steps=9)
    with pytest.raises(Diverged, match=says):
        train(config)
    assert all(x.isfinite().all() for x in weights(config).values())


def test_a_run_that_becomes_far_worse_than_guessing_ends_in_3(old, command):
    options = ["--learning_rate=100", "--max_steps=9", "--device=cpu"]
    code, _, said = command(f"--out_dir={old}", "--resume", *options)
    assert code == 3
    assert re.search(r"step 9: the validation loss \S+ is far above that of guessing", said)
    assert read_checkpoint(old)["step"] == 6


@pytest.mark.parametrize("loss, initial_loss, step, says", [
    (math.nan, 5.0, 0, "step 0: the validation loss is nan; no step has been taken yet"),
    (math.inf, math.inf, 9, "step 9: the validation loss is inf; a lower --learning_rate may help"),
    (11.2, 5.0, 9, "step 9: the validation loss 11.2 is far above that of guessing"),
    (20.1, 20.0, 9, "far above"), (20.0, 20.0, 9, None), (11.0, 5.0, 9, None)])
def test_a_validation_loss_is_diverged_above_the_initial_one_and_twice_guessing_s(
        loss, initial_loss, step, says):
    config = SimpleNamespace(vocab_size=257)       # 2 log(257) is 11.098
    with pytest.raises(Diverged, match=says) if says else contextlib.nullcontext():
        train_py.check_val_loss(loss, initial_loss, step, config)


def test_initial_weights_may_be_far_worse_than_guessing(tiny):
    log = train(tiny(arch="rmsnorm", tie=True, embed_std=2, learning_rate=1e-5, eval_interval=1,
                     max_steps=3), say=None)
    losses = [loss for _, loss in column(log, "val_loss")]
    assert losses[0] > losses[1] > losses[3] > 2 * math.log(257)


@pytest.mark.parametrize("arch", [*PRE_NORM, *SPHERE])
def test_what_watch_leaves_does_not_change_the_training(tiny, dataset, arch):
    """watch may compute gradients with backward(), and leave the model in eval mode."""
    def watch(model, optimizer, step):
        assert model.wte.weight.grad is None
        model.eval()
        model(*batch, loss_only=True)[1].backward()

    batch = Tokens(dataset, "val", 16).batch(range(4), CPU)
    ends = []
    for given in (None, watch):
        config = tiny(arch=arch, final_eval_tokens=320)
        train(config, given, say=None)
        ends.append(torch.load(Path(config.out_dir, "ckpt.pt"))["model"])
    assert_same_state(*ends, 0)


# ---- Stopping and resuming

def in_reverse(model, config):
    groups = [dict(params=group["params"][::-1]) for group in
              make_optimizer(model, config).param_groups]
    return torch.optim.AdamW(groups, fused=True)


def sgd(model, config):
    return torch.optim.SGD(model.parameters(), momentum=0.9)


@pytest.mark.parametrize("earlier, now, fits", [
    (in_reverse, make_optimizer, False), (sgd, make_optimizer, False),
    (in_reverse, in_reverse, True), (sgd, sgd, True)])
def test_moments_of_another_optimizer_are_refused(tiny, monkeypatch, earlier, now, fits):
    """The fused AdamW does not look at shapes, and would read beyond a tensor's end."""
    monkeypatch.setattr(train_py, "make_optimizer", earlier)
    train(tiny(), say=None)
    monkeypatch.setattr(train_py, "make_optimizer", now)
    expected = pytest.raises(DataError, match="moments do not fit this optimizer; .* --init_from")
    with contextlib.nullcontext() if fits else expected:
        train(tiny(resume="true", max_steps=9), say=None)


@pytest.mark.parametrize("number, error, options", [
    (signal.SIGTERM, SystemExit, dict(arch="powernorm", grad_clip=0.3)),
    (getattr(signal, "SIGHUP", signal.SIGTERM), SystemExit, dict(arch="ngpt")),
    (signal.SIGINT, KeyboardInterrupt, dict(arch="angpt", dropout=0.2))])
def test_a_signal_ends_a_run_and_what_it_saved_resumes_bit_by_bit(
        tiny, tmp_path, number, error, options):
    def stop(model, optimizer, step):
        if step == 3:
            signal.raise_signal(number)
            assert signal.getsignal(number) is usual   # a second one ends it
    # nohup ignores SIGHUP, and a shell's & ignores SIGINT, so handle the signal as usual.
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, usual)
    whole, parts = [tiny(**options, out_dir=f"{tmp_path}/{name}") for name in "ab"]
    log = train(whole)
    assert signal.getsignal(number) is usual
    with pytest.raises(error) as stopped:
        train(parts, watch=stop)
    signal.signal(number, before)
    if error is SystemExit:
        assert stopped.value.code == 128 + number
    assert checkpoint(parts)["step"] == 3
    again = train(resumed(parts))
    assert column(again, "loss") == column(log, "loss")
    assert column(again, "val_loss") == column(log, "val_loss")
    seconds = [value for _, value in column(again, "seconds")]
    assert seconds == sorted(seconds)
    assert_same_state(weights(parts), weights(whole))


def resumed_from(first, **options):
    """Return the config of a run that resumes one of the config `first`."""
    checkpoint = {"config": asdict(first), "options": first.options}
    config = TrainConfig(resume="true", **options)
    return train_py.with_checkpoint(config, checkpoint, own_checkpoint=True)


@pytest.mark.parametrize("before, now, steps", [
    ({}, {}, 20), ({}, dict(warmup_ratio=0.2), 20), (dict(warmup_ratio=0.3), {}, 30),
    (dict(warmup_ratio=0.3), dict(warmup_ratio=0.3), 30), ({}, dict(warmup_ratio=0.5), 500),
    (dict(warmup_ratio=0.29), {}, 29),             # 0.29 * 100 is 28.999...
    (dict(warmup_ratio=1.0), dict(max_steps=50), 50)])
def test_only_another_warmup_ratio_changes_a_resumed_run_s_warm_up(before, now, steps):
    first = resolve(TrainConfig(arch="rmsnorm", max_steps=100, **before))
    longer = resumed_from(first, **dict(max_steps=1000) | now)
    assert round(longer.warmup_ratio * longer.max_steps) == steps
    # A third command may repeat the first one's ratio, set or by the recipe.
    repeated = now.get("warmup_ratio", first.warmup_ratio)
    longest = resumed_from(resolve(longer), max_steps=4000, warmup_ratio=repeated)
    assert round(longest.warmup_ratio * 4000) == steps
    assert resolve(longer).eval_interval == longer.max_steps / 10  # ten validations, of any length


def test_a_resumed_run_keeps_the_recipe_it_began_with(monkeypatch):
    first = resolve(TrainConfig(arch="rmsnorm"))
    edited = dict(RECIPES["rmsnorm"], learning_rate=1.0, weight_decay=0.5, warmup_ratio=0.5)
    monkeypatch.setitem(RECIPES, "rmsnorm", edited)
    assert TrainConfig(arch="rmsnorm").weight_decay == 0.5
    again = resumed_from(first)
    assert again.learning_rate == first.learning_rate
    assert again.weight_decay == first.weight_decay
    for ratio, expected in ((0.2, 0.1), (0.5, 0.5)):  # the recipe's old ratio is no change
        longer = resumed_from(first, max_steps=2 * first.max_steps, warmup_ratio=ratio)
        assert longer.warmup_ratio == pytest.approx(expected)
    assert resumed_from(first, learning_rate=0.1).learning_rate == 0.1


def test_what_loaded_weights_do_not_fix_may_be_set_again():
    first = resolve(TrainConfig(arch="powernorm", out_dir="moved"))
    free = dict(dropout=0.5, embed_std=0.5)
    assert asdict(resumed_from(first, **free)).items() >= free.items()
    assert resumed_from(first).out_dir == "out/angpt"            # where its checkpoint is now
    free |= dict(block_size=64, pn_warmup=3)
    config = TrainConfig(init_from="run", **free)
    tuned = train_py.with_checkpoint(config, {"config": asdict(first)})
    assert asdict(tuned).items() >= free.items()


def test_all_ranks_wait_until_the_last_record_and_checkpoint_are_written(tiny, monkeypatch):
    def barrier(process):
        run = Path(tiny().out_dir)
        seen.append((run.exists(), read_log(run)[-1:], (run / "ckpt.pt").exists()))

    seen = []                                      # at the barriers of open_dataset and of run
    monkeypatch.setattr(train_py.Process, "barrier", barrier)
    log = train(tiny())
    assert seen == [(False, [], False), (True, [], False), (True, log[-1:], True)]


@pytest.mark.parametrize("factor, saved_step", [(1.0, 5), (math.nan, 3)])
def test_a_signal_between_records_is_noticed_and_a_nan_is_not_saved(
        tiny, monkeypatch, factor, saved_step):
    """The signal comes in the step after step 4, whose loss is multiplied by the factor.

    So the run is saved at step 5, or, if that loss is NaN, its last checkpoint stays, of step 3.
    """
    def stop_at_4(tokens, step, *rest, batches=train_py.batches):
        if step == 4:
            signal.raise_signal(signal.SIGTERM)
            monkeypatch.setattr(GPT, "summed_loss", lambda *given: factor * summed_loss(*given))
        return batches(tokens, step, *rest)

    summed_loss = GPT.summed_loss
    monkeypatch.setattr(train_py, "batches", stop_at_4)
    with pytest.raises((SystemExit, Diverged)):
        train(tiny(log_interval=99, eval_interval=99, max_steps=9))
    assert checkpoint(tiny())["step"] == saved_step


def test_the_default_dataset_is_made_if_it_is_missing(tiny, dataset, tmp_path, monkeypatch):
    def make(*_):
        shutil.copytree(dataset, "data/stdlib")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_py, "prepare", make)
    assert train(tiny(data="data/stdlib", max_steps=1))[-1]["step"] == 1
    shutil.rmtree("data/stdlib")
    monkeypatch.setattr(train_py, "prepare", None)
    monkeypatch.setattr(Process, "barrier", make)  # rank 0 makes it while the others wait
    rank_1 = Process(CPU, rank=1, world_size=2)
    assert train_py.open_dataset(tiny(data="data/stdlib"), rank_1).val.windows == 62


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
def test_sighup_stays_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with train_py.noted_signals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert signals == []
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("early, learning_rate", [
    ({}, 0.1),                                     # then all of its options count as set
    (dict(given=dict(arch="none.py:ngpt", gone=1, learning_rate=0.2)), 0.2)])
def test_an_early_checkpoint_s_gone_options_are_left_out_and_its_file_is_not_run(
        tmp_path, own, early, learning_rate):
    saved = asdict(TrainConfig(learning_rate=0.1)) | {"arch": "none.py:ngpt", "gone": 1}
    del saved["size"], saved["init_from"]          # some early ones do not have them
    whole = dict(config=saved, model={}, step=0, tokenizer="bytes", **early)
    torch.save(whole, tmp_path / "ckpt.pt")
    state = read_checkpoint(tmp_path)
    places = dict(out_dir=str(tmp_path))
    config = TrainConfig(resume="true", **places) if own else TrainConfig(init_from="run", **places)
    completed = train_py.with_checkpoint(config, state, own)
    assert completed.arch == "ngpt"
    assert not own or completed.learning_rate == learning_rate


def test_a_resumed_run_keeps_its_options_and_takes_those_that_are_set(tiny, command):
    config = tiny(arch="ngpt", dropout=0.1, grad_clip=0.3, beta1=0.8, learning_rate=0.1)
    train(config)
    assert checkpoint(config)["options"] == config.options       # what was set, and no more
    same = checkpoint(config)["config"] | dict(resume="true")
    train(resumed(config, max_steps=7))
    assert checkpoint(config)["config"] == same | dict(max_steps=7)
    same_run = [f"--out_dir={config.out_dir}", "--resume=true"]
    command(*same_run, "--max_steps=8", "--beta1=0.9", "--grad_clip=1")   # the defaults, but typed
    assert checkpoint(config)["config"] == same | dict(max_steps=8, beta1=0.9, grad_clip=1)
    assert checkpoint(config)["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.95)
    lines = []
    assert train(resumed(config, max_steps=5), say=lines.append)[-1]["step"] == 8
    assert "already finished at step 8; a larger --max_steps trains further" in lines[-1]
    train(resumed(config), say=lines.append)
    assert "already finished at step 8" in lines[-1]
    assert checkpoint(config)["config"]["max_steps"] == 8


def test_auto_resumes_where_a_checkpoint_is_and_reads_a_log_as_far_as_it_is_whole(tiny, tmp_path):
    path = tmp_path / "run" / "log.jsonl"
    path.parent.mkdir()
    (path.parent / "ckpt.pt.tmp").touch()          # a run was killed while it saved
    (path.parent / ".DS_Store").touch()
    log = train(tiny(resume="auto"))
    whole = path.read_bytes()
    before_last = whole.rsplit(b"\n", 2)[0]
    for end in (whole[:-30] + b"\xff{", before_last + b"\nnull\n", before_last + b"\n{}\n"):
        path.write_bytes(end)
        assert read_log(path.parent) == log[:-1]
    path.write_bytes(b"null\n" + whole.replace(b"\n", b"\n\n\0\n", 1))
    assert read_log(path.parent) == log            # good lines after a bad one are kept
    assert read_log(tmp_path / "none") == []
    path.write_bytes(whole)
    again = train(tiny(resume="auto", max_steps=7))
    assert [record["step"] for record in again] == list(range(8))


def test_a_second_signal_under_torchrun_is_only_noted(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(KeyboardInterrupt), train_py.noted_signals() as signals:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signals == [signal.SIGINT, signal.SIGINT]


def test_ctrl_c_also_ends_a_compiler(capsys):
    failed = torch._dynamo.exc.BackendCompilerFailed("inductor", RuntimeError("killed"), None)
    with pytest.raises(KeyboardInterrupt), train_py.noted_signals():
        signal.raise_signal(signal.SIGINT)
        raise failed
    assert "--resume=auto" in capsys.readouterr().err    # there may be no checkpoint yet
    with pytest.raises(type(failed)), train_py.noted_signals():
        raise failed


def test_a_signal_to_any_of_several_ranks_stops_all_within_ten_steps(tiny, monkeypatch):
    def gather(process, value):
        if value == []:                            # the other rank has noted a signal in step 4
            return [[], [signal.SIGTERM] if 4 in steps else []]
        return [value, value]

    def note(tokens, step, *rest, batches=train_py.batches):
        steps.append(step)
        return batches(tokens, step, *rest)

    steps = []
    monkeypatch.setattr(train_py, "set_up_process", lambda config: Process(CPU, world_size=2))
    monkeypatch.setattr(train_py, "distribute", lambda model, process: model)
    monkeypatch.setattr(train_py, "batches", note)
    monkeypatch.setattr(Process, "gather", gather)
    with pytest.raises(SystemExit):
        train(tiny(log_interval=99, eval_interval=99, checkpoint_interval=99, max_steps=19))
    assert checkpoint(tiny())["step"] == 10


def test_a_second_signal_ends_a_run_although_the_shell_ignored_it():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), train_py.noted_signals():
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_log_has_the_time_of_the_steps_alone(tiny, monkeypatch):
    now = 0

    def lasts(seconds, function):
        def call(*arguments):
            nonlocal now
            now += seconds(arguments[0])
            return function(*arguments)
        return call

    monkeypatch.setattr(train_py, "time", SimpleNamespace(perf_counter=lambda: now))
    durations = dict(evaluate=lambda model: 50, save_checkpoint=lambda path: 60,
                     optimizer_step=lambda step: 198 if step == 0 else 2)  # step 0 compiles, too
    for name, seconds in durations.items():
        monkeypatch.setattr(train_py, name, lasts(seconds, getattr(train_py, name)))
    config = tiny(log_interval=2, eval_interval=3, checkpoint_interval=4)
    lines = []
    train(config, say=lines.append)
    log = train(resumed(config, max_steps=9), say=None)
    assert dict(column(log, "seconds")) == {0: 0, 2: 200, 3: 202, 4: 204, 6: 208, 8: 212, 9: 214}
    speeds = {speed for _, speed in column(log, "tokens_per_s")}
    assert speeds == {config.total_batch_size / 2}
    # After a first step of over three minutes the time left is said at once, and only once.
    train(tiny(log_interval=1, max_steps=2, out_dir=f"{config.out_dir}.2"), say=lines.append)
    assert sum("step 1/6   loss" in line for line in lines) == 1
    assert sum("step 1/2   loss" in line for line in lines) == 1


def test_a_longer_last_validation_is_announced(tiny):
    for eval_tokens, final_eval_tokens, times in ((32, 32, 0), (32, 64, 1), (10**6, 10**7, 0)):
        lines = []
        config = tiny(max_steps=1, eval_tokens=eval_tokens, final_eval_tokens=final_eval_tokens)
        train(config, say=lines.append)
        assert sum("last validation" in line for line in lines) == times


def test_the_time_goes_on_from_the_last_record_that_has_it(tmp_path):
    for record in (dict(step=1, seconds=2.0), dict(step=2), dict(step=3, seconds=4.0)):
        train_py.append_log(tmp_path, record)
    assert train_py.cut_log(tmp_path, 2) == 2.0
    assert [record["step"] for record in read_log(tmp_path)] == [1, 2]


def test_the_picture_has_both_losses_after_step_0(tmp_path, monkeypatch):
    pictures = []
    monkeypatch.setattr(train_py.Figure, "savefig", lambda self, path: pictures.append(self))
    for step in range(3):
        record = dict(step=step, tokens=step, loss=5 - step, val_loss=8 - step)
        train_py.append_log(tmp_path, record)
    train_py.draw_losses(tmp_path)
    lines = {line.get_label(): list(line.get_ydata()) for line in pictures[0].axes[0].lines}
    assert (lines["training"], lines["validation"]) == ([4, 3], [7, 6])


def test_utilization_and_the_time_left(monkeypatch):
    model = tiny_gpt("layernorm")                  # two blocks of width 16, for 12 positions
    linear = sum(p.numel() for name, p in model.named_parameters()
                 if p.dim() == 2 and name != "wte.weight")
    # Forward and backward take three times the 2 x 2 operations per channel and position.
    flops = 6 * linear + 3 * 2 * 2 * 2 * 16 * (12 / 2)
    gpus = SimpleNamespace(device=SimpleNamespace(type="cuda"), dtype=torch.bfloat16, world_size=4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    mfu = pytest.approx(flops * 1e9 / 4 / 989e12)
    assert train_py.utilization(model, 1e9, gpus) == {"mfu": mfu}
    assert train_py.utilization(model, 1e9, Process(CPU)) == {}

    record = dict(step=5, loss=2, tokens_per_s=100, mfu=0.4)
    line = train_py.progress_line(record, SimpleNamespace(max_steps=9, total_batch_size=250))
    assert line == "step 5/9   loss 2.000   100 tokens/s   40.0% MFU   0:00:10 left"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_resumed_run_lets_go_of_the_checkpoint_that_it_has_read(tiny):
    train(tiny())
    maps = []

    def look(*_):
        maps.append(Path("/proc/self/maps").read_text())

    train(resumed(tiny(), max_steps=8), watch=look)
    assert maps and not any(str(tiny().out_dir) in text for text in maps)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("platform, is_mapped", [("linux", True), ("win32", False)])
def test_on_windows_no_checkpoint_is_mapped(tiny, monkeypatch, platform, is_mapped):
    folder = tiny().out_dir + "-ä"
    train(tiny(out_dir=folder))
    monkeypatch.setattr(sys, "platform", platform)
    read = train_py.read_checkpoint(folder)
    assert read and (folder in Path("/proc/self/maps").read_text("utf-8")) is is_mapped


@pytest.mark.skipif(sys.platform != "linux", reason="needs file names of any bytes")
def test_a_folder_whose_name_is_not_utf_8_is_read_again(tiny):
    folder = tiny().out_dir + os.fsdecode(b"-\xe4")
    train(tiny(out_dir=folder))
    assert train_py.read_checkpoint(folder)["step"] == 6


def test_a_run_goes_on_without_its_picture(tiny, monkeypatch):
    def fail(folder):
        raise RuntimeError("latex could not be found")

    monkeypatch.setattr(train_py, "draw_losses", fail)
    lines = []
    assert train(tiny(), say=lines.append)[-1]["step"] == 6
    assert sum("run/loss.png: cannot be drawn (latex could" in line for line in lines) == 2


def test_a_line_is_printed_on_a_console_without_its_characters(monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    train_py.print_line("val loss 1 ± 2")
    assert narrow.buffer.getvalue() == b"val loss 1 ? 2\n"


def test_a_run_is_not_resumed_with_another_dataset(tiny, old, dataset, tmp_path):
    data = shutil.copytree(dataset, tmp_path / "data")
    meta = read_meta(data)

    def resume_with(max_steps, **changes):
        write_json(data / "meta.json", meta | changes)
        config = TrainConfig(out_dir=str(old), resume=True, data=str(data), max_steps=max_steps)
        return train(config)[-1]["step"]

    refused = pytest.raises(DataError, match="trained on another dataset than the one in .*data")
    with refused:                                  # older datasets are told apart by their sizes
        resume_with(7, train_tokens=7999)
    assert resume_with(7, fingerprint="new") == 7  # the sizes are the same
    assert resume_with(8, fingerprint="new") == 8
    with refused:
        resume_with(9, fingerprint="rebuilt")
    with refused:                                  # the same tokens, but other ones to validate on
        resume_with(9, fingerprint="new", val_tokens=meta["val_tokens"] - 1)
    state = torch.load(old / "ckpt.pt")            # the oldest checkpoints name no dataset
    del state["dataset"], state["dataset_sizes"]
    torch.save(state, old / "ckpt.pt")
    assert resume_with(9, fingerprint="rebuilt") == 9
    (data / "tiny_train_000002.bin").unlink()
    with pytest.raises(DataError, match="data: a shard is missing"):
        resume_with(10, fingerprint="new")


def test_a_shard_that_is_added_or_removed_while_a_run_is_stopped_is_noticed(
        tiny, dataset, tmp_path):
    data = shutil.copytree(dataset, tmp_path / "data")
    config = tiny(data=str(data), max_steps=1)
    refused = pytest.raises(DataError, match="trained on another dataset than the one in .*data")
    train(config)
    added = shutil.copy(data / "tiny_train_000001.bin", data / "tiny_train_000009.bin")
    with refused:
        train(resumed(config, max_steps=2))
    path = Path(config.out_dir, "ckpt.pt")
    state = torch.load(path)                       # older ones do not count what was added
    del state["added_tokens"]
    torch.save(state, path)
    assert train(resumed(config, max_steps=2))[-1]["step"] == 2
    added.unlink()
    with refused:
        train(resumed(config, max_steps=3))


def test_eval_only_needs_the_tokenizer_of_the_weights(tiny, trained, dataset, tmp_path):
    data = shutil.copytree(dataset, tmp_path / "data")
    other = dict(tokenizer="gpt2", token_bytes=bytes(257).hex())
    write_json(data / "meta.json", read_meta(data) | other)
    config = tiny(init_from=str(trained[0]), data=str(data), eval_only=True)
    with pytest.raises(DataError, match="with tokenizer=bytes, but .*/data has tokenizer=gpt2$"):
        train(config)


def test_a_folder_has_one_run_at_a_time_and_a_killed_one_resumes(tiny, command, tmp_path):
    killed = tiny(arch="powernorm", max_steps=12)
    whole = tiny(arch="powernorm", max_steps=12, out_dir=tmp_path / "whole")  # no string
    train(whole)
    script = f"""
import os, sys, time
from train import TrainConfig, train
nobody, write = os.pipe()
os.close(nobody)
told, sys.stdout = sys.stdout, open(write, "w")  # as behind `| tee` that has ended
def wait(model, optimizer, step):
    if step == 9:
        print("waits", file=told, flush=True)
        time.sleep(999)
train(TrainConfig(**{killed.options}), wait)
"""
    line = [sys.executable, "-c", script]
    with subprocess.Popen(line, cwd=HERE, stdout=subprocess.PIPE) as first:
        try:
            assert first.stdout.readline() == b"waits\n"
            _, _, said = command(*words(killed))
        finally:
            first.kill()
    assert "another run is writing here" in said
    assert checkpoint(killed)["step"] == 6
    losses = column(train(resumed(killed)), "loss")
    assert losses == column(read_log(whole.out_dir), "loss")
    assert_same_state(weights(killed), weights(whole))
    assert not list(tmp_path.glob("*.1"))


# ---- Weights that exist

@pytest.mark.parametrize("block_size, options", [
    (8, dict(arch="powernorm", n_layer=3, qk_norm=True, rope_fraction=0.5)),
    (16, dict(arch="layernorm", **GPT2)),
])
def test_a_run_from_another_s_weights_starts_with_them_and_their_options(tiny, options, block_size):
    old = tiny(**options, max_steps=1)
    train(old)
    new = TrainConfig(init_from=old.out_dir, data=old.data, block_size=block_size, mlp=old.mlp,
                      out_dir=f"{old.out_dir}-new", max_steps=1)

    def watch(model, optimizer, step):
        if step == 0:
            assert_same_state(model.state_dict(), weights(old))
            assert not optimizer.state

    train(new, watch)
    config = checkpoint(new)["config"]
    assert config.items() >= (options | {"block_size": block_size}).items()
    assert config["learning_rate"] == pytest.approx(old.learning_rate / 10)


def test_a_size_must_be_that_of_the_weights_whatever_their_run_called_it():
    shape = dict(n_embd=128, n_layer=4, n_head=4)  # that of --size=laptop
    state = {"config": asdict(TrainConfig(size="62m", **shape))}
    completed = train_py.with_checkpoint(TrainConfig(init_from="run", size="laptop"), state)
    assert {name: getattr(completed, name) for name in shape} == shape
    with pytest.raises(DataError, match="made with n_embd=128.*--size=62m; leave out --size"):
        train_py.with_checkpoint(TrainConfig(init_from="run", size="62m"), state)


def test_eval_only_prints_the_loss_and_leaves_all_as_it_is(old, dataset, tmp_path, command):
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for place in ("out_dir", "init_from"):
        options = [f"--{place}={old}", f"--data={dataset}", "--eval_tokens=16",
                   "--final_eval_tokens=128", "--dtype=float32"]
        # Any batch size will do, since no step of total_batch_size is taken.
        found = json.loads(command("--eval_only", *options, "--batch_size=3")[1])
        assert found["val_loss"] == pytest.approx(read_log(old)[-1]["val_loss"])
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with patch("builtins.print", side_effect=OSError), pytest.raises(OSError):
        train_py.main(["--eval_only", *options])   # a result that is not printed is an error


def test_a_block_may_change_its_initial_weights_by_start_(monkeypatch):
    class Mine(ARCHS["rmsnorm"]):
        def start_(self, layer):
            self.w_o.weight.fill_(layer)

    monkeypatch.setitem(ARCHS, "mine", Mine)
    blocks = tiny_gpt("mine").blocks
    assert [block.w_o.weight.unique().tolist() for block in blocks] == [[1.0], [2.0]]


def test_an_arch_in_a_file_is_trained_and_a_change_of_its_block_is_said(
        tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(ARCHS, "mine", None)       # and no more after this test
    path = tmp_path / "mine.py"
    working = """
from model import ARCHS, LayerNorm, LayerNormBlock
class MyNorm(LayerNorm):
    slope = 1  # a comment
class Mine(LayerNormBlock):
    Norm = MyNorm
ARCHS["mine"] = Mine
"""
    path.write_text(working)
    arch = f"{path}:mine"
    config = tiny(arch=arch)
    assert config.learning_rate == tiny(arch="layernorm").learning_rate

    def edit(*_):                                  # a checkpoint has the code that is trained
        path.write_text(working.replace("slope = 1", "slope = 23"))

    train(config, edit)

    def said(text, max_steps):
        path.write_text(text)
        train(resumed(config, arch=arch, max_steps=max_steps))
        return capsys.readouterr().err

    assert said(working.replace("a comment", "another") + "class Other(Mine): slope = 3", 7) == ""
    changed = said(working.replace("slope = 1", "slope = 2"), 8)
    assert "The code of mine's block has changed" in changed
    path.write_text("a typo, saved while the run continues")
    train_py.class_code.cache_clear()              # as in another process
    load_model(config.out_dir)
    del ARCHS["mine"]                              # as in another process
    with pytest.raises(DataError, match="defined in a file of the user's; set --arch=FILE.py:mine"):
        load_model(config.out_dir)
    path.write_text(working)
    model, _, _ = load_model(config.out_dir, arch=arch)
    assert type(model.blocks[0]).__name__ == "Mine"
    assert type(model.norm_f) is type(model.blocks[0].norm1)


@pytest.mark.parametrize("before, now, warns", [
    ("a", "b", True), ("a", None, False), (None, "b", False)])
def test_code_that_is_not_known_has_not_changed(tiny, monkeypatch, capsys, before, now, warns):
    config = resolve(tiny())
    state = {"model": GPT(config).state_dict(), "block_code": before}
    monkeypatch.setattr(train_py, "block_code", lambda model: now)
    train_py.make_model(config, CPU, state)
    assert ("has changed" in capsys.readouterr().err) == warns


def test_a_class_that_is_reloaded_in_place_is_read_again(tmp_path):
    path = tmp_path / "mine.py"
    old = ("from model import ARCHS, RMSNormBlock\nclass Mine(RMSNormBlock):\n    k = 1\n"
           "    def start_(self, layer): self.x = 2\nARCHS['mine'] = Mine\n")
    path.write_text(old)
    train_py.load_arch(f"{path}:mine")
    model = tiny_gpt("mine")
    for name, before, after in (("start_", "self.x = 2", "self.x = 23"), ("k", "k = 1", "k = 14")):
        assert before in train_py.block_code(model)
        path.write_text(path.read_text().replace(before, after))
        train_py.load_arch(f"{path}:mine")
        # This is what a notebook's %autoreload does.
        setattr(type(model.blocks[0]), name, getattr(ARCHS.pop("mine"), name))
        assert after in train_py.block_code(model)


@pytest.mark.parametrize("module", ["__main__", "gone"])
def test_a_block_that_was_typed_in_has_no_code(module):
    typed = type("Mine", (ARCHS["rmsnorm"],), {"__module__": module})
    model = tiny_gpt("rmsnorm")
    model.blocks[0].__class__ = typed
    assert train_py.block_code(model) is None


def test_the_file_of_an_arch_can_import_the_train_py_that_runs(tmp_path, monkeypatch, capsys):
    """So a recipe that it adds to train.RECIPES counts. (A second copy would have its own.)"""
    path = tmp_path / "mine.py"
    path.write_text("import __main__, train\nraise ImportError(train is __main__)")
    monkeypatch.setattr(sys, "argv", ["train.py", f"--arch={path}:mine"])
    monkeypatch.delitem(sys.modules, "train")      # as in the process of a command
    with pytest.raises(SystemExit):
        runpy.run_path(train_py.__file__, run_name="__main__")
    said = capsys.readouterr().err
    assert said == f"train.py: arch={path}:mine: {path} cannot be run (ImportError: True, line 2)\n"


def test_a_file_that_replaces_the_arch_of_another_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(ARCHS, "mine", None)       # and no more after this test

    def said(path):
        path.write_text("from model import ARCHS, RMSNormBlock\n"
                        "class Mine(RMSNormBlock): pass\nARCHS['mine'] = Mine")
        TrainConfig(arch=f"{path}:mine")
        return capsys.readouterr().err

    a, b = tmp_path / "a.py", tmp_path / "b.py"
    assert said(a) == said(a) == ""
    assert said(b).startswith(f"{b} has replaced the arch mine of {a};")
    assert list(bench.resolve_each(f"rmsnorm,{a}:mine", {})) == ["rmsnorm", f"{a}:mine"]


@pytest.mark.parametrize("text, says", [
    ("\nclass Mine(Blok):\n    pass", "(NameError: name 'Blok' is not defined, line 2)"),
    ("import torch\ntorch.zeros(2).view(\n3)", ", line 2)"),
    ("class Mine(", "(SyntaxError: '(' was never closed (mine.py, line 1))"),
    ("from model import ARCHS\nARCHS['mine'] = lambda config: None", "to be a class that inherits"),
    ("from model import ARCHS\ndel ARCHS['mine']", "expected a line ARCHS['mine'] = ... in ")])
def test_an_error_in_the_file_of_an_arch_is_one_line(tmp_path, monkeypatch, text, says):
    monkeypatch.setitem(ARCHS, "mine", None)       # and no more after this test
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises((ConfigError, DataError), match=f"^.*{re.escape(says)}.*$"):
        TrainConfig(arch=f"{tmp_path}/mine.py:mine")


def test_a_compiler_that_does_not_work_is_done_without_or_said(tiny, monkeypatch, capsys):
    def broken(function):
        raise RuntimeError("Python.h: No such file or directory")

    def compiled(compile):
        config = resolve(tiny(compile=compile, max_steps=10 ** 9))
        return train_py.compile_model(GPT(config), config, Process(CPU))

    monkeypatch.setattr(torch, "compile", broken)
    assert not compiled("auto")
    assert re.search("Python.h.*; training without it", capsys.readouterr().err)
    with pytest.raises(DataError, match="compile=true: .*Python.h.*; set --compile=false"):
        compiled("true")


@pytest.mark.parametrize("compile, max_steps, compiles", [
    ("true", 1, True), ("auto", 10 ** 7, True), ("auto", 10 ** 4, False),
    ("false", 10 ** 7, False)])
def test_the_blocks_and_the_loss_are_compiled(tiny, monkeypatch, compile, max_steps, compiles):
    def compiled(function):
        names.append(function.__name__)
        return function

    names = []
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda block: names.append("block"))
    config = resolve(tiny(compile=compile, max_steps=max_steps))
    assert train_py.compile_model(GPT(config), config, Process(CPU)) == compiles
    assert names == ["square", "block", "block", "summed_loss"] * compiles


# ---- Files and commands

@pytest.mark.parametrize("how", ["cut", "other"])
@pytest.mark.parametrize("name", ["ckpt.pt", "meta.json", "tiny_train_000002.bin"])
def test_damaged_files_are_one_line(tiny, old, dataset, tmp_path, name, how):
    data = shutil.copytree(dataset, tmp_path / "data")
    path = old / name if name == "ckpt.pt" else data / name
    if how == "other":
        torch.save({"model": {}}, path)
    else:
        os.truncate(path, path.stat().st_size // 2)
    config = TrainConfig(out_dir=str(old), resume=True, data=str(data), max_steps=7)
    with pytest.raises(DataError, match=f"^.*{name}.*$"):
        train(config)


def test_a_checkpoint_cannot_run_code(tmp_path):
    class Code:
        def __reduce__(self):
            return os.mkdir, (f"{tmp_path}/harm",)

    torch.save({"model": Code()}, tmp_path / "ckpt.pt")
    with pytest.raises(DataError, match="ckpt.pt: not a whole checkpoint"):
        read_checkpoint(tmp_path)
    assert not (tmp_path / "harm").exists()


def test_a_stopped_command_says_how_to_resume(tiny, old, command, monkeypatch):
    monkeypatch.chdir(old.parent)
    def stop(*given):
        signal.raise_signal(signal.SIGTERM)
        return {"val_loss": 5, "val_error": None, "val_tokens": 9, "val_bpb": 7}

    with patch.object(train_py, "evaluate", stop):
        code, out, _ = command(*words(tiny(out_dir=None)), "--init_from=run")
    assert code == 143
    assert "saved at step 0. To resume: the same command with --resume=true" in out
    _, out, _ = command(*words(tiny(out_dir=None)), "--init_from=run", "--resume=true")
    assert len(out.split("A sample")[1]) > 100
    assert read_checkpoint("out/tuned")["step"] == 6
    with patch.object(train_py, "load_model", side_effect=DataError("not in the cache")):
        code, out, _ = command(*words(tiny(out_dir=None)), "--init_from=run", "--resume=true")
    assert code == 0
    assert "no sample can be made: DataError: not in the cache" in out


def in_two_processes(config, port, n_restarts):
    """Run train.py as rank 1 and as rank 0. Return what each of them prints.

    Torchrun has a store for the addresses of its processes, at this port, and keeps it if it
    restarts them. Rank 1 starts first, so that it would find the address of an earlier rank 0.
    """
    # The environment of this process stays as it is, since lessons may run beside this test.
    both = os.environ | dict(
        WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="1", MASTER_ADDR="localhost",
        MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT=str(n_restarts))
    line = [sys.executable, HERE / "train.py", *words(config)]
    ranks = []
    for rank in (1, 0):
        ranks.append(subprocess.Popen(line, env=both | {"RANK": str(rank)}, text=True,
                                      stdout=subprocess.PIPE))
        time.sleep(rank / 2)
    try:
        outputs = [process.communicate(timeout=60)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0]
    return outputs


def test_two_processes_equal_one_and_may_be_restarted(tiny, tmp_path):
    one = tiny(arch="powernorm", pn_warmup=2, max_steps=3)
    two = tiny(**one.options | dict(batch_size=2, out_dir=str(tmp_path / "two")))
    train(one)
    log = train(resumed(one, max_steps=6))
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    in_two_processes(two, store.port, 0)
    of_rank_1, of_rank_0 = in_two_processes(resumed(two, max_steps=6), store.port, 1)
    assert "2 x cpu" in of_rank_0
    assert of_rank_1 == ""                         # rank 0 alone shows the progress
    theirs = read_log(two.out_dir)
    for key in ("loss", "val_loss", "grad_norm"):
        assert dict(column(theirs, key)) == pytest.approx(dict(column(log, key)), rel=1e-5)
    ours = weights(one)
    for name, x in weights(two).items():
        far = ~torch.isclose(ours[name], x, rtol=1e-3, atol=1e-5)
        assert far.float().mean() < 1e-3, name     # of mere rounding Adam makes a whole step


def test_ranks_that_differ_are_refused_but_paths_may_differ(tiny, trained, monkeypatch):
    def differing(eval_only, **of_other_rank):
        """Return what the error names if another rank has these options and files."""
        def gather(self, value):
            return [value, value | of_other_rank] if isinstance(value, dict) else [value]

        monkeypatch.setattr(Process, "gather", gather)
        config = tiny(init_from=str(trained[0]), max_steps=1, eval_only=eval_only)
        try:
            train(config, say=None)
        except DataError as error:
            assert not Path(config.out_dir).exists()
            return re.match(r"the processes differ in (.*); start all of them with the same command"
                            ".*; several machines need a shared folder for --out_dir and --data$",
                            str(error))[1]

    checkpoint = read_checkpoint(trained[0])
    of_saved = train_py.sum_of_bits(checkpoint)
    checkpoint["model"]["wte.weight"][3, 1] += 1e-5
    assert train_py.sum_of_bits(checkpoint) != of_saved
    facts = dict(seed=5, step=99, weights=1, dataset="other", added_tokens=1)
    for name, value in facts.items():
        assert differing(True, **{name: value}) == differing(False, **{name: value}) == name
    assert differing(False, code="class Other", max_steps=9) == "max_steps, code"
    assert differing(False, resuming=True) == "resuming"
    # The ranks compare the torch.dtype that they use, since the option, a text, may be "auto".
    assert differing(False, dtype=TrainConfig(**SMALL_RUN).dtype) == "dtype"
    other_machine = dict(data="/mnt/tiny", out_dir="/mnt/run", init_from="/mnt/first",
                         resume="auto", device="auto")
    for eval_only in (True, False):
        assert differing(eval_only, **other_machine) is None


@pytest.mark.parametrize("environment, says", [
    (dict(RANK="1"), "^RANK=1 is set, but WORLD_SIZE is 1; unset RANK, or start with torchrun$"),
    (dict(WORLD_SIZE="2"), "^the processes cannot find each other; start them with torchrun .*$")])
def test_a_process_without_the_others_is_refused(tiny, monkeypatch, environment, says):
    monkeypatch.setattr(train_py, "os", SimpleNamespace(environ=environment))
    with pytest.raises(DataError, match=says):
        train_py.set_up_process(tiny())


def test_a_second_run_of_several_processes_has_their_group(tiny, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert train_py.set_up_process(tiny()).world_size == 2


def test_torchrun_is_given_the_exit_code(monkeypatch):
    codes = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", ["train.py", "--arch=ngtp"])
    monkeypatch.setattr(os, "_exit", codes.append)
    runpy.run_path(train_py.__file__, run_name="__main__")
    assert codes == [2]


# ==================================================================================================
# sample.py

def test_sample_streams_what_the_model_writes(trained, monkeypatch):
    model, tokenizer, _ = load_model(trained[1])
    assert not model.training
    def text(prompt="1+1é", **options):
        return "".join(sampler.stream(model, tokenizer, prompt, max_new_tokens=20, **options))
    start = torch.tensor([[256, *"1+1é".encode()]])
    tokens = [token.item() for token in model.generate(start, 20, temperature=0)]
    written = bytes(token for token in tokens if token < 256)
    assert text(temperature=0) == written.decode(errors="replace")
    assert text(seed=1) != text(seed=2)
    assert text("a\udce9b", temperature=0) == text("a?b", temperature=0)     # not UTF-8
    padding, end = 257, 256                        # the first number that stands for no text
    wrote = [65, 0xC3, 0xA9, padding, 0xFF, 0xE6, 0x97, 0xA5, 66, 0xC3, end, 67]
    monkeypatch.setattr(model, "generate", lambda *_: map(torch.tensor, wrote))
    assert text() == "Aé\ufffd日B\ufffd"


def test_sample_shows_each_token_at_once(trained, monkeypatch):
    def generate(*_):
        for letter in b"bc":
            seen.append(shown.getvalue())
            yield torch.tensor(letter)
        seen.append(shown.getvalue())

    model, tokenizer, _ = load_model(trained[1])
    monkeypatch.setattr(model, "generate", generate)
    seen = []
    shown = io.BytesIO()
    terminal = io.TextIOWrapper(shown, newline="")
    with contextlib.redirect_stdout(terminal):
        sampler.write(model, tokenizer, "a")
    terminal.flush()
    assert seen == [b"a", b"ab", b"abc"]
    assert shown.getvalue() == b"abc\n"


def test_sample_writes_of_several_runs_and_seeds(trained, tmp_path, monkeypatch, capsys):
    def say(*words):
        sampler.main(["--max_new_tokens=20", "--device=cpu", *words])
        return capsys.readouterr().out

    monkeypatch.setenv("HOME", str(trained[1].parent))  # a shell leaves a ~ after a comma
    both = say(f"--out_dir={trained[0]}, ~/ngpt", "--prompt=3+4=é", "--num_samples=2")
    heads = re.findall(r"--- (.*), step 6, seed (\d+)\n", both)
    assert heads == [(str(folder), seed) for folder in trained for seed in ("1337", "1338")]
    last = say(f"--out_dir={trained[1]}", "--prompt=3+4=é", "--seed=1338")
    assert both.endswith("seed 1338\n" + last)
    assert len(last) <= len("3+4=é") + 20 + 1      # at most one character per token, and a newline
    two = say(f"--out_dir={trained[1]}", "--prompt=3+4=é", "--num_samples=2")
    assert both.endswith(two) and two.startswith("---")
    greedy = say(f"--out_dir={trained[1]}", "--temperature=0")
    assert greedy == say(f"--init_from={trained[1]}", "--top_k=1") != say(f"--out_dir={trained[1]}")
    with pytest.raises(DataError, match="now arch=angpt"):
        say(f"--out_dir={trained[1]}", "--arch=angpt")
    folder = shutil.copytree(trained[0], tmp_path / "lr=1,wd=0")  # one folder, with a comma
    assert say(f"--out_dir={folder}", "--prompt=~/b").startswith("~/b")   # text, not a path


# ==================================================================================================
# bench.py

def benchmark(name, *folders, **options):
    bench.main([name, *map(str, folders), *(f"--{key}={value}" for key, value in options.items())])


@pytest.mark.parametrize("name, options, columns", [
    ("speed", {}, {"ms/step", "tokens/s"}),
    ("sample", dict(new_tokens=5, dtype="bfloat16"), {"tokens/s"})])
def test_measurements_are_printed_and_written(name, options, columns, tmp_path, capsys):
    options = TINY_RUN | options
    folder = tmp_path / "new" / "bench"            # like out/bench, before any run
    with torch._dynamo.config.patch(specialize_float=False, recompile_limit=8):  # speed sets them
        benchmark(name, **options, archs="rmsnorm,ngpt", rounds=2, out_dir=folder)
    written = json.loads((folder / f"{name}.json").read_text())
    assert written["options"].items() >= options.items()
    assert written["device"].endswith("torch." + options["dtype"])
    first, second = written["results"]["ngpt"]
    assert first.keys() == second.keys() == columns
    assert min(first.values()) > 0
    assert re.search(r"\nrmsnorm .* 1\.000 \(1\.000-1\.000\).*\nngpt ", capsys.readouterr().out)


def test_ratios_are_those_of_a_round_and_warmup_does_not_count(tmp_path, capsys):
    def make_job(config, process):
        def job():
            calls.append(config.arch)
            factor = 2 if config.arch == "ngpt" else 1
            return {"ms/step": factor * calls.count(config.arch)}
        return job

    calls = []
    options = bench.SpeedOptions(archs="rmsnorm+qk_norm,ngpt", rounds=11, out_dir=str(tmp_path))
    bench.compare("speed", make_job, options, TINY_RUN)
    first, second = [line.split() for line in capsys.readouterr().out.splitlines()[1:3]]
    assert first == ["GPT+", "9.000", "(5.000-13.000)", "1.000", "(1.000-1.000)"]
    assert second == ["ngpt", "18.000", "(10.000-26.000)", "2.000", "(2.000-2.000)"]
    assert set(calls[::2]) == {"rmsnorm", "ngpt"}  # neither is always the first of a round


def test_a_measured_step_has_all_micro_batches_and_is_compiled(monkeypatch):
    calls = []
    clock = iter([1.0, 1.5])
    monkeypatch.setattr(bench, "timer", lambda: next(clock))
    monkeypatch.setattr(bench, "compile_model", lambda *_: calls.append("compile"))
    monkeypatch.setattr(bench, "optimizer_step",
                        lambda step, model, optimizer, given, *_: calls.append(len(given)))
    config = resolve(TrainConfig(**TINY_RUN | dict(total_batch_size=192)))
    step = bench.make_step(config, Process(torch.device("cpu")))
    assert step() == {"ms/step": 500, "tokens/s": 384}
    assert calls == ["compile", 3]


def test_decoding_is_timed_after_the_first_token_and_in_its_dtype(monkeypatch):
    def event():
        events.append(torch.is_autocast_enabled("cpu"))
        return len(events)

    def generate(self, prompt, new_tokens, temperature):
        for _ in range(new_tokens):
            event()
            yield prompt[:, 0]

    events = []
    monkeypatch.setattr(bench, "timer", event)
    monkeypatch.setattr(GPT, "generate", generate)
    process = Process(torch.device("cpu"), torch.bfloat16)
    decode = bench.make_decoding(2, 4, resolve(TrainConfig(**TINY_RUN)), process)
    assert decode() == {"tokens/s": 2 * 3 / 4}     # the second to fourth token, and the clock
    assert all(events)


@pytest.mark.parametrize("options", [{}, dict(compile="false", dtype="float32")])
def test_the_table_of_memory_is_a_line_through_two_batch_sizes(options, tmp_path, monkeypatch):
    def step_bytes(config, batch_size):
        given.add((config.compile, config.dtype))
        return (3 + 2 * batch_size) * 1e9

    given = set()
    monkeypatch.setattr(bench, "step_bytes", step_bytes)
    benchmark("memory", archs="rmsnorm+qk_norm", batch_size=5, out_dir=tmp_path, **options)
    assert given == {(options.get("compile", "true"), options.get("dtype", "bfloat16"))}
    results = json.loads((tmp_path / "memory.json").read_text())["results"]
    assert results == [{"arch": "GPT+", "fixed": 3, "per sequence": 2, "batch_size=5": 13,
                        "fits 24 GB": 8, "fits 40 GB": 16, "fits 80 GB": 32, "fits 141 GB": 32}]


def test_memory_extrapolated_from_small_models_is_the_large_ones():
    options = dict(arch="powernorm", compile="true", n_layer=3, n_embd=64, block_size=1024,
                   batch_size=5, total_batch_size=5120)
    config = resolve(TrainConfig(**TINY_RUN | options))
    step = bench.step_bytes(config, 5)
    assert step == pytest.approx(bench.step_bytes(config, 5, layers=(2, 3)), rel=0.005)
    fixed = step - 5 * (bench.step_bytes(config, 6) - step)
    kept = 16 * bench.count_parameters(config)     # weights, gradients, two moments
    one_block = 4 * 16 * config.n_embd ** 2        # its matrices, in float32
    assert kept <= fixed < kept + 2 * one_block


def test_a_compiled_graph_keeps_what_products_and_later_kernels_read():
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(x, weight):
        kept = x.exp() + 1                         # x.exp() exists in a kernel only
        return (kept.sin() @ weight + kept,)

    x, weight = torch.ones(64, 64), torch.ones(64, 64)
    run = bench.make_fused_runner(make_fx(function)(x, weight), (x, weight))
    with MemTracker() as tracker:
        results = run([x, weight])
    peak = tracker.get_tracker_snapshot("peak")[x.device]["Total"]
    assert peak == 4 * x.nbytes                    # kept, its sine, the product and the result
    assert [y.shape for y in results] == [x.shape]


def test_a_traced_loss_gives_a_tied_head_a_gradient():
    with bench.FakeTensorMode():
        model = GPT(GPTConfig(arch="rmsnorm", tie=True))
        bench.as_compiled([model], "summed_loss")
        h, targets = torch.ones(1, 8, 128), torch.ones(1, 8, dtype=torch.long)
        model.summed_loss(h, targets).backward()
    assert model.lm_head.weight.grad is not None


def test_memory_of_a_compiled_loss_is_bfloat16_logits_and_their_gradient():
    options = dict(arch="ngpt", dtype="bfloat16", compile="true", vocab_size=50304, block_size=256)
    config = resolve(TrainConfig(**TINY_RUN | options | dict(total_batch_size=1024)))
    sequence = bench.step_bytes(config, 2) - bench.step_bytes(config, 1)
    assert sequence == pytest.approx(2 * 2 * 256 * 50304, rel=0.02)
    assert bench.largest_batch_size(lambda batch_size: 3 * batch_size, 13) == 4


@pytest.mark.parametrize("name, key, last, has_star", [
    ("ngpt", "val_loss", 64, True),                # the star is that of a gray line
    ("mine", "val_loss", 64, False), ("mine", "val_loss", 128, True), ("mine", "loss", 128, False)])
def test_curves_begin_after_step_0_beside_those_of_usual_runs(
        tmp_path, monkeypatch, capsys, name, key, last, has_star):
    pictures = []
    monkeypatch.setattr(bench.Figure, "savefig", lambda self, path: pictures.append(self))
    folder = tmp_path / name
    folder.mkdir()
    (tmp_path / "bench").mkdir()                   # as in `curves out/*`
    for step, n_tokens in ((0, 64), (2, 64), (3, 64), (4, last)):
        record = dict(step=step, tokens=step * 10 ** 6, loss=1, val_loss=1, val_tokens=n_tokens)
        train_py.append_log(folder, record)
    usual = key == "val_loss"
    benchmark("curves", folder, tmp_path / "bench", out_dir=tmp_path, key=key, usual=usual)
    [axes] = pictures[0].axes
    line, stars, *gray = axes.lines
    assert [*line.get_xdata(), *stars.get_xdata()] == [2, 3, 4]
    assert ("star: the last" in axes.get_xlabel()) == has_star
    assert axes.get_ylabel().startswith("training" if key == "loss" else "validation")
    assert all(x > 0 for line in gray for x in line.get_xdata())
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == [str(folder)] + ["other seeds, default options"] * (name == "ngpt")
    out = capsys.readouterr().out
    assert (f"{folder}: no gray lines" in out) == (usual and name == "mine")
    assert f"{tmp_path / 'bench'}: left out" in out
    with pytest.raises(ConfigError, match="key=los: expected one of .*loss, .*did you mean"):
        benchmark("curves", folder, out_dir=tmp_path, key="los")


@pytest.mark.parametrize("val_tokens, stars", [
    ([], []), ([8], []), ([8, 8], []), ([8, 8, 99], [2]),
    ([8, 8, 99, 16, 16, 99], [2, 5]),              # resumed with a larger --max_steps
    ([None, None, 8, 8, 99], [4])])                # older records do not have it
def test_a_validation_on_more_tokens_is_a_star(val_tokens, stars):
    axes = bench.Figure().subplots()
    records = [dict(tokens=i * 1e6, val_loss=1) for i in range(len(val_tokens))]
    for record, number in zip(records, val_tokens):
        if number is not None:
            record["val_tokens"] = number
    assert train_py.draw_curve(axes, records, "val_loss") == bool(stars)
    line, apart = axes.lines
    assert list(apart.get_xdata()) == stars
    assert sorted([*line.get_xdata(), *stars]) == list(range(len(val_tokens)))


def test_bench_without_words_prints_its_help(capsys):
    bench.main([])
    assert "python bench.py memory" in capsys.readouterr().out


def test_a_step_of_the_benchmarks_is_one_micro_batch_of_any_size():
    for options in (dict(batch_size=3), dict(block_size=4096, batch_size=1), dict(size="0.5b")):
        [config] = bench.resolve_each("ngpt", options).values()
        assert config.total_batch_size == config.batch_size * config.block_size
    [config] = bench.resolve_each("ngpt", dict(batch_size=2, total_batch_size=2048)).values()
    assert config.total_batch_size == 2048


@pytest.mark.parametrize("words, says", [line.split("  ") for line in """
prepare books.txt  options are written as --source=books.txt
prepare source=x  options are written as --source=x
prepare x=3  options are written as --name=value
prepare --source=  source=: expected stdlib, fineweb, a file
prepare --source=x --name=../x  name=../x: expected a name
prepare --source=x --name=a/b  name=a/b: expected a name
prepare --source=x --name=/x  name=/x: expected a name
prepare --source=x --name=..  name=..: expected a name
prepare --source=x --name=.  name=.: expected a name
prepare --tokens=0  tokens=0: expected at least 1
prepare --val_tokens=0  val_tokens=0: expected at least 1
prepare --shard_tokens=0  shard_tokens=0: expected at least 1
prepare --source=x --tokenizer=cl100k_base  tokenizer=cl100k_base: expected one of bytes, gpt2
prepare --source=fineweb10B-gpt2 --tokenizer=bytes  tokenizer=bytes: expected one of gpt2
sample --temperature=1e-40  temperature=1e-40: expected 0, or at least 0.001
sample --temperature=nan  temperature=nan: expected at least 0
sample --top_k=0  top_k=0: expected at least 1
sample --num_samples=0  num_samples=0: expected at least 1
sample --seed=9223372036854775807 --num_samples=2  seed=9223372036854775807: expected less than
sample --seed=99999999999999999999  seed=99999999999999999999: expected less than
sample --start=a  did you mean prompt?
sample out/angpt  as --out_dir=out/angpt
bench sped  did you mean speed?
bench race  the race is lessons/studies/race.py
bench speed --archs=rmsnorm+qknorm  did you mean qk_norm?
bench speed --archs=ngtp  archs=ngtp: expected one of
bench speed --arch=ngpt  did you mean archs?
bench speed --rounds=0 --compile=false  rounds=0: expected at least 1
bench speed --qk_norm --archs=ngtp  --qk_norm: no such option
bench sample --new_tokens=1  new_tokens=1: expected at least 2
bench sample --batch_size=0  batch_size=0
bench curves  expected the folders of some runs
bench curves nowhere  nowhere: no such folder
bench curves nowhere --key=lr --usual  key=lr: --usual draws val_loss only
""".strip().splitlines()])
def test_errors_of_the_other_scripts_are_one_line(words, says, tmp_path, monkeypatch):
    def prepare_main(words):
        prepare(**prep.parse_options(words, "", prep.PrepareConfig))

    monkeypatch.chdir(tmp_path)
    script, *options = words.split()
    main = {"prepare": prepare_main, "sample": sampler.main, "bench": bench.main}[script]
    with pytest.raises((ConfigError, DataError), match=rf"^[^\n]*{re.escape(says)}[^\n]*$"):
        main(options)

"""Every block against its formula written out, then all else: python -m pytest"""
import copy
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken
import torch
import torch.nn.functional as F
from filelock import FileLock
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.fx.experimental.proxy_tensor import make_fx

import bench
import model as model_py
import prepare as prep
import sample as sampler
import train as train_py
from model import ARCHS, attend, Cache, ConfigError, GPT, GPTConfig, PowerNorm, PreNormBlock, unit
from prepare import DataError, prepare, read_meta, read_shard, run_script, write_json, write_shard
from train import (batches, Diverged, evaluate, learning_rate, load_model, make_optimizer,
                   optimizer_step, Process, read_checkpoint, read_log, RECIPES, resolve, Tokens,
                   train, TrainConfig)

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
    """A whole GPT, written out, with a model's parameters; a block takes its own, p, and h."""
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
def test_block_gpt_loss_and_gradients_equal_the_papers_equations(arch, options, training):
    model = roughened(tiny_gpt(arch, **options)).train(training)
    written = Written(model)
    h = gaussian(3, 7, 16).requires_grad_()
    got = model.blocks[1](h, model.cos[:7], model.sin[:7])
    assert_close(got, written.block(under(written.p, "blocks.1"), h))
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

def test_attend_takes_flash_attn_for_half_precision_on_cuda_alone(monkeypatch):
    def flash(q, k, v, dropout_p, softmax_scale, causal):                         # (B, T, H, d_k)
        calls.append((q.shape[1], dropout_p, causal))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return plain_attention(q, k, v, softmax_scale).transpose(1, 2)

    calls = []
    monkeypatch.setattr(model_py, "flash_attn_func", flash)
    OnCuda = type("OnCuda", (torch.Tensor,), dict(is_cpu=False, is_cuda=True))    # so it says
    double = [x.as_subclass(OnCuda) for x in queries_keys_values(2, 9)]
    half = [x.half() for x in double]
    assert_close(attend(*half, 0.5).double(), plain_attention(*double, 0.5), 2e-3)
    attend(*double, 0.5)
    cache = Cache()
    cache.extend(*half[1:])
    one = [x[:, :, :1] for x in half]
    attend(*one, 0.5, cache)                       # as in generation
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

@eval_and_train
def test_generation_is_in_eval_mode_and_restores_the_mode(training):
    model = roughened(tiny_gpt("powernorm", dropout=0.5))
    before = copy.deepcopy(model.state_dict())
    want = generated(model, IDX[:, :5], 6, temperature=0)
    model.train(training)
    assert torch.equal(generated(model, IDX[:, :5], 6, temperature=0), want)
    stream = model.generate(IDX[:, :5], 6)
    next(stream)
    stream.close()                                 # the reader may leave early
    assert all(module.training == training for module in model.modules())
    assert_same_state(model.state_dict(), before)
    model.lm_head.weight.data.zero_()
    assert not generated(model, IDX, 1, temperature=0).any()      # of equals the first

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
        layer, _, kind = name.rpartition(".")
        if p.dim() == 2:
            std = stds.get(layer.split(".")[-1], 0.02)
            assert abs(p.std() / std - 1) < 0.05, name
        else:
            assert (p == {"bias": 0, "g": 8}.get(kind, 1)).all(), name
    assert (model.lm_head.weight is model.wte.weight) == tie

@pytest.mark.parametrize("arch, starts", [  # 1 / sqrt(16) = 0.25
    ("ngpt", dict(s_qk=0.25, alpha_a=0.25, alpha_m=0.25, s_z=0.25,
                  s_u=1, s_v=1)),
    ("angpt", dict(g=8 ** 0.5, alpha_a=0.01, alpha_m=0.01, s_z=0.01))])
def test_scales_start_at_the_papers_stored_sizes(arch, starts):
    for name, p in tiny_gpt(arch).named_parameters():
        if p.dim() < 2:
            kind = name.removesuffix(".weight").split(".")[-1]
            assert (p == starts[kind]).all(), name

NAMES = {                                          # of a block besides its matrices
    "layernorm": "norm1.weight norm2.weight",
    "rmsnorm": "norm1.weight norm2.weight",
    "gpt+": "norm1.weight norm2.weight g",
    "powernorm": "norm1.weight norm1.psi2 norm1.nu norm1.steps "
                 "norm2.weight norm2.psi2 norm2.nu norm2.steps",
    "normformer": "norm1.weight norm2.weight norm_attn.weight norm_ffn.weight "
                  "head_scale resid_scale",
    "ngpt": "s_qk.weight s_u.weight s_v.weight alpha_a.weight alpha_m.weight",
    "angpt": "g alpha_a.weight alpha_m.weight",
}

@every_arch
def test_names_are_those_of_older_checkpoints(arch):
    own = "w_qkv.weight w_o.weight w_up.weight w_down.weight " + NAMES[arch]
    want = {"wte.weight", "wpe.weight", "lm_head.weight"}
    for name in own.split():
        want |= {f"blocks.0.{name}", f"blocks.1.{name}"}
        if name.startswith("norm1"):
            want.add(name.replace("norm1", "norm_f"))
    if arch in SPHERE:
        want.add("s_z.weight")
    model = tiny_gpt(arch, pos="learned", resid_scale=arch == "normformer")
    assert model.state_dict().keys() == want

def parameters_of(arch, **options):
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(GPTConfig(**SEVEN[arch] | options)).parameters())

WIDTHS = [                                         # d, layers, heads
    (256, 6, 4), (384, 10, 6), (512, 18, 8),
    (768, 18, 12), (1024, 24, 16), (1280, 36, 20)]

@pytest.mark.parametrize("arch, printed", [
    ("gpt+", [32.05, 62.23, 127.03, 247.16, 505.73, 1073]),  # the paper has 62.24 and 247.17
    ("ngpt", [32.11, 62.32, 127.16, 247.34, 506.00, 1073]),                       # and 62.33
    ("angpt", [32.10, 62.28, 127.08, 247.21, 505.78, 1073])])
def test_parameters_of_angpt_table_f1(arch, printed):
    for (d, layers, n_head), millions in zip(WIDTHS, printed):
        n = parameters_of(arch, vocab_size=50304, n_embd=d, n_layer=layers, n_head=n_head) / 1e6
        assert millions == round(n, 2 if n < 1000 else None)

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

@pytest.mark.parametrize("name, value, expected", [line.split("  ") for line in """
arch  rmsnrom  layernorm or rmsnorm or powernorm or
mlp  swigloo  swiglu or gelu
pos  ropes  rope or learned
""".strip().splitlines()])
def test_options_that_do_not_fit_are_one_line_with_what_was_expected(name, value, expected):
    line = rf"^{name}={value}: expected {expected}[^\n]*$"
    with pytest.raises(ConfigError, match=line):
        GPTConfig(**TINY | {name: value})

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

def test_a_seventh_arch_is_one_assignment_and_its_norm_the_last_one(monkeypatch):
    class Norm(torch.nn.RMSNorm):
        def __init__(self, n, config):
            super().__init__(n, eps=0.1)

    monkeypatch.setitem(ARCHS, "mine", type("Mine", (PreNormBlock,), dict(Norm=Norm)))
    model = tiny_gpt("mine")
    assert type(model.norm_f) is type(model.blocks[1].norm2) is Norm
    assert generated(model, IDX, 3).shape == (3, 3)

@every_arch
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch's compiler
def test_compiled_blocks_are_one_graph_with_eagers_loss_and_gradients(arch):
    torch.compiler.reset()
    eager = roughened(tiny_gpt(arch, pn_warmup=1, n_layer=1)).train()
    compiled = copy.deepcopy(eager)
    compiled.blocks[0].compile(fullgraph=True, backend="aot_eager")  # C++ is compiled by .ci/run
    for _ in range(2):
        for model in (eager, compiled):
            model.zero_grad()
            model(IDX, IDX)[1].backward()
        assert_same_gradients(compiled, eager)
        eager.project_()
        compiled.project_()
        assert_same_state(compiled.state_dict(), eager.state_dict(), 1e-11)

# ==================================================================================================
# prepare.py

TEXTS = [f"the {i} in an thé\n<|endoftext|>" * (1 + i % 9) for i in range(300)]
TEXT_BYTES = [text.encode() for text in TEXTS]

@pytest.fixture
def small_gpt2(monkeypatch):
    """A small BPE under GPT-2's name: all bytes and a few merges."""
    words = [bytes([i]) for i in range(256)]
    words += [b"th", b"the", b"in", b"an", b" t"]
    ranks = {word: i for i, word in enumerate(words)}
    bpe = tiktoken.Encoding("gpt2", pat_str=r"\s?\S+|\s+", mergeable_ranks=ranks,
                            special_tokens={"<|endoftext|>": 261})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: {"gpt2": bpe}[name])
    return bpe

@pytest.fixture
def texts(tmp_path):
    """A folder: TEXTS among more in a.jsonl and a.parquet, the first 40 as files of many/."""
    rows = [{"id": i, "url": "x" * 999, "text": text} for i, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    many = tmp_path / "many"
    (many / "deep").mkdir(parents=True)
    for i in range(40):
        folder = many / "deep" if i > 9 else many
        (folder / f"{i}.TXT").write_text(TEXTS[i], newline="")
    (many / "empty.txt").touch()
    (many / "notes.md").write_text("passed over")
    return tmp_path

def read_corpus(folder):
    """(held out, to train on): the documents of a corpus as bytes, while its counts are checked."""
    meta = read_meta(folder)
    tokenizer = prep.get_tokenizer(meta["tokenizer"])
    splits = []
    for split in ("val", "train"):
        tokens = np.concatenate([read_shard(path) for path in sorted(folder.glob(f"*_{split}_*"))])
        starts = [i for i in np.flatnonzero(tokens == tokenizer.eot_token) if i > 0]
        documents = []
        for part in np.split(tokens, starts):
            documents.append(tokenizer.decode_bytes(part[part != tokenizer.eot_token].tolist()))
        assert meta[f"{split}_tokens"] == len(tokens)
        assert meta[f"{split}_bytes"] == sum(map(len, documents))
        splits.append(documents)
    return splits

def files_of(folder):
    paths = [*folder.glob("*.bin"), *folder.glob("*.json")]
    return {path.name: path.read_bytes() for path in paths}

@pytest.mark.parametrize("name, end, of_bad", [
    ("bytes", 256, b"\xff"),
    ("gpt2", 261, "\ufffd".encode())])
def test_tokens_are_the_text_and_an_end_of_text_in_it_is_text(small_gpt2, name, end, of_bad):
    tokenizer = prep.get_tokenizer(name)
    for text in ("", "the añ日\r\n<|endoftext|> é\n"):
        tokens = prep.encode(tokenizer, text.encode())
        assert tokens.dtype == np.uint16
        assert tokens.tolist() == [end, *tokenizer.encode_ordinary(text)]
        assert end not in tokens[1:]
        assert tokenizer.decode_bytes(tokens[1:].tolist()) == text.encode()
    bad = prep.encode(tokenizer, b"\xff", new=False)
    assert tokenizer.decode_bytes(bad.tolist()) == of_bad

def test_shards_are_llm_c_s(tmp_path):
    path = tmp_path / "a.bin"
    tokens = np.random.default_rng(0).integers(0, 65536, 1000).astype(np.uint16)
    write_shard(path, tokens)
    assert np.fromfile(path, "<i4", 256).tolist() == [20240520, 1, 1000] + [0] * 253
    assert np.array_equal(np.fromfile(path, "<u2", offset=1024), tokens)
    assert not read_shard(path).flags.writeable

# ---- Corpora

def test_of_the_default_corpus_each_text_comes_once_in_a_seeded_order(tmp_path, monkeypatch):
    library = tmp_path / "lib"
    monkeypatch.setattr(os, "__file__", str(library / "os.py"))
    paths = sorted(library / f"{i}.py" for i in range(40))
    for path in [*paths, library / "site-packages" / "a.py", library / "b" / "tests" / "c.py"]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {path}\n" * 9)
    shutil.copy(library / "9.py", library / "1.py")
    paths.remove(library / "1.py")
    random.Random(5).shuffle(paths)
    val, train = read_corpus(prepare(data_dir=str(tmp_path), seed=5))
    assert val + train == [path.read_bytes() for path in paths]
    with pytest.raises(DataError, match="seed=5, now 1337; go back"):
        prepare(data_dir=str(tmp_path))

@pytest.mark.parametrize("sizes", [
    [50], [5000] * 9, [10, 9000, 9000], [100_000, 410]])
def test_of_files_of_any_size_a_twentieth_is_held_out_and_no_more_than_a_tenth(tmp_path, sizes):
    for i, size in enumerate(sizes):
        (tmp_path / f"{i}.txt").write_text((f"line of {i}\n" * size)[:size])
    val, train = read_corpus(prepare(str(tmp_path), data_dir=f"{tmp_path}/data"))
    assert len(sizes) <= len(val) + len(train) <= len(sizes) + 1   # one may be cut, where all is
    held = sum(map(len, val))
    assert held + sum(map(len, train)) == sum(sizes)
    assert sum(sizes) / 20 <= held <= sum(sizes) / 10

@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
@pytest.mark.parametrize("source, name, expected", [
    ("a.jsonl", "a", TEXT_BYTES),
    ("a.parquet", "a", TEXT_BYTES),
    ("many/", "many", TEXT_BYTES[:40]),
    ("many/**/[1-3]*.TXT", "many", TEXT_BYTES[1:4] + TEXT_BYTES[10:40])])
def test_files_folders_and_globs_give_their_texts(
        texts, small_gpt2, tokenizer, source, name, expected):
    folder = prepare(f"{texts}/{source}", data_dir=f"{texts}/data", tokenizer=tokenizer)
    val, train = read_corpus(folder)
    assert folder == texts / "data" / name
    assert sorted(b"".join(val + train)) == sorted(b"".join(expected))
    least = sum(map(len, expected)) / 20
    assert least <= sum(map(len, val)) < least + max(map(len, expected))
    if source.startswith("a."):
        assert val + train == expected  # rows whole and in their order

@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_as_many_tokens_as_asked_for(texts, small_gpt2, tokenizer, monkeypatch):
    def made(tokens):
        folder = prepare(f"{texts}/all.txt", data_dir=str(texts), name=f"{tokens}", tokens=tokens,
                         tokenizer=tokenizer, val_tokens=1500, shard_tokens=500)
        meta = read_meta(folder)
        assert meta["val_tokens"] == 1500
        shards = [read_shard(path) for path in sorted(folder.glob("*_train_*"))]
        assert shards[1:]
        return np.concatenate(shards)

    monkeypatch.setattr(prep, "PIECE", 300)
    (texts / "all.txt").write_text("".join(TEXTS[:150]))
    every = made(None)
    assert np.array_equal(made(3001), every[:3001])

@pytest.fixture
def fineweb(texts, monkeypatch):
    """TEXTS in FineWeb's place, read by datasets' own stream: its rows in the order in which they
    were read, and the number of one before which the network fails."""
    from datasets import load_dataset

    def stream(repo, name, split, streaming):
        assert (repo, name) == ("HuggingFaceFW/fineweb", "sample-10BT")
        assert (split, streaming) == ("train", True)
        rows = load_dataset("parquet", data_files=f"{texts}/a.parquet", split=split, streaming=True)
        return rows.map(read)

    def read(row):
        if row["id"] == web.fails_at:
            raise ConnectionError("no\nnetwork")
        web.rows_read.append(row["id"])
        return row

    web = SimpleNamespace(rows_read=[], fails_at=None)
    monkeypatch.setattr("datasets.load_dataset", stream)
    return web

def test_fineweb_goes_on_from_the_last_whole_shard(tmp_path, small_gpt2, fineweb):
    options = dict(source="fineweb", data_dir=str(tmp_path), val_tokens=900, shard_tokens=400)
    whole = prepare(**options, name="whole")
    assert read_corpus(whole)[1][-1] == TEXT_BYTES[-1]
    begins = []
    for fineweb.fails_at in (151, 210):
        fineweb.rows_read.clear()
        with pytest.raises(DataError, match="last whole shard .ConnectionError: no network"):
            prepare(**options)
        begins.append(fineweb.rows_read[0])
    fineweb.rows_read.clear()
    fineweb.fails_at = None
    assert read_corpus(prepare(**options)) == read_corpus(whole)
    begins.append(fineweb.rows_read[0])
    assert begins[0] == 0                          # the rows of whole shards are not read again
    assert 100 < begins[1] < 151 < begins[2] < 210

def test_fineweb_tokenized_by_others(tmp_path, small_gpt2, monkeypatch):
    def snapshot_download(repo, repo_type, local_dir, allow_patterns):
        assert (repo, repo_type) == ("kjj0/fineweb10B-gpt2", "dataset")
        for name in allow_patterns:
            write_shard(Path(local_dir, name), prep.encode(small_gpt2, b"the inn"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    folder = prepare("fineweb10B-gpt2", data_dir=str(tmp_path), tokens=150_000_000)
    assert read_corpus(folder) == [[b"the inn"], [b"the inn"] * 2]
    assert (folder / "fineweb_train_000002.bin").exists()

def test_killed_and_resumed_equals_undisturbed_and_a_changed_source_is_noticed(tmp_path):
    source = tmp_path / "long.jsonl"
    rows = [json.dumps({"text": f"{i} " * 20}) for i in range(1000)]
    source.write_text("\n".join([*rows, ""]))
    options = dict(source=str(source), shard_tokens=1500)
    whole = prepare(**options, data_dir=f"{tmp_path}/whole")
    words = [f"--source={source}", "--shard_tokens=1_500",
             f"--data_dir={tmp_path}"]
    with subprocess.Popen([sys.executable, prep.__file__, *words]) as process:
        while process.poll() is None and len(list(tmp_path.glob("long/*.bin"))) < 9:
            time.sleep(0.001)
        process.kill()
    with pytest.raises(DataError, match="no full corpus; python prepare.py"):
        read_meta(tmp_path / "long")
    again = prepare(**options, data_dir=str(tmp_path))
    assert files_of(again) == files_of(whole)
    with source.open("a") as file:
        file.write(json.dumps({"text": "more"}))
    with pytest.raises(DataError, match="made with files=1 with .*, now 1 with .*remove the folder"):
        prepare(**options, data_dir=str(tmp_path))
    shutil.rmtree(again)
    assert read_corpus(prepare(**options, data_dir=str(tmp_path)))[1][-1] == b"more"

def test_a_second_at_work_is_refused(texts):
    refused = pytest.raises(DataError, match="a: another prepare.py is at work")
    with FileLock(texts / ".a.lock"), refused:
        prepare(f"{texts}/a.jsonl", data_dir=str(texts))

def test_training_needs_no_tokenizer_for_the_bytes_of_tokens(texts, small_gpt2, monkeypatch):
    meta = read_meta(prepare(f"{texts}/a.jsonl", data_dir=str(texts), tokenizer="gpt2"))
    want = prep.token_lengths({"tokenizer": "gpt2"})
    monkeypatch.setattr(tiktoken, "get_encoding", None)      # no network
    assert np.array_equal(prep.token_lengths(meta), want)
    assert (want[256], want[257], want[261]) == (2, 3, 0)    # th, the, end of text
    with pytest.raises(DataError, match="tokenizer=gpt2: .*TIKTOKEN_CACHE_DIR.*TypeError"):
        prep.token_lengths({"tokenizer": "gpt2"})

@pytest.mark.parametrize("name, content, says", [
    ("a.csv", None, "a.csv: no .txt"),
    ("a.txt", b"", "a.txt: no .txt, .jsonl, .parquet with text"),
    ("finweb", None, "nor stdlib or fineweb"),
    ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl: expected rows with a string `text`"),
    ("a.jsonl", b'{"text": 5}\n', "a.jsonl: expected .*'int'"),
    ("a.jsonl", b'{"text": "only one"}\n', "all was held out"),
    ("a.parquet", b"PAR1 no", "a.parquet: expected rows with a string `text`")])
def test_bad_sources_are_one_line(tmp_path, name, content, says):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"^[^\n]*{says}[^\n]*$"):
        prepare(f"{tmp_path}/{name}", data_dir=f"{tmp_path}/data")

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
    """A dataset of bytes, "abcd..." with noise: one shard held out, three to train on."""
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
    """A function that makes a TrainConfig of a tiny run in tmp_path/run; no picture is drawn."""
    monkeypatch.setattr(train_py, "draw_losses", lambda folder: (folder / "loss.png").touch())
    places = dict(data=str(dataset), out_dir=str(tmp_path / "run"))
    return lambda **options: TrainConfig(**SMALL_RUN | places | options)

@pytest.fixture(scope="session")
def trained(dataset, tmp_path_factory):
    """The folders of two short runs, of layernorm and of ngpt, whose vocabulary is padded."""
    folders = [tmp_path_factory.mktemp("trained") / arch for arch in ("layernorm", "ngpt")]
    for folder in folders:
        train(TrainConfig(**SMALL_RUN, arch=folder.name, pos="learned", vocab_size=300,
                          data=str(dataset), out_dir=str(folder)), say=None)
    return folders

@pytest.fixture
def old(trained, tmp_path):
    """A copy of the first in tmp_path/run."""
    return shutil.copytree(trained[0], tmp_path / "run")

@pytest.fixture
def command(monkeypatch, capsys):
    """A function that runs train.py's command line: (exit code, stdout, stderr)."""
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
    """The same run, of which nothing else is given again."""
    return TrainConfig(out_dir=config.out_dir, resume="true", **options)

def checkpoint(config):
    return read_checkpoint(config.out_dir)

def weights(config):
    return checkpoint(config)["model"]

def column(log, name):
    """[(step, value)] of the records that hold one."""
    return [(record["step"], record[name]) for record in log if name in record]

# ---- Options

def test_given_options_win_over_recipe_and_that_over_size():
    c = TrainConfig(arch="ngpt", size="125m", n_layer=3, weight_decay=0.5)
    assert (c.n_layer, c.weight_decay) == (3, 0.5)
    assert (c.n_embd, c.vocab_size) == (512, 50304)
    assert c.learning_rate == pytest.approx(RECIPES["ngpt"]["learning_rate"] / 2)  # of width 128
    assert TrainConfig(arch="normformer", tie=True).embed_std == 0.02
    assert TrainConfig(arch="rmsnorm", qk_norm=True).out_dir == "out/rmsnorm+qk_norm"

def test_sizes_are_table_f1():
    for size, (d, layers, n_head) in zip(list(train_py.SIZES)[1:], WIDTHS, strict=True):
        c = resolve(TrainConfig(arch="rmsnorm", size=size))
        assert (c.n_embd, c.n_layer, c.n_head) == (d, layers, n_head)
        assert (c.block_size, c.rope_fraction) == (2048, 0.5)
        assert c.max_steps == math.ceil(20 * bench.count_parameters(c) / 2 ** 19)

@pytest.mark.parametrize("options, says", [line.split("  ") for line in """
--arch=ngtp  did you mean ngpt?
--arch=gpt  GPT+ is --arch=rmsnorm --qk_norm=true
--arch=rmsnorm+  --arch=rmsnorm --qk_norm=true
--arch=nowhere.py:mine  nowhere.py cannot be run
--arch=FILE:mine  mine.txt cannot be run
--size=125b  did you mean 125m?
--device=gpu  invalid choice: 'gpu'
--dtype=float16  invalid choice: 'float16'
--mlp=relu  invalid choice: 'relu'
--resume=y  invalid choice: 'y'
--n_layer=0  at least 1
--n_embd=0  at least 1
--block_size=0  at least 1
--max_steps=0  at least 1
--eval_tokens=0  at least 1
--eval_interval=0  at least 1
--checkpoint_interval=0  at least 1
--learning_rate=-1  at least 0
--learning_rate=nan  at least 0
--learning_rate=inf  at least 0
--dropout=1.5  from 0 to 1
--rope_fraction=-1  at least 0
--min_lr_ratio=2  from 0 to 1
--beta2=1  less than 1
--resid_scale  resid_scale=True: expected False with arch=angpt
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
--lr=1  no such option; --help lists them
fast  no such option
--tie=1  invalid true_or_false value: '1'
--out_dir=FILE  File exists
--out_dir=/proc/x  /proc
--data=nowhere  data=nowhere: no full dataset; python prepare.py --source=... makes it
--data=FILE  data=FILE: no full dataset; python prepare.py --source=... makes it
--resume=true  run: no such checkpoint; expected a folder with ckpt.pt
--init_from=nowhere  nowhere: no such checkpoint
--init_from=gpt2-mine  gpt2-mine: no such checkpoint; expected a folder with ckpt.pt, a run's, or config.json, GPT-2's
""".strip().splitlines()])
def test_a_bad_option_is_one_line_that_says_what_to_type(tiny, command, tmp_path, options, says):
    file = tmp_path / "mine.txt"
    file.write_text("x")
    code, _, said = command(*words(tiny()), *options.replace("FILE", str(file)).split())
    assert code == 2
    assert said.startswith("train.py: ")
    assert said.count("\n") == 1
    assert says.replace("FILE", str(file)) in said

# ---- Data

def test_a_shard_is_cut_into_windows_and_its_rest_is_left(dataset):
    tokens = Tokens(dataset, "train", 16)
    shards = [read_shard(path) for path in sorted(dataset.glob("*_train_*.bin"))]
    windows = [shard[i:i + 17] for shard in shards for i in range(0, len(shard) - 16, 16)]
    assert tokens.windows == len(windows)
    for i, window in enumerate(windows):
        assert tokens.window(i).tolist() == window.tolist()
    x, y = tokens.batch([3, 193], CPU)
    rows = np.stack([windows[3], windows[193]])
    assert np.array_equal(x, rows[:, :-1])
    assert np.array_equal(y, rows[:, 1:])

def test_tokens_that_are_too_few_are_said(dataset):
    with pytest.raises(DataError, match="expected more than block_size=2000"):
        Tokens(dataset, "val", 2000)

class Alone(Process):
    """A place among processes that are not there."""
    def sum(self, x):
        return x

def test_a_step_is_a_function_of_seed_and_step_and_an_epoch_sees_all_once(dataset, tiny):
    tokens = Tokens(dataset, "train", 16)

    def windows(step, world_size=1, **options):
        config = tiny(**options)
        rows = []
        for rank in range(world_size):
            process = Alone(CPU, rank=rank, world_size=world_size)
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

def test_validation_is_the_mean_over_the_same_tokens_whatever_the_batch(tiny):
    held_out = train_py.open_dataset(tiny(), Process(CPU))
    torch.manual_seed(0)
    model = GPT(resolve(tiny())).double()

    def found(batch_size, eval_tokens):
        config = tiny(batch_size=batch_size, eval_tokens=eval_tokens)
        return evaluate(model, held_out, config, Process(CPU))

    x, y = held_out.val.batch(range(10), CPU)
    nats = F.cross_entropy(model(x, y)[0].mT, y, reduction="none").detach()
    bits = float(nats.sum()) / math.log(2)
    n_bytes = int((y != 256).sum())                # an end of text has none
    for batch_size in 1, 3, 10:
        measured = found(batch_size, 160)
        assert measured["val_loss"] == pytest.approx(nats.mean().item())
        assert measured["val_bpb"] == pytest.approx(bits / n_bytes)
    error = float(nats.mean(1).std()) / 10 ** 0.5
    assert found(1, 160)["val_error"] == pytest.approx(error)
    assert measured["val_error"] is None           # of one micro-batch
    assert found(3, 9)["val_loss"] > 1             # one window at least
    assert found(3, 992) == found(3, 9999)
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
    log = train(config, say=None)
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
    ours = weights(config)
    for name, value in model.state_dict().items():
        assert torch.allclose(ours[name], value, rtol=1e-4, atol=1e-6), name

def test_each_step_of_each_rank_has_its_own_dropout(tiny):
    c = resolve(tiny())
    model = GPT(c)
    optimizer = make_optimizer(model, c)
    seeds = set()
    for step, rank, seed in (0, 0, 1), (0, 1, 1), (1, 0, 1), (0, 0, 2):
        c.seed = seed
        process = Alone(CPU, rank=rank, world_size=2)
        optimizer_step(step, model, optimizer, [(IDX, IDX)], c, process)
        seeds.add(torch.initial_seed())
    assert len(seeds) == 4

# ---- Runs

def test_a_run_learns_and_leaves_checkpoint_log_and_picture_and_watch_joins_the_log(tiny):
    def watch(model, optimizer, step):
        seen.append(step)
        assert optimizer.param_groups[0]["params"][0] is model.wte.weight
        return {"twice": 2 * torch.tensor(step), "step": 99} if step else None    # our names stay

    told, seen = [], []
    config = tiny(arch="rmsnorm", max_steps=60, learning_rate=1e-2, eval_interval=20,
                  log_interval=15)
    log = train(config, watch, told.append)
    out = Path(config.out_dir)
    assert sorted(path.name for path in out.iterdir()) == ["ckpt.pt", "log.jsonl", "loss.png"]
    assert "16,496 parameters, cpu, torch.float32; peak learning rate 0.01; steps 0 to 60" in told[0]
    assert read_log(out) == log
    assert [step for step, _ in column(log, "loss")] == [15, 20, 30, 40, 45, 60]
    assert column(log, "twice") == [(20, 40), (40, 80), (60, 120)]
    losses = dict(column(log, "val_loss"))
    assert list(losses) == seen == [0, 20, 40, 60]
    assert losses[60] < 0.7 * losses[0]
    assert log[-1].keys() >= {"seconds", "val_bpb", "lr", "grad_norm"}
    assert log[-1]["tokens"] == 60 * 128

def test_a_new_run_moves_what_it_finds_of_another(tiny, tmp_path):
    logs = []
    for seed in (1, 2, 3):
        logs.append(train(tiny(seed=seed, max_steps=1), say=None))
        os.remove(tmp_path / "run" / "ckpt.pt")    # a log alone is moved, too
    assert [read_log(tmp_path / name) for name in ("run.1", "run.2", "run")] == logs

def test_weights_stay_float32_in_bfloat16_and_a_run_keeps_its_dtype(tiny):
    exact = train(tiny(max_steps=2), say=None)
    config = tiny(dtype="bfloat16", max_steps=2)
    rounded = train(config, say=None)
    assert column(exact, "loss")[-1] != column(rounded, "loss")[-1]
    assert {x.dtype for x in weights(config).values()} == {torch.float32}
    train(resumed(config, max_steps=3), say=None)    # auto may be float32
    assert checkpoint(config)["config"]["dtype"] == "bfloat16"

@pytest.mark.parametrize("factor, eval_interval, says", [
    (math.nan, 99, "step 7: loss nan, gradient's norm nan; a lower --learning_rate"),
    (1e30, 99, "step 7: loss .*, gradient's norm inf; a lower --learning_rate"),
    (math.nan, 3, "step 6: held out nan")])
def test_a_run_that_is_not_finite_stops_before_its_weights_do(
        old, monkeypatch, factor, eval_interval, says):
    nats = GPT.summed_loss
    monkeypatch.setattr(GPT, "summed_loss", lambda *given: factor * nats(*given))
    config = TrainConfig(out_dir=str(old), resume=True, max_steps=9, eval_interval=eval_interval)
    with pytest.raises(Diverged, match=says):
        train(config, say=None)
    assert all(x.isfinite().all() for x in weights(config).values())

def test_a_run_that_becomes_far_worse_than_guessing_ends_in_3(old, command):
    options = ["--learning_rate=100", "--max_steps=9", "--device=cpu"]
    code, _, said = command(f"--out_dir={old}", "--resume", *options)
    assert code == 3
    assert re.search(r"step 9: held out \S+ nats/token, far above guessing's", said)
    assert read_checkpoint(old)["step"] == 6

# ---- Going on

@pytest.mark.parametrize("number, error, options", [
    (signal.SIGTERM, SystemExit, dict(arch="powernorm", grad_clip=0.3)),
    (signal.SIGINT, KeyboardInterrupt, dict(arch="angpt", dropout=0.2))])
def test_a_signal_ends_a_loop_over_runs_and_what_it_saved_goes_on_bit_by_bit(
        tiny, tmp_path, number, error, options):
    def stop(model, optimizer, step):
        if step == 3:
            signal.raise_signal(number)
            assert signal.getsignal(number) is usual   # a second one ends it
    usual = signal.getsignal(number)
    whole, parts, never = [tiny(**options, out_dir=f"{tmp_path}/{name}") for name in "abc"]
    log = train(whole, say=None)
    assert signal.getsignal(number) is usual
    with pytest.raises(error):
        for config in (parts, never):
            train(config, watch=stop, say=None)
    assert checkpoint(parts)["step"] == 3
    assert not Path(never.out_dir).exists()
    again = train(resumed(parts), say=None)
    assert column(again, "loss") == column(log, "loss")
    assert column(again, "val_loss") == column(log, "val_loss")
    seconds = [value for _, value in column(again, "seconds")]
    assert seconds == sorted(seconds)
    assert_same_state(weights(parts), weights(whole))

def test_a_finished_run_can_be_trained_longer_without_a_second_warm_up(tiny):
    train(tiny(warmup_ratio=0.5, eval_interval=None), say=None)
    log = train(resumed(tiny(), max_steps=40), say=None)
    rates = [rate for _, rate in column(log, "lr")]
    assert rates[6:] == sorted(rates[6:], reverse=True)
    assert rates[-1] == pytest.approx(0.01 * tiny().learning_rate)
    validated = [step for step, _ in column(log, "val_loss")]
    assert validated == [*range(7), *range(8, 41, 4)]   # ten, of either length

def test_an_early_checkpoint_s_gone_options_are_left_out_and_it_runs_no_file(tmp_path):
    saved = asdict(TrainConfig()) | {"arch": "none.py:ngpt", "gone": 1}
    torch.save({"config": saved}, tmp_path / "ckpt.pt")
    state = read_checkpoint(tmp_path)
    assert train_py.with_checkpoint(TrainConfig(resume=True), state).arch == "ngpt"

def test_a_run_that_goes_on_keeps_what_is_not_given_and_takes_what_is(tiny, command):
    config = tiny(arch="ngpt", dropout=0.1, grad_clip=0.3, beta1=0.8, learning_rate=0.1)
    train(config, say=None)
    same = checkpoint(config)["config"] | dict(resume="true")
    train(resumed(config, max_steps=7), say=None)
    assert checkpoint(config)["config"] == same | dict(max_steps=7)
    same_run = [f"--out_dir={config.out_dir}", "--resume=true"]
    command(*same_run, "--max_steps=8", "--beta1=0.9", "--grad_clip=1")   # the defaults, but typed
    assert checkpoint(config)["config"] == same | dict(max_steps=8, beta1=0.9, grad_clip=1)
    assert checkpoint(config)["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.95)
    assert train(resumed(config, max_steps=5), say=None)[-1]["step"] == 8   # further already
    assert checkpoint(config)["config"]["max_steps"] == 8
    others = {"n_layer=3": "n_layer=2", "seed=3": "seed=1337", "arch=angpt": "arch=ngpt"}
    for option, was in others.items():
        _, _, said = command(*same_run, f"--{option}")
        assert f"made with {was}, now {option}" in said

def test_auto_goes_on_where_a_checkpoint_is_and_reads_a_log_as_far_as_it_is_whole(tiny, tmp_path):
    log = train(tiny(resume="auto"), say=None)
    path = tmp_path / "run" / "log.jsonl"
    path.write_bytes(path.read_bytes()[:-30] + b"\xff{")
    assert read_log(path.parent) == log[:-1]
    assert read_log(tmp_path / "none") == []
    again = train(tiny(resume="auto", max_steps=7), say=None)
    assert [record["step"] for record in again] == list(range(8))
    assert "val_loss" in again[-1]

def test_a_folder_has_one_run_at_a_time_and_a_killed_one_goes_on(tiny, command, tmp_path):
    killed = tiny(arch="powernorm", max_steps=12)
    whole = tiny(arch="powernorm", max_steps=12, out_dir=tmp_path / "whole")  # no string
    train(whole, say=None)
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
    losses = column(train(resumed(killed), say=None), "loss")
    assert losses == column(read_log(whole.out_dir), "loss")
    assert_same_state(weights(killed), weights(whole))
    assert not list(tmp_path.glob("*.1"))

# ---- Weights that exist

@pytest.mark.parametrize("block_size, options", [
    (8, dict(arch="powernorm", n_layer=3, qk_norm=True, rope_fraction=0.5)),
    (16, dict(arch="layernorm", **GPT2)),
])
def test_a_run_from_another_s_weights_begins_at_these_with_their_options(tiny, options, block_size):
    old = tiny(**options, max_steps=1)
    train(old, say=None)
    new = TrainConfig(init_from=old.out_dir, data=old.data, block_size=block_size, mlp=old.mlp,
                      out_dir=f"{old.out_dir}-new", max_steps=1)

    def watch(model, optimizer, step):
        pairs = zip(model.state_dict().values(), weights(old).values())
        same = all(now.equal(x) for now, x in pairs)
        return {"as_it_was": same and not optimizer.state}

    assert column(train(new, watch, say=None), "as_it_was") == [(0, True), (1, False)]
    config = checkpoint(new)["config"]
    assert config.items() >= (options | {"block_size": block_size}).items()
    assert config["learning_rate"] == train_py.recipe(old)["learning_rate"] / 10

def test_a_run_from_weights_names_what_does_not_fit_them(tiny, trained):
    new = dict(init_from=str(trained[0]), out_dir="none")
    with pytest.raises(DataError, match="made with n_layer=2, now n_layer=3"):
        train(tiny(**new, n_layer=3), say=None)
    with pytest.raises(DataError, match="do not fit .*wpe"):
        train(tiny(**new, block_size=32), say=None)  # there are no more positions

def test_eval_only_prints_the_loss_and_leaves_all_as_it_is(old, dataset, tmp_path, command):
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for place in ("out_dir", "init_from"):
        options = [f"--{place}={old}", f"--data={dataset}", "--eval_tokens=128", "--dtype=float32"]
        found = json.loads(command("--eval_only", *options)[1])
        assert found["val_loss"] == pytest.approx(read_log(old)[-1]["val_loss"])
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

def test_a_file_s_arch_is_trained_and_its_code_followed(tiny, tmp_path, monkeypatch, capsys):
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
    train(config, say=None)
    path.write_text(working.replace("a comment", "another") + "class Other(Mine): slope = 3")
    train(resumed(config, arch=arch, max_steps=7), say=None)
    assert "The file of mine has changed" in capsys.readouterr().err
    path.write_text("a typo, saved while the run goes on")
    load_model(config.out_dir)
    del ARCHS["mine"]                              # as in another process
    with pytest.raises(ConfigError, match="arch=mine: expected .* --arch=file.py:name"):
        load_model(config.out_dir)
    path.write_text(working)
    assert type(load_model(config.out_dir, arch=arch)[0].blocks[0]).__name__ == "Mine"

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
        train(config, say=None)

def test_a_stopped_command_says_how_to_resumed(tiny, old, command, monkeypatch):
    monkeypatch.chdir(old.parent)
    def stop(*given):
        signal.raise_signal(signal.SIGTERM)
        return {"val_loss": 5, "val_bpb": 7}

    with patch.object(train_py, "evaluate", stop):
        code, out, _ = command(*words(tiny(out_dir=None)), "--init_from=run")
    assert code == 143
    assert "saved at step 0. To go on: the same command with --resume=true" in out
    _, out, _ = command(*words(tiny(out_dir=None)), "--init_from=run", "--resume=true")
    assert len(out.split("A sample")[1]) > 100
    assert read_checkpoint("out/tuned")["step"] == 6

def test_two_processes_equal_one(tiny, tmp_path):
    one = tiny(arch="powernorm", pn_warmup=3)
    two = tiny(arch="powernorm", pn_warmup=3, batch_size=2, out_dir=str(tmp_path / "two"))
    log = train(one, say=None)
    line = [sys.executable, HERE / "train.py", *words(two)]
    both = dict(WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="29613", OMP_NUM_THREADS="1")
    with patch.dict(os.environ, both, RANK="0"):   # as torchrun does; this is the first
        second = subprocess.Popen(line, env=os.environ | {"RANK": "1"}, stdout=subprocess.PIPE)
        try:
            theirs = train(two, say=None)
            assert second.communicate() == (b"", None)  # the first alone tells
            assert second.returncode == 0
        finally:
            second.kill()
            torch.distributed.destroy_process_group()
    for key in ("loss", "val_loss"):
        assert dict(column(theirs, key)) == pytest.approx(dict(column(log, key)), rel=1e-5)
    ours = weights(one)
    for name, x in weights(two).items():
        far = ~torch.isclose(ours[name], x, rtol=1e-3, atol=1e-5)
        assert far.float().mean() < 1e-3, name     # of mere rounding Adam makes a whole step

# ==================================================================================================
# sample.py

def test_sample_streams_what_the_model_writes(trained, monkeypatch):
    model, tokenizer, _ = load_model(trained[1])
    def text(prompt="1+1é", **options):
        return "".join(sampler.stream(model, tokenizer, prompt, max_new_tokens=20, **options))
    start = torch.tensor([[256, *"1+1é".encode()]])
    tokens = [token.item() for token in model.generate(start, 20, temperature=0)]
    written = bytes(token for token in tokens if token < 256)
    assert text(temperature=0) == written.decode(errors="replace")
    assert text(seed=1) != text(seed=2)
    padding, end = 299, 256
    wrote = [65, 0xC3, 0xA9, padding, 0xFF, 0xE6, 0x97, 0xA5, 66, 0xC3, end, 67]
    monkeypatch.setattr(model, "generate", lambda *_: map(torch.tensor, wrote))
    assert text() == "Aé\ufffd日B\ufffd"

def test_sample_writes_of_several_runs_and_seeds(trained, capsys):
    def say(*words):
        sampler.main(["--max_new_tokens=20", "--device=cpu", *words])
        return capsys.readouterr().out

    both = say(f"--out_dir={trained[0]},{trained[1]}", "--prompt=3+4=é", "--num_samples=2")
    heads = re.findall(r"--- (.*), step 6, seed (\d+)\n", both)
    assert heads == [(str(folder), seed) for folder in trained for seed in ("1337", "1338")]
    last = say(f"--out_dir={trained[1]}", "--prompt=3+4=é", "--seed=1338")
    assert both.endswith("seed 1338\n" + last)

# ==================================================================================================
# bench.py

def benchmark(name, *folders, **options):
    bench.main([name, *map(str, folders), *(f"--{key}={value}" for key, value in options.items())])


@pytest.mark.parametrize("name, options, columns", [
    ("speed", {}, {"ms/step", "tokens/s"}),
    ("sample", dict(new_tokens=5), {"tokens/s"})])
def test_measurements_are_printed_and_written(name, options, columns, tmp_path, capsys):
    with torch._dynamo.config.patch(specialize_float=False, recompile_limit=8):  # speed sets them
        benchmark(name, **TINY_RUN, **options, archs="rmsnorm,ngpt", rounds=2, out_dir=tmp_path)
    results = json.loads((tmp_path / f"{name}.json").read_text())["results"]
    first, second = results["ngpt"]
    assert first.keys() == second.keys() == columns
    assert min(first.values()) > 0
    assert re.search(r"\nrmsnorm .* 1\.000 \(1\.000-1\.000\).*\nngpt ", capsys.readouterr().out)


def test_memory_extrapolated_from_small_models_is_the_large_ones():
    options = dict(arch="powernorm", compile="true", n_layer=3, n_embd=64, block_size=1024,
                   batch_size=5, total_batch_size=5120)
    config = resolve(TrainConfig(**TINY_RUN | options))
    step = bench.step_bytes(config, 5)
    assert step == pytest.approx(bench.step_bytes(config, 5, layers=(2, 3)), rel=0.005)
    fixed = step - 5 * (bench.step_bytes(config, 6) - step)
    kept = 16 * bench.count_parameters(config)     # weights, gradients, two moments
    assert kept <= fixed < 1.1 * kept


def test_memory_of_a_compiled_loss_is_bfloat16_logits_and_their_gradient():
    options = dict(arch="ngpt", dtype="bfloat16", compile="true", vocab_size=50304, block_size=256)
    config = resolve(TrainConfig(**TINY_RUN | options | dict(total_batch_size=1024)))
    sequence = bench.step_bytes(config, 2) - bench.step_bytes(config, 1)
    assert sequence == pytest.approx(2 * 2 * 256 * 50304, rel=0.02)
    assert bench.largest_batch_size(lambda batch_size: 3 * batch_size, 13) == 4


def test_memory_of_fused_kernels_is_what_products_read_and_write():
    def function(x, w, v):
        h = x @ w                                  # all products and sums: 4 x 16
        y = h.relu().square() @ v                  # relu and square are one kernel
        return (h + 2 * y,)

    with FakeTensorMode():
        tensors = torch.ones(4, 8), torch.ones(8, 16), torch.ones(16, 16)
        run = bench.run_fused(make_fx(function)(*tensors), tensors)
        with MemTracker() as tracker:
            (result,) = run([*tensors])
    assert result.shape == (4, 16)
    peak = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    assert peak == 3 * 4 * 16 * 4                  # h, y, and what y is made from or the result


def test_curves_are_drawn_without_step_0_and_name_the_keys_there_are(trained, tmp_path, monkeypatch):
    pictures = []
    monkeypatch.setattr(bench.Figure, "savefig", lambda self, path: pictures.append(self))
    benchmark("curves", *trained, out_dir=tmp_path, usual="true")
    [axes] = pictures[0].axes
    drawn = [line.get_xdata() for line in axes.lines]
    assert min(x[0] for x in drawn if len(x)) > 0
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == [*map(str, trained), "other seeds, default options"]
    with pytest.raises(ConfigError, match="key=los: expected one of .*loss, .*did you mean"):
        benchmark("curves", *trained, out_dir=tmp_path, key="los")


@pytest.mark.parametrize("words, says", [line.split("  ") for line in """
sped  did you mean speed?
race  the race is lessons/studies/race.py
speed --archs=rmsnorm+qknorm  did you mean qk_norm?
speed --arch=ngpt  did you mean archs?
sample --batch_size=0  batch_size=0
curves  expected the folders of some runs
curves nowhere  nowhere: no such folder
""".strip().splitlines()])
def test_errors_of_bench_are_one_line(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, DataError), match=rf"^[^\n]*{re.escape(says)}[^\n]*$"):
        bench.main(words.split())

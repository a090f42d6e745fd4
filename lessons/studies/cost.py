"""
Count what a training step takes at least: the arithmetic of its matrix products, and the bytes that
everything else reads and writes.

The rule for bytes is simpler than any compiler's: whatever lies between two products is one kernel,
which reads each of its inputs once and writes each of its results once.
"""
import operator
from dataclasses import dataclass

import torch
import torch.nn as nn
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode

from model import GPT

aten = torch.ops.aten
PRODUCTS = {aten.mm, aten.bmm, aten.addmm}
# Attention kernels, and how many matrix products each of them contains.
ATTENTION = {aten._scaled_dot_product_flash_attention_for_cpu: 2,
             aten._scaled_dot_product_flash_attention_for_cpu_backward: 5}
# Operations that only show the same numbers in another form.
VIEWS = {aten.view, aten.permute, aten.transpose, aten.t, aten.expand, aten.unsqueeze, aten.squeeze,
         aten.split, aten.split_with_sizes, aten.slice, aten.select, aten.unbind, aten.alias,
         aten.detach, aten.reshape, operator.getitem}


@dataclass
class Work:
    """The work of a graph's kernels."""
    flops: float = 0.0     # floating-point operations of its products
    moved: float = 0.0     # bytes that its other kernels read and write


def kind(node):
    """Return the operation of a node, as it stands in the sets above."""
    return getattr(node.target, "overloadpacket", node.target)


def origin(node):
    """Return the node whose numbers a view shows."""
    while kind(node) in VIEWS:
        node = node.args[0]
    return node


def is_product(node):
    return kind(node) in PRODUCTS or kind(node) in ATTENTION


def is_fused(node):
    """Return whether a compiler puts this operation into a kernel together with others."""
    return node.op == "call_function" and not is_product(node)


def size(node):
    """Return the bytes of all tensors that a node returns."""
    values = node.meta.get("val", ())
    tensors = values if isinstance(values, (tuple, list)) else [values]
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor))


def flops(node):
    """Return a product's operations: two for each pair of numbers that are multiplied.

    In attention a query sees half of the keys on average.
    """
    if kind(node) in ATTENTION:
        # The first argument is q, (B, H, T, d_k). In the backward pass it is the gradient of
        # attention's output, which has the same shape.
        q = node.args[0].meta["val"]
        return ATTENTION[kind(node)] * 2 * q.numel() * q.shape[2] / 2
    # Each number of the result is a sum over the rows of the last argument.
    return 2 * node.meta["val"].numel() * node.args[-1].meta["val"].shape[-2]


def count(graph):
    """Return the Work of a torch.fx graph that has no branches.

    Two nodes that are no products are in one kernel if they have the same level, which is the
    largest number of products on a path to them.
    """
    work = Work()
    level = {}                                       # node -> its level
    read, written = set(), set()                     # (level of the kernel, node)
    for node in graph.nodes:
        if kind(node) in VIEWS:
            continue
        inputs = {origin(x) for x in node.all_input_nodes}
        level[node] = max((level[x] + is_product(x) for x in inputs), default=0)
        if is_product(node):
            work.flops += flops(node)
        for x in inputs:
            in_one_kernel = is_fused(node) and is_fused(x) and level[node] == level[x]
            if is_fused(node) and not in_one_kernel:
                read.add((level[node], x))
            if is_fused(x) and not in_one_kernel:
                written.add((level[x], x))
    for _, node in [*read, *written]:
        work.moved += size(node)
    return work


def training_work(module, *shape):
    """Return the Work of a module's compiled forward and backward in bfloat16, for an input shape.

    Call it inside FakeTensorMode, whose tensors have shapes and no numbers, so that nothing is
    computed.
    """
    work = Work()

    def add(graph, inputs):
        found = count(graph.graph)
        work.flops += found.flops
        work.moved += found.moved
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=add, bw_compiler=add,
                           decompositions=select_decomp_table(),
                           partition_fn=min_cut_rematerialization_partition)
    torch.compiler.reset()
    x = torch.empty(shape, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.compile(module, backend=backend)(x)
    y.backward(torch.empty_like(y))
    return work


class Layer(nn.Module):
    """A GPT's first block."""

    def __init__(self, gpt):
        super().__init__()
        self.gpt = gpt

    def forward(self, h):
        return self.gpt.blocks[0](h, self.gpt.cos, self.gpt.sin)


class Head(nn.Module):
    """The last norm, the logits and the loss of a GPT."""

    def __init__(self, gpt, targets):
        super().__init__()
        self.gpt = gpt
        self.targets = targets

    def forward(self, h):
        return self.gpt.summed_loss(h if self.gpt.sphere else self.gpt.norm_f(h), self.targets)


def predicted_step(config, sequences, peak, bandwidth):
    """Return the milliseconds that parts of a training step take at least.

    The parts are the products, all other kernels, and AdamW with project_. `sequences` is the batch
    size; `peak` and `bandwidth` are the processor's FLOP/s and bytes/s.
    """
    shape = sequences, config.block_size, config.n_embd
    with FakeTensorMode(allow_non_fake_inputs=True):
        gpt = GPT(config)
        layer = training_work(Layer(gpt), *shape)
        targets = torch.empty(shape[:2], dtype=torch.long)
        head = training_work(Head(gpt, targets), *shape)
        weights = 4 * sum(p.numel() for p in gpt.parameters())
    # AdamW reads and writes as much as all weights seven times, and project_ three times, as in
    # exercise 7.12.
    passes = 7 + 3 if gpt.sphere else 7
    products = (config.n_layer * layer.flops + head.flops) / peak
    others = (config.n_layer * layer.moved + head.moved) / bandwidth
    return 1e3 * products, 1e3 * others, 1e3 * passes * weights / bandwidth

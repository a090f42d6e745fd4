"""
Measure what happens in each layer while a model trains, for `train(config, watch=...)`:

    from lessons.studies.diagnose import diagnose
    tokens = Tokens("data/stdlib", "val", config.block_size)
    log = train(config, watch=diagnose(tokens.batch(range(16), torch.device("cpu"))))
    log[-1]["grad_l1"]["w_down"]                    # one number per layer

  residual_norm   mean over tokens of ||h||, before the first block and after each (anGPT Fig. 1)
  grad_l1         mean |gradient| of each matrix before clipping (NormFormer Fig. 3, for w_down)
  scale           mean |value| of each gain, alpha and s (NormFormer Fig. 4, nGPT Fig. 6)
  row_norm        mean norm of each matrix's rows, along its input dimension (anGPT Fig. E.1)
  row_norm_max    the largest of these norms
  momentum_var    variance over each matrix of Adam's first moment (anGPT Fig. B.1 divides it by
                  the sum of these variances over all steps)
"""
import re

import torch

from model import Scale


def by_layer(values):
    """Group values by layer.

    For example, {"blocks.0.w_o.weight": a, "blocks.1.w_o.weight": b, "lm_head.weight": c} becomes
    {"w_o": [a, b], "lm_head": [c]}.
    """
    found = {}
    for name, value in values.items():
        found.setdefault(re.sub(r"^blocks\.\d+\.|\.weight$", "", name), []).append(float(value))
    return found


def diagnose(batch):
    """Return a function watch(model, optimizer, step) for train.

    It measures on `batch`, a pair (inputs, targets) of token ids (B, T), in eval mode. It returns a
    dict with one entry per measure: a list over layers, or a dict of such lists by matrix. It does
    not change the training.
    """
    x, y = batch

    def watch(model, optimizer, step):
        was_training = model.training
        device = next(model.parameters()).device
        # In eval mode there is no dropout, and PowerNorm's running statistics stay as they are.
        model.eval()
        norms, gradients = look(model, x.to(device), y.to(device))
        model.train(was_training)
        sizes = {name: gradient.abs().mean() for name, gradient in gradients.items()}
        found = {"residual_norm": norms, "grad_l1": by_layer(sizes)}
        return found | of_weights(model, optimizer)

    return watch


def look(model, x, y):
    """Return the means of ||h|| and the matrices' gradients for one batch.

    The means are a list: before the first block and after each. The gradients are a dict by name.
    """
    norms = []

    def note(h):
        norms.append(h.detach().float().norm(dim=-1).mean().item())

    hooks = [model.blocks[0].register_forward_pre_hook(lambda block, given: note(given[0]))]
    for block in model.blocks:
        hooks.append(block.register_forward_hook(lambda block, given, h: note(h)))
    matrices = matrices_of(model)
    with torch.compiler.set_stance("force_eager"):
        loss = model(x, y, loss_only=True)[1]
        gradients = torch.autograd.grad(loss, list(matrices.values()),
                                        allow_unused=True, materialize_grads=True)
    for hook in hooks:
        hook.remove()
    return norms, dict(zip(matrices, gradients))


def matrices_of(model):
    """Return a dict: name -> parameter, for all matrices."""
    return {name: p for name, p in model.named_parameters() if p.dim() == 2}


@torch.no_grad()
def of_weights(model, optimizer):
    """Return what is measured on the weights themselves and on Adam's first moments, by layer."""
    rows, moments = {}, {}
    for name, p in matrices_of(model).items():
        rows[name] = p.norm(dim=1)
        # Adam has no moments before the first step.
        moments[name] = optimizer.state.get(p, {}).get("exp_avg", torch.zeros(1))
    scales = {name: p for name, p in model.named_parameters()
              if p.dim() < 2 and not name.endswith("bias")}
    for name, module in model.named_modules():
        # A Scale stores a multiple of the value that the model uses.
        if isinstance(module, Scale):
            scales[f"{name}.weight"] = module()
    return {"scale": by_layer({name: value.abs().mean() for name, value in scales.items()}),
            "row_norm": by_layer({name: norm.mean() for name, norm in rows.items()}),
            "row_norm_max": by_layer({name: norm.max() for name, norm in rows.items()}),
            "momentum_var": by_layer({name: m.var(correction=0) for name, m in moments.items()})}

"""
Measure what normalization costs: the time and memory of a training step, and the speed of decoding.

    python bench.py speed                       # time of a training step, at laptop size
    python bench.py memory --size=0.5b          # estimates the GPU memory of a step, without a GPU
    python bench.py sample --batch_size=4       # tokens per second with the KV cache
    python bench.py curves out/angpt out/ngpt   # the logs of several runs in one picture

`python bench.py speed --help` lists the options of speed, which include most of train.py's. --archs
says what to compare: names separated by commas, of which the first is the baseline of all ratios.
GPT+ is called rmsnorm+qk_norm; an arch in a file of your own is FILE.py:NAME. Results go to
out/bench.

Which arch learns most is another question. lessons/studies/race.py answers it with complete runs.
"""
import random
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

# Import train before torch, because train.py sets environment variables that torch reads.
from train import (TrainConfig, compile_model, draw_curve, make_model, make_optimizer,
                   optimizer_step, read_log, resolve, set_up_process, utilization)
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch._subclasses import FakeTensorMode
from torch.utils.benchmark import timer
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from model import ARCHS, GPT
from prepare import (check, check_at_least, check_choice, parse_options, read_json, run_script,
                     write_json)

# The archs, and their colors in the studies' pictures (by Okabe and Ito, for color-blind readers)
COLORS = {"rmsnorm+qk_norm": "#000000", "layernorm": "#E69F00", "rmsnorm": "#56B4E9",
          "powernorm": "#009E73", "normformer": "#CC79A7", "ngpt": "#0072B2", "angpt": "#D55E00"}
EVERY_ARCH = ",".join(COLORS)


# ---- Options -------------------------------------------------------------------------------------
# --help prints the comments in these classes: headings, and what each option means.

@dataclass
class MemoryOptions:
    # Benchmark
    archs: str = EVERY_ARCH     # archs to compare; ARCH+qk_norm adds QK norm
    out_dir: str = "out/bench"  # folder for the results


@dataclass
class SpeedOptions(MemoryOptions):
    # Benchmark
    rounds: int = 20            # measurements of each arch, after three that do not count


@dataclass
class DecodingOptions(SpeedOptions):
    # Benchmark
    batch_size: int = 1         # sequences that are decoded together
    new_tokens: int = 65        # tokens to generate after a prompt of 16; the first is not timed


@dataclass
class CurvesOptions:
    # Curves
    key: str = "val_loss"       # quantity to draw, by its name in log.jsonl
    usual: bool = False         # also draw two stored runs of the folder's arch, in gray
    out_dir: str = "out/bench"  # folder for the picture


# A benchmark sets these options of train.py itself, or cannot use them. It accepts all others, but
# some of those, such as --data and --log_interval, change nothing.
NOT_HERE = {"arch", "qk_norm", "resume", "init_from", "eval_only", "max_steps", "eval_interval",
            "final_eval_tokens", "checkpoint_interval"}


def parse(words, description, options_class, command=""):
    """Parse a command line; return the benchmark's options and a dict of train.py's options."""
    training = parse_options(words, description, options_class, TrainConfig, command=command,
                             leave_out=NOT_HERE)
    options = options_class()
    for name in vars(options):
        if name in training:
            setattr(options, name, training.pop(name))
    return options, training


def train_config(name, training, **changes):
    """Return the TrainConfig of an arch, named as in --archs. Raises ConfigError.

    In the name, + sets an option of train.py to true, usually qk_norm.
    """
    arch, *switches = name.split("+")
    if ":" not in arch:
        check_choice("archs", arch, ARCHS, "; GPT+ is rmsnorm+qk_norm, and FILE.py:NAME is an arch "
                     "in a file of your own")
    switched_on = dict.fromkeys(switches, True)
    return TrainConfig(**{"arch": arch, **switched_on, **training, **changes})


def resolve_each(archs, training):
    """Return {name: resolved TrainConfig} for all of --archs. Raises ConfigError and DataError.

    A step has one micro-batch unless --total_batch_size asks for more.
    """
    configs = {}
    for name in archs.split(","):
        config = train_config(name, training)
        # TrainConfig() has set batch_size and block_size already.
        if "total_batch_size" not in training:
            config.total_batch_size = config.batch_size * config.block_size
        configs[name] = resolve(config)
    return configs


def count_parameters(config):
    """Return how many parameters a model of this config has, without allocating them."""
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(config).parameters())


def label(name):
    """Return the name by which people know an arch."""
    return name.replace("rmsnorm+qk_norm", "GPT+")


def print_table(rows):
    """Print a list of dicts as a table. The first entry of each dict names its row."""
    table = pd.DataFrame(rows)
    table = table.set_index(table.columns[0]).rename_axis(None)
    print(table.to_string(float_format="{:,.2f}".format, na_rep=""))


# ---- Speed and decoding --------------------------------------------------------------------------
# A GPU may still have work queued, so torch's timer() waits for it before it reads the clock.

def make_step(config, process):
    """Return a function that takes one training step and returns its measurements.

    `process` is train.py's Process, which has the device and the dtype.
    """
    tokens = config.total_batch_size
    model = make_model(config, process.device)
    optimizer = make_optimizer(model, config)
    compile_model(model, config, process)
    shape = config.batch_size, config.block_size
    idx = torch.randint(config.vocab_size, shape, device=process.device)
    # The time of a step does not depend on the tokens, so the inputs are the targets as well.
    micro_batches = [(idx, idx)] * (tokens // idx.numel())

    def step():
        start = timer()
        # The number of the step sets its learning rate, which does not change its time.
        optimizer_step(0, model, optimizer, micro_batches, config, process)
        seconds = timer() - start
        measured = {"ms/step": 1e3 * seconds, "tokens/s": tokens / seconds}
        return measured | utilization(model, tokens / seconds, process)
    return step


def run_interleaved(jobs, rounds):
    """Call each job once per round, in random order; return {name: one dict per round}.

    If the machine slows down for a while, all jobs are affected alike. Three rounds of warmup,
    numbered -3 to -1, come first and do not count.
    """
    order = random.Random(1337)
    results = {name: [] for name in jobs}
    for i in tqdm(range(-3, rounds), leave=False, disable=None):
        # A compilation while the clock runs would give a wrong number, so it is an error after the
        # warmup rounds.
        with torch.compiler.set_stance("default" if i < 0 else "fail_on_recompile"):
            for name in order.sample(list(jobs), len(jobs)):
                measured = jobs[name]()
                if i >= 0:
                    results[name].append(measured)
    return results


def spread(values):
    """Return the median and the 10% and 90% quantiles as text."""
    p10, median, p90 = values.quantile([0.1, 0.5, 0.9])
    return f"{median:,.3f} ({p10:,.3f}-{p90:,.3f})"


def compare(benchmark, make_job, options, training):
    """Measure a job of every arch, print a table of medians and write all measurements to a file.

    make_job(config, process) returns a function without arguments, which returns its measurements.
    Each ratio is a job's ms/step (or tokens/s) divided by that of the first job in the same round.
    """
    check_at_least(1, options, "rounds")
    configs = resolve_each(options.archs, training)
    process = set_up_process(next(iter(configs.values())))
    jobs = {name: make_job(config, process) for name, config in configs.items()}
    results = run_interleaved(jobs, options.rounds)
    rows = []
    for name, measured in results.items():
        values = pd.DataFrame(measured)
        key, *others = values.columns
        if not rows:
            baseline = values[key]
        row = {"arch": label(name), f"{key} (10%-90%)": spread(values[key]),
               "ratio (10%-90%)": spread(values[key] / baseline)}
        rows.append(row | {other: f"{values[other].median():,.3f}" for other in others})
    print_table(rows)

    device = f"{process.device}, {torch.get_num_threads()} threads, {process.dtype}"
    print(f"Medians of {options.rounds} rounds on {device}")
    write_results(benchmark, options, training, device=device, results=results)


def write_results(benchmark, options, training, **results):
    """Write the options and results of a benchmark to a JSON file, and print its path."""
    path = Path(options.out_dir, f"{benchmark}.json")
    write_json(path, {"torch": torch.__version__, "options": vars(options) | training, **results})
    print(path)


def speed(options, training):
    """Measure the time of a training step with every arch.

    Here --compile defaults to true, and --total_batch_size to one micro-batch. No dataset is read:
    --data changes nothing, and --vocab_size defaults to that of --size, else to 257. The models of
    all archs stay in memory, so with a large --size name only a few of them in --archs.
    """
    training = {"compile": "true", **training}
    # The archs share code with different constants in it, so torch compiles it more often than its
    # default limit allows. By default it would also turn a float that differs between archs into
    # an input of the code. Keep it a constant, as it is when one arch is trained alone.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.specialize_float = True
    compare("speed", make_step, options, training)


def make_decoding(batch_size, new_tokens, config, process):
    """Return a function that generates text greedily and returns its speed.

    The first token is not timed, because the model reads the whole prompt for it.
    """
    model = make_model(config, process.device)
    prompt = torch.randint(config.vocab_size, (batch_size, 16), device=process.device)

    def decode():
        with process.autocast():
            tokens = model.generate(prompt, new_tokens, temperature=0)
            next(tokens)
            start = timer()
            for _ in tokens:
                pass
            seconds = timer() - start
        return {"tokens/s": batch_size * (new_tokens - 1) / seconds}
    return decode


def sample(options, training):
    """Measure how fast every arch generates text. Here --dtype defaults to float32."""
    check_at_least(1, options, "batch_size")
    check_at_least(2, options, "new_tokens")
    training = {"dtype": "float32", **training}
    make_job = partial(make_decoding, options.batch_size, options.new_tokens)
    compare("sample", make_job, options, training)


# ---- Memory --------------------------------------------------------------------------------------
# A training step runs on fake tensors, which have shapes but no numbers, while torch's MemTracker
# adds up the bytes that are alive. Nothing here has been checked on a GPU, whose allocator adds
# some memory of its own.
#
# A GPU runs kernels: small programs, each of which reads tensors from memory and writes others.
# torch.compile fuses several operations into one kernel, if it can. What such a kernel computes on
# the way, for the next operation in it, never goes to memory.
#
# Code that would be compiled on a GPU is traced: torch runs it on fake tensors and records each
# basic operation, such as aten.mm, a matrix product, as a node of a graph. Then a function of ours
# (make_fused_runner) takes the place of the compiled code. It assumes that the operations fuse into
# as few kernels as possible, and allocates the tensors that these would write.

CARDS = 24, 40, 80, 141          # GB of common GPUs
# How the names of the operations that multiply matrices begin
PRODUCTS = "aten.mm.", "aten.bmm.", "aten.addmm.", "aten._scaled_dot_product"


def storages(node):
    """Return the storages behind a node's results, {key: a tensor in that storage}.

    A storage is a piece of memory; a tensor and its views share one. Tracing keeps the fake tensors
    that a node computed in node.meta["val"]. The key is the storage's address in torch.
    """
    results = [x for x in tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)]
    return {x.untyped_storage()._cdata: x for x in results}


def make_fused_runner(graph, example_inputs):
    """Return a function that allocates what a compiled graph would, and computes nothing.

    All operations between two matrix products are assumed to be one kernel. The tensors in memory
    are then the graph's inputs and results, those that a product reads or writes, and those that a
    later kernel reads.
    """
    # torch wraps the graph in a module, whose attribute `graph` it is. The last node returns the
    # results, which are listed in its args[0].
    nodes = list(graph.graph.nodes)
    output = nodes[-1]
    # All operations of a kernel have the same level, and a product starts a new one. For example,
    # in gelu(x @ A) @ B the first product and gelu have level 1, and the second product has 2. A
    # tensor that a node of a higher level reads has to be in memory.
    level = {}                   # node -> the most products on a path that ends there
    in_memory = {}               # key of a storage -> a tensor in that storage
    for node in nodes:
        level[node] = max([level[x] for x in node.all_input_nodes], default=0)
        if str(node.target).startswith(PRODUCTS):
            level[node] += 1
            in_memory |= storages(node)
        for x in node.all_input_nodes:
            if level[x] < level[node] or node is output:
                in_memory |= storages(x)

    def run(arguments):
        # The keys are those of traced storages, as in in_memory. The values are the tensors that
        # stand for these storages in this call: arguments, or tensors that are allocated below.
        allocated = {}
        # The first nodes are the graph's inputs.
        for node, argument in zip(nodes, arguments):
            for key in storages(node):
                allocated[key] = argument
        # Keep everything until the graph ends. Compared with freeing each tensor after its last
        # use, the estimates of the presets from 32m to 1b are about 1% larger, and those of the
        # laptop size up to 30%.
        for key in in_memory.keys() - allocated.keys():
            x = in_memory[key]
            allocated[key] = x.new_empty(x.untyped_storage().nbytes() // x.itemsize)
        results = []
        for result in output.args[0]:
            if result is not None:
                # x is the traced result, which has one storage. The result of this call is the same
                # part of the tensor that stands for this storage.
                [(key, x)] = storages(result).items()
                result = allocated[key].as_strided(x.shape, x.stride(), x.storage_offset())
            results.append(result)
        return results
    # This tells torch that run takes a list of arguments.
    run._boxed_call = True
    return run


def as_compiled(modules, method):
    """Replace a method of some modules by one that allocates what its compiled form would.

    The modules may differ in their weights only.
    """
    # These imports take one to two seconds, and only the estimate of memory needs them.
    from functorch.compile import aot_function, min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch.nn.utils.stateless import _reparametrize_module
    first = modules[0]
    eager = getattr(first, method)

    # Call the first module, but with the weights and buffers of any of the modules. So one graph
    # does for all of them. (With tie_weights a head that is tied to the embedding changes with it.)
    def call(tensors, *inputs):
        with _reparametrize_module(first, tensors, tie_weights=True):
            return eager(*inputs)

    # compiled_for() returns a function that is traced when it is first called. @cache gives each
    # shape of the first input one of its own; the shapes of the other inputs follow from it.
    # aot_function() traces the forward pass and the backward pass together and passes the graph of
    # each to make_fused_runner. The other two arguments are those of torch.compile: how large
    # operations are split into basic ones, and which tensors the forward pass keeps for the
    # backward pass.
    @cache
    def compiled_for(shape):
        return aot_function(call, make_fused_runner, decompositions=select_decomp_table(),
                            partition_fn=min_cut_rematerialization_partition)

    def run(module, *inputs):
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        return compiled_for(inputs[0].shape)(tensors, *inputs)
    for module in modules:
        setattr(module, method, partial(run, module))


def peak_bytes(model, config, batch_size):
    """Return the peak memory in bytes of a step's last micro-batch and the optimizer's update."""
    from torch.distributed._tools.mem_tracker import MemTracker
    optimizer = make_optimizer(model, config)
    idx = torch.zeros(batch_size, config.block_size, dtype=torch.long)

    def step():
        # train.py has no cache of bfloat16 weights either (Process.autocast).
        with torch.autocast("cpu", torch.bfloat16, enabled=config.dtype != "float32",
                            cache_enabled=False):
            loss = model(idx, idx, loss_only=True)[1]
        loss.backward()
        optimizer.step()

    # The first step makes the gradients and Adam's moments, which exist from then on. (A run with
    # one process and one micro-batch per step frees its gradients after each step, so it needs
    # less.)
    step()
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def step_bytes(config, batch_size, layers=(1, 2)):
    """Return the peak memory of a step in bytes, extrapolated from models of one and two layers."""
    fewer, more = layers
    # Let the models do what they do on a GPU. On a CPU the attention would keep its (T, T)
    # probabilities if T is small, and the loss would compute fewer logits at once.
    with (FakeTensorMode(), patch.object(torch.Tensor, "is_cpu", False),
          patch.object(GPT, "most_logits", GPT.most_logits_on_gpu)):
        models = [GPT(replace(config, n_layer=n_layer)) for n_layer in layers]
        # train.py compiles the blocks, and the method that computes the head and the loss. All
        # blocks can share one graph, but models of different depths cannot.
        if config.compile != "false":
            as_compiled([block for model in models for block in model.blocks], "forward")
            for model in models:
                as_compiled([model], "summed_loss")
        peak_of_fewer, peak_of_more = [peak_bytes(model, config, batch_size) for model in models]
    per_layer = (peak_of_more - peak_of_fewer) / (more - fewer)
    return peak_of_fewer + (config.n_layer - fewer) * per_layer


def largest_batch_size(memory_at, limit):
    """Return the largest power of two with which a step stays within the limit, or 0."""
    batch_size = 1
    while memory_at(batch_size) <= limit:
        batch_size *= 2
    return batch_size // 2


def memory(options, training):
    """Estimate how much GPU memory a training step needs with every arch.

    Here --compile defaults to true and --dtype to bfloat16. No dataset is read: --data changes
    nothing, and --vocab_size defaults to that of --size, else to 257. The estimate assumes that all
    layers are the same.
    """
    training = {"compile": "true", "dtype": "bfloat16", **training}
    rows = []
    configs = resolve_each(options.archs, training)
    for name, config in tqdm(configs.items(), leave=False, disable=None):
        @cache
        def gigabytes(batch_size):
            return step_bytes(config, batch_size) / 1e9

        per_sequence = gigabytes(2) - gigabytes(1)
        row = {"arch": label(name), "fixed": gigabytes(1) - per_sequence,
               "per sequence": per_sequence,
               f"batch_size={config.batch_size}": gigabytes(config.batch_size)}
        for card in CARDS:
            row[f"fits {card} GB"] = largest_batch_size(gigabytes, 0.9 * card)
        rows.append(row)
    print_table(rows)
    print("The table gives the memory of a training step on one GPU, in GB. \"fixed\" is what the\n"
          "weights, the gradients, Adam's moments and copies of some of these need, and\n"
          "\"per sequence\" is what each sequence of a small micro-batch adds.\n"
          "\"batch_size=N\" is the total with N sequences. \"fits 24 GB\" is the largest power of\n"
          "two for batch_size with which at least a tenth of a 24 GB card stays free.")
    write_results("memory", options, training, results=rows)


# ---- Curves --------------------------------------------------------------------------------------

def curves(options, folders):
    """
    Draw the logs of several runs of train.py in one picture.

        python bench.py curves out/angpt out/ngpt --key=loss

    The folders may stand before, between or after the options. Write an option as --name=value.
    """
    key = options.key
    check(key == "val_loss" or not options.usual, f"key={key}: --usual draws val_loss only")
    gray = dict(color="0.85", lw=4, zorder=0)
    axes = Figure(figsize=(9, 5), dpi=100, layout="constrained").subplots()
    has_star = has_gray = False  # draw_curve() returns True if it has drawn a star

    for folder in folders:
        check(Path(folder).is_dir(), f"{folder}: no such folder; train.py writes out/<arch>")
        # The loss at step 0 is so large that the rest of the curve would look flat.
        records = [record for record in read_log(folder) if record["step"] > 0]
        if not records:
            print(f"{folder}: left out, because it has no log.jsonl with a record after step 0")
            continue
        numeric_keys = sorted(pd.DataFrame(records).select_dtypes("number"))
        check_choice("key", key, numeric_keys, f" ({folder}/log.jsonl)")
        has_star |= draw_curve(axes, records, key, marker="o", ms=3, label=folder)

        if options.usual:
            # {arch: {seed: the records of its log after step 0}}
            usual = read_json(Path(__file__).with_name("assets") / "usual.json")["runs"]
            seeds = usual.get(Path(folder).name, {})
            if not seeds:
                print(f"{folder}: no gray lines; they exist only for folders named "
                      f"{', '.join(usual)}")
            for records_of_seed in seeds.values():
                has_star |= draw_curve(axes, records_of_seed, key, star_size=12, **gray)
                has_gray = True

    check(axes.lines,
          "curves: no run to draw; expected the folders of some runs, such as out/angpt")
    if has_gray:
        axes.plot([], [], **gray, label="other seeds, default options")
    note = "; star: the last validation, on more tokens" if has_star else ""
    losses = {"loss": "training loss (nats per token)",
              "val_loss": "validation loss (nats per token)"}
    axes.set(xlabel=f"tokens (millions){note}", ylabel=losses.get(key, key))
    axes.legend()
    axes.figure.savefig(f"{options.out_dir}/curves.png")
    print(f"{options.out_dir}/curves.png")


# ---- Command line --------------------------------------------------------------------------------

BENCHMARKS = {"speed": (speed, SpeedOptions), "memory": (memory, MemoryOptions),
              "sample": (sample, DecodingOptions), "curves": (curves, CurvesOptions)}


def main(argv):
    """Run the benchmark that the first word of the command line names."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return
    name, *words = argv
    check_choice("benchmark", name, BENCHMARKS, "; the race is lessons/studies/race.py")
    benchmark, options_class = BENCHMARKS[name]
    if benchmark is curves:
        others = [word for word in words if not word.startswith("-")]
        words = [word for word in words if word.startswith("-")]
        options = CurvesOptions(**parse_options(words, curves.__doc__, CurvesOptions,
                                                command="curves FOLDER ... "))
    else:
        options, others = parse(words, benchmark.__doc__, options_class, f"{name} ")
    Path(options.out_dir).mkdir(parents=True, exist_ok=True)
    # The others are folders in curves(), and options of train.py in all other benchmarks.
    benchmark(options, others)


if __name__ == "__main__":
    run_script(main)

"""
Draw the picture that every lesson begins with: a GPT from tokens to loss, with the lesson's own
part marked.

    from diagram import block_diagram
    block_diagram(3)                                # lesson 3's parts, and the map of the lessons
    block_diagram("norm1", "norm2")                 # these parts (see PARTS), without the map
    block_diagram("norm1", without=["head_scale"])  # leaves parts out
    block_diagram(1, norm1="LayerNorm")             # writes other words in a box

placements() draws the map of where norms can stand, with which lesson 8 begins.
"""
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch


class Part(NamedTuple):
    """A box of the diagram."""
    row: str
    place: int                                      # position in the row, from the left
    kind: str
    words: str


# No architecture has all of these norms and scales.
PARTS = {
    "norm1": Part("attention", 1, "norm", "norm1"),
    "w_qkv": Part("attention", 2, "matrix", "w_qkv"),
    "qk_norm": Part("attention", 3, "norm", "rope,\nqk norm"),
    "attend": Part("attention", 4, "step", "attend"),
    "head_scale": Part("attention", 5, "norm", "head\nscale"),
    "w_o": Part("attention", 6, "matrix", "w_o"),
    "norm_attn": Part("attention", 7, "norm", "norm_attn"),
    "norm2": Part("MLP", 1, "norm", "norm2"),
    "w_up": Part("MLP", 2, "matrix", "w_up"),
    "scale_uz": Part("MLP", 3, "norm", "scales\nof u, z"),
    "act": Part("MLP", 4, "step", "u SiLU(z)"),
    "norm_ffn": Part("MLP", 5, "norm", "norm_ffn"),
    "w_down": Part("MLP", 6, "matrix", "w_down"),
    "norm_mlp": Part("MLP", 7, "norm", "norm_mlp"),
    "wte": Part("under attention", 0, "matrix", "wte"),
    "residual_a": Part("under attention", 8, "plus", "+"),
    "post_a": Part("under attention", 9, "norm", "norm\nof h"),
    "residual_m": Part("under MLP", 8, "plus", "+"),
    "post_m": Part("under MLP", 9, "norm", "norm\nof h"),
    "norm_f": Part("end", 1, "norm", "norm_f"),
    "lm_head": Part("end", 2, "matrix", "lm_head"),
    "s_z": Part("end", 3, "norm", "scale\ns_z"),
    "loss": Part("end", 4, "step", "loss"),
    "optimizer": Part("end", 6, "step", "AdamW"),
    "project": Part("end", 7, "norm", "norms of\nweights"),
}
# The residual stream runs under each of the two branches.
HEIGHT = {"attention": 2.45, "under attention": 1.85, "MLP": 1.0, "under MLP": 0.4, "end": -0.55}


class Lesson(NamedTuple):
    """What the diagram of a lesson shows."""
    title: str                                      # on the map
    marked: tuple
    lacking: tuple = ()                             # parts that its architecture does not have
    words: dict = {}                                # part -> other words in its box
    step_sizes: bool = False                        # write alpha beside the residual steps


PRE_NORMS = ("norm1", "norm2", "norm_f")
BRANCH_END = ("norm_attn", "norm_mlp")              # norms behind w_o and w_down
BEHIND_SUM = ("post_a", "post_m")
OF_SPHERE = ("scale_uz", "s_z", "project")
OF_NORMFORMER = ("head_scale", "norm_ffn")
RESIDUALS = ("residual_a", "residual_m")
LESSONS = {
    1: Lesson("LayerNorm,\nRMSNorm", PRE_NORMS,
              ("qk_norm", *OF_NORMFORMER, *BRANCH_END, *BEHIND_SUM, *OF_SPHERE)),
    2: Lesson("PowerNorm", PRE_NORMS,
              ("qk_norm", *OF_NORMFORMER, *BRANCH_END, *BEHIND_SUM, *OF_SPHERE)),
    3: Lesson("NormFormer", (*OF_NORMFORMER, "norm_attn", "residual_m"),
              ("qk_norm", "norm_mlp", *BEHIND_SUM, *OF_SPHERE), words={"act": "GELU"}),
    4: Lesson("nGPT", ("qk_norm", *RESIDUALS, *BRANCH_END, *BEHIND_SUM, *OF_SPHERE),
              (*PRE_NORMS, *OF_NORMFORMER), step_sizes=True),
    5: Lesson("anGPT",
              ("wte", "w_qkv", "w_o", "w_up", "act", "w_down", "lm_head", *RESIDUALS, *BEHIND_SUM,
               "project"),
              (*PRE_NORMS, *OF_NORMFORMER, "scale_uz"), step_sizes=True),
    6: Lesson("the race", ("loss", "optimizer", "project")),
    7: Lesson("what a\nnorm costs", (*PRE_NORMS, "qk_norm", "attend", "project")),
    8: Lesson("write the\nseventh", (*PRE_NORMS, *BEHIND_SUM),
              ("qk_norm", *OF_NORMFORMER, *BRANCH_END, *OF_SPHERE)),
}

FILL = {"norm": "#cfe8f7", "matrix": "#e6e6e6", "step": "white", "plus": "white"}
MARK = "#e69f00"                                    # color-blind readers can tell it from blue


# ---- Drawing -------------------------------------------------------------------------------------

def box(ax, x, y, words, kind, marked=False, width=0.9, height=0.42, dashed=False):
    """Draw a box, or a circle for a residual step, with words in it."""
    style = {"facecolor": FILL[kind], "edgecolor": "black", "linewidth": 0.8, "zorder": 3}
    if marked:
        style["facecolor"] = MARK
        style["linewidth"] = 2
    if dashed:
        style["linestyle"] = "--"
    if kind == "plus":
        patch = Circle((x, y), 0.14, **style)
    else:
        corner = (x - width / 2, y - height / 2)
        rounded = "round,pad=0,rounding_size=0.06"
        patch = FancyBboxPatch(corner, width, height, boxstyle=rounded, **style)
    ax.add_patch(patch)

    longest = max(len(line) for line in words.split("\n"))
    size = 8.2
    if longest < 10 or width > 1:
        size = 9
    weight = "normal"
    if marked and longest < 11:
        weight = "bold"
    write(ax, x, y, words, fontsize=size, weight=weight, linespacing=1.25, zorder=4)


def write(ax, x, y, words, **style):
    """Write text, centered unless `style` says otherwise."""
    ax.text(x, y, words, **{"ha": "center", "va": "center"} | style)


def line(ax, *points, arrow=True):
    """Draw a line through the points, with an arrow at its end."""
    xs = [x for x, _ in points]
    ys = [y for _, y in points]
    ax.plot(xs, ys, color="black", linewidth=1.1, zorder=1)
    if arrow:
        style = {"arrowstyle": "->", "linewidth": 1.1}
        ax.annotate("", points[-1], points[-2], arrowprops=style, zorder=1)


# ---- A GPT ---------------------------------------------------------------------------------------

def block_diagram(*marks, without=(), **words):
    """Draw a GPT and mark some of its parts.

    A mark is a name in PARTS or the number of a lesson. A number also adds the map of the lessons
    and leaves out the parts that the lesson's architecture does not have. Keywords change the words
    in a box, as in norm1="PowerNorm". Raise ValueError for an unknown part.
    """
    here = [mark for mark in marks if mark in LESSONS]
    marked = [mark for mark in marks if mark not in LESSONS]
    unknown = [str(name) for name in (*marked, *words, *without) if name not in PARTS]
    if unknown:
        raise ValueError(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    lacking = list(without)
    for number in here:
        marked += LESSONS[number].marked
        lacking += LESSONS[number].lacking
        words = LESSONS[number].words | words
    shown = {name: part for name, part in PARTS.items() if name not in lacking}
    # Without QK norm the box is still there, for rope.
    if "qk_norm" in lacking:
        shown["qk_norm"] = PARTS["qk_norm"]._replace(kind="step", words="rope")

    bottom = -1.8 if here else -0.95
    fig, ax = plt.subplots(figsize=(10, 0.95 * (3 - bottom)))
    ax.set(xlim=(-0.75, 9.6), ylim=(bottom, 3))
    ax.axis("off")
    draw_lines(ax, shown)
    for name, part in shown.items():
        text = words.get(name, part.words)
        box(ax, part.place, HEIGHT[part.row], text, part.kind, name in marked, height=0.5)
        if part.kind == "plus" and any(LESSONS[number].step_sizes for number in here):
            write(ax, part.place + 0.24, HEIGHT[part.row] + 0.16, "α", fontsize=11, style="italic")
    # The legend. In some lessons all norms are marked.
    box(ax, 8.15, HEIGHT["end"] + 0.2, "matrix", "matrix", width=0.8, height=0.3)
    if any(part.kind == "norm" and name not in marked for name, part in shown.items()):
        box(ax, 8.15, HEIGHT["end"] - 0.2, "norm, scale", "norm", width=0.8, height=0.3)
    box(ax, 9.05, HEIGHT["end"], "here", "norm", marked=True, width=0.8, height=0.3)
    if here:
        draw_map(ax, here)
    fig.tight_layout(pad=0.2)
    plt.show()
    plt.close(fig)


def draw_map(ax, here):
    """Draw the row of lessons under the GPT, with the lessons `here` marked."""
    for number, lesson in LESSONS.items():
        x = 1.28 * (number - 1) - 0.1
        title = f"{number} {lesson.title}"
        box(ax, x, -1.45, title, "step", number in here, width=1.2, height=0.55)


def draw_lines(ax, shown):
    """Draw the lines between the boxes of block_diagram, and the words beside them."""
    draw_half(ax, "attention", shown, 0, "h, the residual stream (passes by every branch)")
    draw_half(ax, "MLP", shown, -0.3, "h, the residual stream")
    first = left_edge("end", shown)
    draw_return(ax, "under attention", 1.43, "under MLP", -0.25, arrow=False)
    draw_return(ax, "under MLP", -0.08, "end", first)
    y = HEIGHT["end"]
    line(ax, (first, y), (3.55, y))
    line(ax, (4.4, y), (5.55, y))
    write(ax, 4.98, y + 0.06, "gradient", fontsize=9.5, va="baseline")
    if "project" in shown:
        line(ax, (6.4, y), (6.55, y), arrow=False)
    write(ax, -0.7, HEIGHT["under attention"] - 0.02, "ids", fontsize=10, ha="left")
    write(ax, 9, HEIGHT["attention"], "one of\nn_layer blocks", fontsize=9.5, style="italic")


def left_edge(row, shown):
    """Return the x of the left edge of the row's first box."""
    return min(part.place for part in shown.values() if part.row == row) - 0.45


def draw_half(ax, branch, shown, start, words):
    """Draw a branch of the block and the residual stream under it, which begins at `start`."""
    up = HEIGHT[branch]
    low = HEIGHT["under " + branch]
    line(ax, (0.45, low), (0.45, up), (left_edge(branch, shown), up))
    line(ax, (1, up), (7.5, up), arrow=False)
    line(ax, (7.4, up), (8, up), (8, low + 0.14))
    line(ax, (start, low), (7.86, low))
    line(ax, (8.14, low), (9, low), arrow=False)
    write(ax, 4, low + 0.05, words, fontsize=9.5, va="baseline", style="italic")
    write(ax, -0.25, up - 0.02, branch, fontsize=10)


def draw_return(ax, row, between, next_row, end, arrow=True):
    """Draw the line from a row's right end, back at the height `between`, into the next row."""
    y = HEIGHT[row]
    low = HEIGHT[next_row]
    right = [(9, y), (9.54, y), (9.54, between)]
    left = [(-0.65, between), (-0.65, low), (end, low)]
    line(ax, *right, *left, arrow=arrow)


# ---- Where norms can stand -----------------------------------------------------------------------

class Placement(NamedTuple):
    """A column of the map of placements."""
    where: str
    equation: str
    branch: dict                                    # height -> what stands there
    who: tuple
    behind: str = ""                                # what stands after the sum


# "N?" is a norm that only some of the architectures in that column have.
PLACEMENTS = [
    Placement(
        where="nowhere",
        equation="$h + F(h)$",
        branch={2.6: "F"},
        who=("hybridnorm's MLP",)),
    Placement(
        where="before\nthe branch",
        equation="$h + F(N(h))$",
        branch={3.4: "N", 2.6: "F"},
        who=("layernorm", "rmsnorm", "powernorm", "lnscale", "dyt, derf", "seednorm", "gatednorm",
             "mixln's others")),
    Placement(
        where="at the\nbranch's end",
        equation="$h + N(F(h))$",
        branch={2.6: "F", 1.8: "N"},
        who=("olmo2",)),
    Placement(
        where="at both ends",
        equation="$h + N(F(N(h)))$",
        branch={3.4: "N", 2.6: "F", 1.8: "N"},
        who=("periln", "normformer's", "attention")),
    Placement(
        where="inside",
        equation="$h + F_2(N(F_1(h)))$",
        branch={3.5: "N?", 2.9: "$F_1$", 2.3: "N", 1.7: "$F_2$"},
        who=("normformer's MLP", "(and before)", "hybridnorm's", "attention (q, k, v;",
             "and after the sum)")),
    Placement(
        where="behind\nthe sum",
        equation="$N(\\alpha h + F(h))$",
        branch={3.4: "N?", 2.6: "F"},
        behind="N",
        who=("postln: $\\alpha$ = 1", "mixln's first 1/4", "deepnorm", "keel (and before)")),
    Placement(
        where="at the end and\nbehind the step",
        equation="$N(h + \\alpha(N(F(h)) - h))$",
        branch={2.6: "F", 1.8: "N"},
        behind="N?",
        who=("ngpt", "angpt: $\\nu(\\alpha)$,", "a factor, for", "the last N")),
]


def placements():
    """Return a Figure with a column for each place where norms can stand.

    Under each column are the architectures that have their norms there. A column is read from top
    to bottom, with the residual stream h on the left and the branch F (attention or MLP) on the
    right.
    """
    fig = Figure(figsize=(11.25, 5.85))
    ax = fig.add_axes((0, 0, 1, 1))
    ax.set(xlim=(-0.1, 12.6), ylim=(-2.65, 5.45))
    ax.axis("off")
    for column, placement in enumerate(PLACEMENTS):
        draw_placement(ax, 1.8 * column + 0.4, placement)
    legend = "F: attention or MLP.  N: a norm; dashed: only some of these have it."
    write(ax, 8.9, -2.3, legend, fontsize=9.5, va="baseline", style="italic")
    return fig


def draw_placement(ax, stream, placement):
    """Draw one column; `stream` is the x of the residual stream."""
    side = stream + 0.75
    middle = stream + 0.45
    write(ax, middle, 5.05, placement.where, fontsize=11, weight="bold")
    write(ax, stream - 0.13, 4.4, "h", fontsize=11, ha="right", style="italic")
    line(ax, (stream, 4.5), (stream, 1.34))
    line(ax, (stream, 4.1), (side, 4.1), (side, 1.2), (stream + 0.14, 1.2))
    line(ax, (stream, 1.06), (stream, 0.0))
    box(ax, stream, 1.2, "+", "plus")
    for height, words in placement.branch.items():
        small_box(ax, side, height, words)
    if placement.behind:
        small_box(ax, stream, 0.55, placement.behind)
    write(ax, middle, -0.3, placement.equation, fontsize=9.5)
    for row, name in enumerate(placement.who):
        write(ax, middle, -0.66 - 0.24 * row, name, fontsize=9.5)


def small_box(ax, x, y, words):
    """Draw a box of the map of placements."""
    kind = "norm" if words.startswith("N") else "matrix"
    box(ax, x, y, words.rstrip("?"), kind, width=0.6, dashed=words.endswith("?"))

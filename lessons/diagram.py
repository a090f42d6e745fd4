"""
The one picture that every lesson starts with: a GPT's way from tokens to loss, the lesson's own part marked.

    from diagram import block_diagram
    block_diagram(3)                                # lesson 3's parts, and the eight lessons below: you are here
    block_diagram("norm1", "norm2")                 # parts by name (PARTS has them), no map
    block_diagram("norm1", without=["head_scale"])  # parts that are left out
    block_diagram(1, norm1="LayerNorm")             # other words in a box

And the map of where norms can stand, from which lesson 8 sets out:

    placements()
"""
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch

# name: (row, place in the row, kind, words). No architecture has all of the norms and scales.
PARTS = {
    "norm1": (0, 1, "norm", "norm1"), "w_qkv": (0, 2, "matrix", "w_qkv"), "qk_norm": (0, 3, "norm", "rope,\nqk norm"),
    "attend": (0, 4, "step", "attend"), "head_scale": (0, 5, "norm", "head\nscale"), "w_o": (0, 6, "matrix", "w_o"),
    "norm_attn": (0, 7, "norm", "norm_attn"),
    "norm2": (1, 1, "norm", "norm2"), "w_up": (1, 2, "matrix", "w_up"), "scale_uz": (1, 3, "norm", "scales\nof u, z"),
    "act": (1, 4, "step", "u SiLU(z)"), "norm_ffn": (1, 5, "norm", "norm_ffn"), "w_down": (1, 6, "matrix", "w_down"),
    "norm_mlp": (1, 7, "norm", "norm_mlp"),
    "wte": (2, 0, "matrix", "wte"), "residual_a": (2, 8, "plus", "+"), "post_a": (2, 9, "norm", "norm\nof h"),
    "residual_m": (3, 8, "plus", "+"), "post_m": (3, 9, "norm", "norm\nof h"),
    "norm_f": (4, 1, "norm", "norm_f"), "lm_head": (4, 2, "matrix", "lm_head"), "s_z": (4, 3, "norm", "scale\ns_z"),
    "loss": (4, 4, "step", "loss"), "optimizer": (4, 6, "step", "AdamW"),
    "project": (4, 7, "norm", "norms of\nweights"),
}
BRANCH_END = ("norm_attn", "norm_mlp")              # norms behind w_o and w_down
BEHIND_SUM = ("post_a", "post_m")
OF_SPHERE = ("scale_uz", "s_z", "project")
# number: (what the map calls it, its parts, what its architecture lacks)
LESSONS = {
    1: ("LayerNorm,\nRMSNorm", ("norm1", "norm2", "norm_f"),
        ("qk_norm", "head_scale", "norm_ffn", *BRANCH_END, *BEHIND_SUM, *OF_SPHERE)),
    2: ("PowerNorm", ("norm1", "norm2", "norm_f"),
        ("qk_norm", "head_scale", "norm_ffn", *BRANCH_END, *BEHIND_SUM, *OF_SPHERE)),
    3: ("NormFormer", ("head_scale", "norm_attn", "norm_ffn", "residual_m"),
        ("qk_norm", "norm_mlp", *BEHIND_SUM, *OF_SPHERE)),
    4: ("nGPT", ("qk_norm", "residual_a", "residual_m", *BRANCH_END, *BEHIND_SUM, *OF_SPHERE),
        ("norm1", "norm2", "norm_f", "head_scale", "norm_ffn")),
    5: ("anGPT", ("w_qkv", "w_o", "w_up", "act", "w_down", "residual_a", "residual_m", *BEHIND_SUM, "project"),
        ("norm1", "norm2", "norm_f", "head_scale", "norm_ffn", "scale_uz")),
    6: ("the race", ("loss", "optimizer", "project"), ()),
    7: ("what a\nnorm costs", ("norm1", "qk_norm", "attend", "norm2", "norm_f", "project"), ()),
    8: ("write the\nseventh", ("norm1", "norm2", "norm_f", *BEHIND_SUM),
        ("qk_norm", "head_scale", "norm_ffn", *BRANCH_END, *OF_SPHERE)),
}
STILL_THERE = {"qk_norm": "rope"}                   # where the rest of a part is lacking
ROW = (2.45, 1.0, 1.85, 0.4, -0.55)                 # heights: two branches, the stream under each, the end
FILL = {"norm": "#cfe8f7", "matrix": "#e6e6e6", "step": "white", "plus": "white"}
MARK = "#e69f00"                                    # orange and blue: told apart by every kind of colour vision


def box(ax, x, y, words, kind, marked=False, w=0.9, h=0.42, dashed=False):
    style = dict(facecolor=MARK if marked else FILL[kind], edgecolor="black", linewidth=2 if marked else 0.8, zorder=3,
                 linestyle="--" if dashed else "-")
    ax.add_patch(Circle((x, y), 0.14, **style) if kind == "plus" else
                 FancyBboxPatch((x - w / 2, y - h / 2), w, h, boxstyle="round,pad=0,rounding_size=0.06", **style))
    longest = max(len(word) for word in words.split("\n"))
    ax.text(x, y, words, ha="center", va="center", fontsize=9 if longest < 10 or w > 1 else 8.2, zorder=4,
            weight="bold" if marked and longest < 11 else "normal", linespacing=1.25)


def line(ax, *points, arrow=True):
    xs, ys = zip(*points)
    ax.plot(xs, ys, color="black", linewidth=1.1, zorder=1)
    if arrow:
        ax.annotate("", points[-1], points[-2], arrowprops=dict(arrowstyle="->", linewidth=1.1), zorder=1)


def block_diagram(*marks, without=(), **words):
    """Draws a GPT with the parts `marks` filled: names of PARTS, or a lesson's number, which adds the map of the eight
    and leaves out what the lesson's architecture lacks.

    Keywords change the words in a box: norm1="PowerNorm". Raises ValueError for a part that is not there.
    """
    here = [mark for mark in marks if mark in LESSONS]
    marked = [mark for mark in marks if mark not in LESSONS]
    lacking = list(without)
    for number in here:
        marked += LESSONS[number][1]
        lacking += LESSONS[number][2]
    if unknown := (set(marked) | set(words) | set(without)) - set(PARTS):
        raise ValueError(f"no part {', '.join(map(str, unknown))}; there are {', '.join(PARTS)}")
    shown = {name: part for name, part in PARTS.items() if name not in lacking}
    for name in STILL_THERE.keys() & lacking:
        row, place, _, _ = PARTS[name]
        shown[name] = (row, place, "step", STILL_THERE[name])
    bottom = -1.8 if here else -0.95
    fig, ax = plt.subplots(figsize=(10, (3 - bottom) * 0.95))
    ax.set(xlim=(-0.75, 9.6), ylim=(bottom, 3))
    ax.axis("off")
    draw_lines(ax, shown)
    for name, (row, place, kind, label) in shown.items():
        box(ax, place, ROW[row], words.get(name, label), kind, name in marked, h=0.5)
    for x, kind, mark, label in ((7.95, "norm", False, "norm, scale"), (8.85, "norm", True, "here")):
        box(ax, x + 0.2, ROW[4], label, kind, mark, w=0.8, h=0.3)
    if here:
        for number, (title, *_) in LESSONS.items():
            box(ax, -0.1 + (number - 1) * 1.28, -1.45, f"{number} {title}", "step", number in here, w=1.2, h=0.55)
    fig.tight_layout(pad=0.2)
    plt.show()
    plt.close(fig)


def draw_lines(ax, shown):
    """The ways between the boxes of block_diagram, and what is written beside them."""
    begins = {}                                     # the left edge of each row's first box
    for row, place, _, _ in shown.values():
        begins[row] = min(place - 0.45, begins.get(row, place))
    for branch, stream in ((0, 2), (1, 3)):         # around the block's two halves, above the residual stream
        y, x0 = ROW[stream], 0.45
        line(ax, (x0, y), (x0, ROW[branch]), (begins[branch], ROW[branch]))
        line(ax, (1, ROW[branch]), (7.5, ROW[branch]), arrow=False)
        line(ax, (7.4, ROW[branch]), (8, ROW[branch]), (8, y + 0.14))
        line(ax, (0 if stream == 2 else -0.3, y), (7.86, y))
        line(ax, (8.14, y), (9, y), arrow=False)
        ax.text(4, y + 0.05, "h, the residual stream" + " (goes round every branch)" * (stream == 2), fontsize=9.5,
                ha="center", style="italic")
        ax.text(-0.25, ROW[branch] - 0.02, ("attention", "MLP")[branch], fontsize=10, ha="center", va="center")
    for top, low, turn, end in ((2, 3, 1.43, -0.25), (3, 4, -0.08, begins[4])):  # from one row to the next
        line(ax, (9, ROW[top]), (9.54, ROW[top]), (9.54, turn), (-0.65, turn), (-0.65, ROW[low]), (end, ROW[low]),
             arrow=low == 4)
    line(ax, (begins[4], ROW[4]), (3.55, ROW[4]))
    line(ax, (4.4, ROW[4]), (5.55, ROW[4]))
    if "project" in shown:
        line(ax, (6.4, ROW[4]), (6.55, ROW[4]), arrow=False)
    ax.text(4.98, ROW[4] + 0.06, "gradient", fontsize=9.5, ha="center")
    ax.text(-0.7, ROW[2] - 0.02, "ids", fontsize=10, va="center")
    ax.text(9, ROW[0], "one of\nn_layer blocks", fontsize=9.5, ha="center", va="center", style="italic")



# Where, the equation, what stands on the branch (a height: words), behind the sum, and who has it. A "?": not all do.
PLACEMENTS = [
    ("nowhere", "$h + F(h)$", {2.6: "F"}, None, ["hybridnorm's MLP"]),
    ("before\nthe branch", "$h + F(N(h))$", {3.4: "N", 2.6: "F"}, None,
     ["layernorm", "rmsnorm", "powernorm", "lnscale", "dyt, derf", "seednorm", "gatednorm", "mixln's others"]),
    ("at the\nbranch's end", "$h + N(F(h))$", {2.6: "F", 1.8: "N"}, None, ["olmo2"]),
    ("at both ends", "$h + N(F(N(h)))$", {3.4: "N", 2.6: "F", 1.8: "N"}, None, ["periln", "normformer's", "attention"]),
    ("inside", "$h + F_2(N(F_1(h)))$", {3.5: "N?", 2.9: "$F_1$", 2.3: "N", 1.7: "$F_2$"}, None,
     ["normformer's MLP", "(and before)", "hybridnorm's", "attention (q, k, v;", "and behind the sum)"]),
    ("behind\nthe sum", "$N(\\alpha h + F(h))$", {3.4: "N?", 2.6: "F"}, "N",
     ["postln: $\\alpha$ = 1", "mixln's first 1/4", "deepnorm", "keel (and before)"]),
    ("at the end and\nbehind the step", "$N(h + \\alpha(N(F(h)) - h))$", {2.6: "F", 1.8: "N"}, "N?",
     ["ngpt", "angpt: $\\nu(\\alpha)$,", "a factor, for", "the last N"]),
]


def placements():
    """A Figure: a branch for each place where norms can stand, and the architectures and variants that have them there.

    Time runs down. h passes on the left, the branch F, attention or MLP, on the right.
    """
    fig = Figure(figsize=(11.25, 5.85))
    ax = fig.add_axes((0, 0, 1, 1))
    ax.set(xlim=(-0.1, 12.6), ylim=(-2.65, 5.45))
    ax.axis("off")
    for column, (where, equation, branch, behind, names) in enumerate(PLACEMENTS):
        stream = 1.8 * column + 0.4
        side = stream + 0.75
        ax.text(stream + 0.45, 5.05, where, ha="center", va="center", fontsize=11, weight="bold")
        ax.text(stream - 0.13, 4.4, "h", ha="right", va="center", fontsize=11, style="italic")
        line(ax, (stream, 4.5), (stream, 1.34))
        line(ax, (stream, 4.1), (side, 4.1), (side, 1.2), (stream + 0.14, 1.2))
        line(ax, (stream, 1.06), (stream, 0.0))
        box(ax, stream, 1.2, "+", "plus")
        for height, words in branch.items():
            kind = "norm" if words.startswith("N") else "matrix"
            box(ax, side, height, words.rstrip("?"), kind, w=0.6, dashed=words.endswith("?"))
        if behind:
            box(ax, stream, 0.55, behind.rstrip("?"), "norm", w=0.6, dashed=behind.endswith("?"))
        ax.text(stream + 0.45, -0.3, equation, ha="center", va="center", fontsize=9.5)
        for row, name in enumerate(names):
            ax.text(stream + 0.45, -0.66 - 0.24 * row, name, ha="center", va="center", fontsize=9.5)
    ax.text(8.9, -2.3, "F: attention or MLP.  N: a norm; dashed: in some of these only.", ha="center", fontsize=9.5,
            style="italic")
    return fig

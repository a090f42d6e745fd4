import json
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[2]))
import pytest
import torch
import torch.nn.functional as F

from lessons.extras import hellaswag
from model import GPT, GPTConfig
from prepare import ConfigError, DataError, get_tokenizer

BYTES = get_tokenizer("bytes")


def write_questions(path, rows):
    keys = "ctx_a", "ctx_b", "activity_label", "endings", "label"
    path.write_text("".join(json.dumps(dict(zip(keys, row))) + "\n" for row in rows))


def test_questions_are_read_without_wikihow_s_marks(tmp_path):
    endings = ["eats [step] soup", "b", "[title] Ø", "é日"]
    write_questions(tmp_path / "q",
                    [("A [title] man [step] sits", "there", "Do", endings, "1")] * 2)
    found = hellaswag.questions(tmp_path / "q")[0]
    assert found == ("Do: A. man sits There", ["eats soup", "b", " Ø", "é日"], 1)


def test_an_ending_is_scored_as_if_it_were_alone():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=257, n_layer=1, n_head=2, n_embd=16, block_size=16)).eval()
    pairs = [("Do: A. man sits", "soup"), ("A: b ", "é日"), ("b", "x" * 30)]
    wanted = []
    for context, ending in pairs:
        text = f"{context} {ending}".encode()
        row = torch.tensor(list(text)[-17:])             # block_size is 16
        losses = F.cross_entropy(model(row[None, :-1], row[None, 1:])[0][0], row[1:],
                                 reduction="none")
        new = len(text) - len(context.rstrip())          # the ending and the space before it
        wanted.append(losses[-new:].sum().item())
    assert hellaswag.nats(model, BYTES, pairs).tolist() == pytest.approx(wanted, rel=1e-5)


class LikesA(torch.nn.Linear):
    """A model for which the most likely next byte is always an "a"."""
    config = SimpleNamespace(block_size=99)

    def forward(self, x, targets):
        return 2.0 * F.one_hot(torch.full_like(x, 97), 257), None


def test_right_answers_are_counted_with_their_standard_error(tmp_path, monkeypatch, capsys):
    def load_model(source, device, arch):
        assert arch == "mine.py:mine"
        return LikesA(1, 1), BYTES, {}

    monkeypatch.setattr(hellaswag, "load_model", load_model)
    # The first is the likeliest, the second per character, and the third would be per byte.
    endings = ["bb", "aab", 6 * "日", "cccc"]
    write_questions(tmp_path / "q", [("a", "", "a", endings, label) for label in (0, 0, 1, 2, 2)])
    hellaswag.main([f"--file={tmp_path}/q", "--batch_size=3", "--device=cpu",
                    "--arch=mine.py:mine", "--out_dir=out/a,out/b"])
    assert capsys.readouterr().out == "".join(
        f"out/{name}: accuracy 0.4000 +- 0.2449, by length 0.2000 +- 0.2000\n" for name in "ab")


def test_a_line_ends_only_where_json_lines_end(tmp_path):
    row = dict(ctx_a="a\u2028b", ctx_b="", activity_label="", endings=list("abcd"), label=1)
    text = json.dumps(row, ensure_ascii=False)
    (tmp_path / "q").write_text(f"{text}\r\n{text}\n\n", encoding="utf-8")
    assert len(hellaswag.questions(tmp_path / "q")) == 2


def test_a_batch_has_questions():
    with pytest.raises(ConfigError, match="^batch_size=0: expected at least 1$"):
        hellaswag.main(["--batch_size=0"])


QUESTION = ('{"ctx_a": "", "ctx_b": "", "activity_label": "", "endings": ["a", "b", "c", "%s"], '
            '"label": %d}')


@pytest.mark.parametrize("text, says", [
    ("", "0 questions"),
    (QUESTION % ("d", 0), "1 questions"),
    ("oops", "cannot be read"),
    ('{"ctx_a": "", "label": 1}', "row 1: expected ctx_a"),
    (QUESTION % ("d", 4), "a label"),
    (QUESTION % ("[step]", 0), "four endings"),
    (QUESTION % ('d", "e', 0), "four endings")])
def test_questions_that_cannot_be_read_are_one_line(tmp_path, text, says):
    (tmp_path / "q").write_text(text)
    with pytest.raises(DataError, match=f"^.*/q.*{says}.*$"):
        hellaswag.questions(tmp_path / "q")

"""
Turn text into a dataset of tokens.

    python prepare.py                                             # Python's standard library
    python prepare.py --source="books/*.txt" --tokenizer=gpt2     # your .txt, .jsonl or .parquet
    python prepare.py --source=fineweb --tokens=1_000_000_000     # FineWeb's text, streamed
    python prepare.py --source=fineweb10B-gpt2 --tokens=1_000_000_000    # FineWeb as tokens

A dataset is a folder data/<name>/ of shards in llm.c's format: *_val_000000.bin for validation, and
*_train_000001.bin, *_train_000002.bin and so on for training. meta.json is written last. If a
preparation was stopped, the same command resumes it. fineweb10B-gpt2 and fineweb100B-gpt2 come in
shards of 100M tokens: --tokens is rounded up to whole shards, and --subset, --val_tokens,
--shard_tokens and --seed do not change them.
"""
# The helpers for errors, options and files come first, because the other scripts import them from
# here. To read how a dataset is made, begin at "Tokenizers".
import argparse
import builtins
import codecs
import contextlib
import difflib
import hashlib
import inspect
import io
import itertools
import json
import math
import os
import random
import re
import signal
import sys
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import get_args

import numpy as np
import tiktoken
from filelock import FileLock, Timeout
from tqdm import tqdm

from model import ConfigError, GPTConfig


# ---- Errors and checks ---------------------------------------------------------------------------

class DataError(Exception):
    """An error in a file, on this machine or in a run, with a message of one line."""


def check(condition, message):
    """Raise DataError unless the condition holds."""
    if not condition:
        raise DataError(message)


@contextlib.contextmanager
def explain_errors(message):
    """Turn any exception that a library raises into a DataError with a message of one line."""
    try:
        yield
    except (DataError, ConfigError):
        raise
    except Exception as error:
        words = " ".join(str(error).split())
        raise DataError(f"{message} ({type(error).__name__}: {words[:200]})") from error


# This maps names that users of nanoGPT and others are likely to type to ours. A comparison of the
# spellings would not suggest these first.
NANOGPT_NAMES = {
    "lr": "learning_rate",
    "epochs": "max_steps",
    "eval_iters": "eval_tokens",
    "gradient_accumulation_steps": "total_batch_size",
    "start": "prompt",
    "gpt+": "rmsnorm",
}


def did_you_mean(word, names):
    """Return "; did you mean NAME?", or "" if no name is similar to the word.

    NAME is the word's entry in NANOGPT_NAMES if that is among the names, else the most similar one.
    """
    word = str(word).lower()
    if NANOGPT_NAMES.get(word) in names:
        word = NANOGPT_NAMES[word]
    similar = difflib.get_close_matches(word, names)
    return f"; did you mean {similar[0]}?" if similar else ""


def check_choice(option, value, valid, hint=""):
    """Raise ConfigError with the most similar valid value unless `value` is one of `valid`."""
    if value not in valid:
        raise ConfigError(f"{option}={value}: expected one of {', '.join(valid)}"
                          f"{did_you_mean(value, valid)}{hint}")


def check_at_least(minimum, config, *names):
    """Raise ConfigError if one of these options is a number below the minimum, infinite, or NaN."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, (int, float)) and not minimum <= value < math.inf:
            finite = ", and finite" if value == math.inf else ""
            raise ConfigError(f"{name}={value}: expected at least {minimum}{finite}")


# ---- Options -------------------------------------------------------------------------------------

def allowed_values(field):
    """Return an option's type and, if it is a bool or a Literal, the words it may be set to."""
    kind = field.type
    if type(None) in get_args(kind):
        kind = get_args(kind)[0]     # str | None -> str
    if kind is bool:
        return bool, ("false", "true")
    return kind, get_args(kind)      # Literal["swiglu", "gelu"] -> ("swiglu", "gelu")


def clean_option(field, value):
    """Return an option's value as a plain str, int, float or bool. Raises ConfigError."""
    kind, words = allowed_values(field)
    if getattr(value, "ndim", None) == 0:
        value = value.item()         # a scalar of NumPy or torch
    if words:
        word = str(value).lower()
        check_choice(field.name, word, words)
        if kind is bool:
            return word == "true"
        return word
    if kind is float and type(value) is int:
        value = float(value)
    # A shell does not expand the ~ in --out_dir=~/runs, so expand it here. The prompt is left
    # alone, because it is text and not a path.
    if isinstance(value, (str, Path)) and field.name != "prompt":
        value = os.path.expanduser(value)
    if type(value) is not kind:
        raise ConfigError(f"{field.name}={value!r}: expected {kind.__name__}")
    return value


def clean_options(cls, options):
    """Check options against a dataclass, and return those that are not None as plain values.

    Raises ConfigError for an unknown name, a wrong type, and a value that is not allowed.
    """
    known = {field.name: field for field in fields(cls)}
    cleaned = {}
    for name, value in options.items():
        if name not in known:
            raise ConfigError(f"{name}: no such option{did_you_mean(name, known)}")
        if value is not None:
            cleaned[name] = clean_option(known[name], value)
    return cleaned


def read_comments(cls):
    """Return {option name: (heading, help text)} of a dataclass and the classes it inherits from.

    Both are read from the classes' source. The comment after an option is its help text. A
    comment line without a full stop, such as `    # Model`, is the heading of the options below it.
    """
    comments = {}
    # A class comes before those it inherits from, and its own comments win. The last is `object`.
    for owner in cls.__mro__[:-1]:
        heading = None
        for line in inspect.getsource(owner).splitlines():
            if title := re.match(r"    # (.*[^.])$", line):
                heading = title[1]
            # An option, such as `    n_layer: int = 4    # number of blocks`
            elif option := re.match(r"    (\w+): .+?(?:  # (.+))?$", line):
                comments.setdefault(option[1], (heading, option[2] or ""))
    return comments


def parse_options(argv, description, *classes, command="", leave_out=()):
    """Return the options that a command line sets, as a dict of plain values.

    The options are the fields of the dataclasses without those in `leave_out`; if two classes have
    a field of the same name, the first class wins. They are set by --name=value, --name value, or
    --name alone for true. --help prints the options and exits; `command` precedes
    "[--name=value ...]" in its usage line. Raises argparse.ArgumentError and ConfigError.
    """
    parser = argparse.ArgumentParser(
        usage=f"%(prog)s {command}[--name=value ...]", exit_on_error=False,
        # With python -OO there are no docstrings.
        description=inspect.cleandoc(description or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        epilog="[...] is an option's default. Where there is a --size, its preset, the arch's "
               "recipe or the benchmark may replace it. (...) says how a default is chosen.")
    options, groups = {}, {None: parser}
    for cls in classes:
        comments = read_comments(cls)
        for field in fields(cls):
            if field.name in leave_out or field.name in options:
                continue
            options[field.name] = field
            kind, words = allowed_values(field)
            if words:
                argument = dict(type=str.lower, choices=words)
            else:
                argument = dict(type=kind, metavar=kind.__name__)
            if "true" in words:
                argument |= dict(nargs="?", const="true")  # --name alone
            heading, about = comments[field.name]
            about = about.replace("%", "%%")
            if field.default is not None:
                about += f" [{field.default}]"
            if heading not in groups:
                groups[heading] = parser.add_argument_group(heading)
            groups[heading].add_argument(f"--{field.name}", help=about, **argument)

    parsed, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ConfigError(explain_unknown(unknown[0], options))
    return {name: clean_option(options[name], value) for name, value in vars(parsed).items()}


def explain_unknown(word, options):
    """Return a message of one line about a word on the command line that is not an option."""
    name = word.split("=")[0].lstrip("-")
    if word.startswith("-"):
        return f"{word}: no such option{did_you_mean(name, options)} (--help lists them)"
    example = "--name=value"
    if word.endswith(".py"):
        example += "; there are no configuration files"
    elif name in options:
        example = f"--{word}"
    elif "out_dir" in options:
        example = f"--out_dir={word}"
    elif "source" in options and "=" not in word:
        example = f"--source={word}"
    return f"{word}: no such option; options are written as {example}"


def run_script(main):
    """Call main with the command-line arguments.

    An error that the user can fix is printed as one line. Then the exit code is 2, or the
    exception's own (train.py's Diverged has 3).
    """
    # Whoever starts a script may have closed stdout or stderr, and a console may be unable to print
    # a character. Neither should stop the script.
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")  # a notebook's stdout lacks this method
    script = Path(sys.argv[0]).name
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        # In a notebook, %run runs the script in the kernel, which must not end.
        if hasattr(builtins, "get_ipython"):
            raise
        # Let the signal end this process, so that a shell's loop around this script ends, too.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
        # The first process of a container survives its own signals.
        sys.exit(130)  # a shell's exit code for SIGINT
    except BrokenPipeError:
        # `| head -1` has closed the pipe. Discard what is still buffered, or Python would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # a shell's exit code for SIGPIPE
    except (argparse.ArgumentError, ConfigError, DataError, OSError) as error:
        print(f"{script}: {error}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 2))
    except RuntimeError as error:
        # This is how torch says that a GPU's memory, or the main memory, is full.
        if "out of memory" not in str(error) and "can't allocate memory" not in str(error):
            raise
        print(f"{script}: out of memory; in train.py, a smaller --batch_size or "
              f"--checkpoint_blocks=true needs less ({str(error).splitlines()[0]:.200})",
              file=sys.stderr)
        sys.exit(2)


# ---- Files ---------------------------------------------------------------------------------------

@contextlib.contextmanager
def atomic_write(path):
    """Yield a binary file that gets its name only once it is whole and on the disk.

    If the file cannot be written, raise DataError, remove the temporary file, and leave an earlier
    file as it was.
    """
    temporary = Path(f"{path}.tmp")
    try:
        with explain_errors(f"{path}: cannot be written; is the disk full, or its folder "
                            "read-only?"):
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        # After a success this file is gone already. After an error, a second one in removing the
        # file must not hide the first.
        with contextlib.suppress(OSError):
            temporary.unlink()


def lock_folder(folder, message, wait=False):
    """Return a context manager that holds the lock of a folder.

    If another process has locked it, raise DataError with the message or, if `wait` is true, print
    the message and wait. If the folder cannot be locked, print a warning, and return a context
    manager that does nothing.
    """
    folder = Path(folder).resolve()
    check(folder.name, f"{folder}: choose a folder inside it")
    with explain_errors(f"{folder}: cannot be made"):
        folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_name(f".{folder.name}.lock")
    # On a file system without flock, filelock would by default take a file's existence as the lock.
    # That file stays when its process is killed, and keeps out the other machines forever.
    lock = FileLock(path, fallback_to_soft=False)
    # To lock the file, a process opens it for writing. Let other users of a shared folder do so.
    with contextlib.suppress(OSError):
        path.touch()
        path.chmod(0o666)
    try:
        return lock.acquire(blocking=False)
    except Timeout:
        if not wait:
            raise DataError(f"{folder}: {message}") from None
        print(f"{folder}: {message}", file=sys.stderr)
        return lock.acquire()
    except OSError as error:
        # Some file systems have no locks, and the parent folder may be read-only.
        print(f"{folder}: not locked ({error}); make sure that no other process writes there",
              file=sys.stderr)
        return contextlib.nullcontext()


def write_json(path, value):
    """Write a value as JSON, whole or not at all."""
    with atomic_write(path) as file:
        file.write(json.dumps(value, indent=2).encode())


def read_json(path):
    """Return what a JSON file holds. Raises DataError."""
    with explain_errors(f"{path}: expected a JSON file"):
        return json.loads(Path(path).read_bytes())


# ---- Tokenizers ----------------------------------------------------------------------------------

# Shards hold uint16, so only tokenizers with at most 65,536 tokens can be used.
TOKENIZERS = ("bytes", "gpt2", "r50k_base", "p50k_base", "p50k_edit")


def get_tokenizer(name):
    """Return the tiktoken.Encoding of that name.

    "bytes" has a token for each byte, and token 256, which stands between texts. Raises DataError.
    """
    if name == "bytes":
        # tiktoken asks for a pattern, and merges bytes only within each of its matches. This
        # tokenizer merges none, so any pattern that matches all of a text will do.
        return tiktoken.Encoding(name, pat_str="(?s).{1,64}", special_tokens={"<|endoftext|>": 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    with explain_errors(f"tokenizer={name}: unknown, or it cannot be downloaded; if tiktoken has "
                        "stored it in a folder, set TIKTOKEN_CACHE_DIR to that folder"):
        return tiktoken.get_encoding(name)


def encode(tokenizer, data, new=True):
    """Return UTF-8 text as uint16 tokens (n,).

    If the text begins a document (new=True), an end-of-text token comes first. The words
    "<|endoftext|>" in the text are encoded as ordinary text.
    """
    tokens = tokenizer.encode_to_numpy(data.decode(), disallowed_special=()).astype(np.uint16)
    return np.insert(tokens, 0, tokenizer.eot_token) if new else tokens


def token_lengths(meta):
    """Return the number of text bytes of each token, (vocab_size,). End-of-text has 0.

    meta.json has them, so that training needs no tokenizer. If it does not have them yet, they are
    computed.
    """
    if "token_bytes" in meta:
        return np.frombuffer(bytes.fromhex(meta["token_bytes"]), np.uint8)
    tokenizer = get_tokenizer(meta["tokenizer"])
    lengths = [len(tokenizer.decode_single_token_bytes(i)) for i in range(tokenizer.n_vocab)]
    lengths[tokenizer.eot_token] = 0
    return np.array(lengths, np.uint8)


# ---- Shards: llm.c's format ----------------------------------------------------------------------

MAGIC, VERSION = 20240520, 1
HEADER = 256  # int32 numbers before the tokens


def write_shard(path, tokens):
    """Write uint16 tokens (n,) as a shard, whole or not at all."""
    header = np.zeros(HEADER, "<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    with atomic_write(path) as file:
        file.write(header)
        file.write(np.ascontiguousarray(tokens, "<u2"))


def read_shard(path):
    """Return the tokens of a shard, a read-only np.memmap (n,) of uint16. Raises DataError."""
    header = np.fromfile(path, "<i4", count=3).tolist()
    # If the file was cut in the middle of a token, this ends in .5, and the check fails.
    count = (os.path.getsize(path) - 4 * HEADER) / 2
    check(header == [MAGIC, VERSION, count], f"{path}: not a whole shard in llm.c's format")
    return np.memmap(path, "<u2", mode="r", offset=4 * HEADER)


def read_meta(folder):
    """Return a dataset's meta.json, which only a complete dataset has. Raises DataError."""
    path = Path(folder, "meta.json")
    source, hint = "...", ""
    # A user may give --data a shard of a dataset, or a text file that is not a dataset yet.
    if Path(folder).is_file():
        source = folder
        check(not Path(folder).with_name("meta.json").exists(),
              f"data={folder}: expected the dataset's folder, {Path(folder).parent}")
    if Path("data", folder, "meta.json").exists():
        hint = f"; did you mean data/{folder}?"
    check(path.exists(), f"data={folder}: no complete dataset; python prepare.py --source={source} "
          f"makes one{hint}")
    return read_json(path)


# ---- Options of this script ----------------------------------------------------------------------

# FineWeb as GPT-2's tokens, made by kjj0 on huggingface.co: name -> number of 100M-token shards
PRETOKENIZED = {"fineweb10B-gpt2": 103, "fineweb100B-gpt2": 1030}
FINEWEB = ("fineweb", *PRETOKENIZED)


@dataclass
class PrepareConfig:
    """Options of prepare.py."""
    source: str = "stdlib"             # stdlib, fineweb, fineweb10B-gpt2, a file, folder or glob
    name: str | None = None            # name of the dataset (derived from the source)
    data_dir: str = "data"             # folder of all datasets
    tokenizer: str | None = None       # bytes, gpt2, r50k_base, ... (bytes; gpt2 for FineWeb)
    subset: str = "sample-10BT"        # the subset that --source=fineweb streams
    tokens: int | None = None          # limit on the training tokens (no limit)
    val_tokens: int | None = None      # limit on the validation tokens (5% of all, at most 10M)
    shard_tokens: int = 100_000_000    # tokens per training shard
    seed: int = 1337                   # seed that shuffles the files

    def __post_init__(self):
        check_at_least(1, self, "tokens", "val_tokens", "shard_tokens")
        if not self.source:
            raise ConfigError("source=: expected stdlib, fineweb, a file, a folder or a glob")
        # The default name of --source="books/*.txt" is books.
        stem = Path(self.source.split("*")[0]).stem
        self.name = self.name or stem.strip(".") or "text"
        if Path(self.name).name != self.name or self.name == "..":
            raise ConfigError(f"name={self.name}: expected a name, not a path; --data_dir sets "
                              "where the folder goes")
        self.tokenizer = self.tokenizer or ("gpt2" if self.source in FINEWEB else "bytes")
        check_choice("tokenizer", self.tokenizer,
                     ("gpt2",) if self.source in PRETOKENIZED else TOKENIZERS)


# ---- Sources: files ------------------------------------------------------------------------------

# Chunks have at most about this many bytes, because tiktoken fails on a million spaces if a word
# follows them.
CHUNK_BYTES = 900_000
SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
NOT_TEXT = ("{}: not UTF-8 text at byte {:,}; unpack it if it is compressed (gunzip, unzip, "
            "unzstd), else convert it (for example iconv -f UTF-16 -t UTF-8, or -f LATIN1); files "
            "of tokens, such as .bin, cannot be a source")


def find_files(source, seed):
    """Return a source's local files, shuffled by the seed. Files with equal contents count once.

    Raises DataError if there is no such file, or no text in it.
    """
    location = Path(source)
    suffixes = None  # any suffix
    if source == "stdlib":
        # Leave the test folders out, which some installations do not have.
        location = Path(os.__file__).parent
        left_out = {"site-packages", "dist-packages", "test", "tests"}
        candidates = [path for path in location.rglob("*.py")
                      if left_out.isdisjoint(path.relative_to(location).parts)]
    elif location.is_dir():
        candidates = location.rglob("*")
        suffixes = SUFFIXES
    elif location.is_file():
        candidates = [location]
    else:
        # glob.glob would follow links in circles. Path.glob wants a relative pattern, so search
        # from the anchor, which is empty for a relative path. For an absolute one it is "/", or on
        # Windows "C:\", which the user may have typed as "C:/". So cut off as many characters,
        # and then further slashes, as in ///home or C:\\texts.
        pattern = source[len(location.anchor):].lstrip("/" + os.sep)
        if location.name == "**":
            pattern += "/*"  # before Python 3.13, ** alone finds folders only
        with explain_errors(f"--source={source}: not a valid glob pattern"):
            candidates = list(Path(location.anchor).glob(pattern))
        check(candidates, f"--source={source}: does not exist; expected a file, a folder, a glob, "
              f"or one of stdlib, {', '.join(FINEWEB)}{did_you_mean(source, FINEWEB)}")

    by_hash = {}
    n_skipped = 0
    for path in sorted(candidates):
        # Skip hidden files and folders, such as .ipynb_checkpoints, unless the source names them.
        if any(name.startswith(".") and name not in location.parts for name in path.parts):
            continue
        if path.is_dir():
            # rglob() does not follow a link to a folder, which may lead in circles, and it says
            # nothing of a folder that it cannot read.
            if path.is_symlink() or not os.access(path, os.R_OK | os.X_OK):
                print(f"{path}: skipped, because this folder is a link or cannot be read")
        elif not path.is_file() or path.stat().st_size == 0:
            continue
        elif suffixes and path.suffix.lower() not in suffixes:
            n_skipped += 1
        else:
            with path.open("rb") as file:
                by_hash[hashlib.file_digest(file, "sha256").digest()] = path
    if n_skipped:
        print(f"{source}: {n_skipped} files skipped that are not {', '.join(SUFFIXES)}")
    check(by_hash, f"--source={source}: no text in it; in a folder, only {', '.join(SUFFIXES)} "
          "files are read, but a glob may name others (unpack compressed files first)")
    paths = sorted(by_hash.values())
    random.Random(seed).shuffle(paths)
    return paths


def read_rows(file, suffix):
    """Yield the `text` of each row of a .jsonl or .parquet file, and "" for an empty line."""
    # The datasets library is not used, because it reads the text "2024-01-01" in JSON as a date.
    if suffix == ".jsonl":
        for line in file:
            # Decode the line first: given bytes, json.loads() would let through halves of
            # characters, which UTF-8 does not allow.
            if line.strip():
                yield json.loads(line.decode("utf-8-sig"))["text"]
            else:
                yield ""
    else:
        from pyarrow.parquet import ParquetFile
        for batch in ParquetFile(file).iter_batches(1000, columns=["text"]):
            yield from batch["text"].to_pylist()


def open_documents(path):
    """Yield each document of a file as a binary file: a row's text, or the whole file.

    Raises DataError if a row has no string `text`, or if the file looks like UTF-16 or compressed
    data.
    """
    suffix = path.suffix.lower()
    with path.open("rb") as file:
        if suffix != ".parquet":
            # UTF-16 text and compressed files have zero bytes, which are valid UTF-8 as well.
            zero = file.read(1000).find(0)
            check(zero < 0, NOT_TEXT.format(path, zero))
            file.seek(0)
            if suffix != ".jsonl":
                yield file
                return
        row = 1
        try:
            for text in read_rows(file, suffix):
                # JSON may hold halves of characters, such as "\ud800", which UTF-8 cannot express.
                # They become question marks.
                yield io.BytesIO(text.encode(errors="replace"))
                row += 1
        except Exception as error:
            # The message names the row, which is known only now.
            with explain_errors(f"{path}, row {row}: expected a string `text` in every row"):
                raise error


def cut(document, longest, path):
    """Yield a document in chunks of up to about `longest` bytes.

    All but the last have at least about half of that. Each chunk ends at a line break if possible.
    No character is cut. A byte-order mark is dropped. Raises DataError if the document is not
    UTF-8.
    """
    # If a chunk ends within a character, the decoder keeps the first bytes for the next chunk.
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    half = max(1, longest // 2)
    try:
        # readline() adds the rest of the line, but at most `half` bytes.
        while chunk := document.read(half) + document.readline(half):
            yield decoder.decode(chunk).encode()
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        # error.object is what the decoder was working on. It ends where the document was read to.
        offset = document.tell() - len(error.object) + error.start
        raise DataError(NOT_TEXT.format(path, offset)) from error


def read_files(paths, total):
    """Yield (chunk, whether it begins a document, its number from 1 on) for every chunk.

    Raises DataError if a file is not text.

    The validation shard takes whole chunks until it has 5% of the total bytes (write_shards). No
    chunk has more than about 5% of them, so the shard ends below 10%. A document with more than 5%
    is cut into chunks of at most 0.5%, and the shard ends close to 5%.
    """
    number = 0
    for path in paths:
        for document in open_documents(path):
            n_bytes = document.seek(0, os.SEEK_END)
            document.seek(0)
            longest = total // 20       # 5% of the total
            if n_bytes > longest:
                longest = total // 200  # 0.5%
            for i, chunk in enumerate(cut(document, min(longest, CHUNK_BYTES), path)):
                number += 1
                yield chunk, i == 0, number


# ---- Sources: FineWeb ----------------------------------------------------------------------------

def stream_fineweb(subset, place):
    """Yield (chunk, whether it begins a document, place) for every chunk after `place`.

    `place` is the state of the stream before a row, and how many of the row's chunks have been
    read. Raises DataError if the stream fails.
    """
    import datasets
    state, n_done = place or (None, 0)
    with explain_errors("fineweb: failed; the same command resumes from the last whole shard"):
        rows = datasets.load_dataset("HuggingFaceFW/fineweb", name=subset, split="train",
                                     streaming=True)
        if state:
            rows.load_state_dict(state)
        for row in rows:
            document = io.BytesIO(row["text"].encode())
            chunks = cut(document, CHUNK_BYTES, "fineweb")
            for number, chunk in enumerate(chunks, 1):
                if number > n_done:
                    yield chunk, number == 1, [state, number]
            state, n_done = rows.state_dict(), 0


def fetch_shards(folder, options):
    """Download FineWeb's tokens, as many shards as --tokens asks for. Raises DataError."""
    import huggingface_hub
    n_shards = PRETOKENIZED[options.source]
    if options.tokens:
        n_shards = min(n_shards, math.ceil(options.tokens / 100_000_000))
    names = [f"fineweb_train_{number:06d}.bin" for number in range(1, n_shards + 1)]
    names.append("fineweb_val_000000.bin")
    failed = f"{options.source}: the download is incomplete; the same command resumes"
    with explain_errors(failed):
        huggingface_hub.snapshot_download(f"kjj0/{options.source}", repo_type="dataset",
                                          local_dir=folder, allow_patterns=names)
    # Without a network, snapshot_download may return without the files, so check each of them.
    for name in names:
        check((folder / name).exists(), f"{failed} ({name} could not be downloaded)")


# ---- Writing -------------------------------------------------------------------------------------

PROGRESS = "progress.json"  # an unfinished dataset's sources and settings, and where to resume


def dataset_settings(options, paths):
    """Return a dataset's sources and settings, as meta.json keeps them."""
    settings = asdict(options)
    del settings["data_dir"]
    if paths:
        stats = [path.stat() for path in paths]
        last_change = time.gmtime(max(stat.st_mtime for stat in stats))
        newest = time.strftime("%Y-%m-%d %H:%M:%S", last_change)
        n_bytes = sum(stat.st_size for stat in stats)
        settings["files"] = f"{len(paths)} with {n_bytes:,} bytes, the newest of {newest} UTC"
    return settings


def shard_path(folder, number):
    """Return the path of a shard. Shard 0 is for validation, and the others are for training."""
    split = "val" if number == 0 else "train"
    return folder / f"{folder.name}_{split}_{number:06d}.bin"


def load_progress(folder, settings, paths=()):
    """Return what progress.json says about an unfinished dataset, or None if it is complete.

    Without training shards a new dataset begins: write and return its progress.json. Raises
    DataError if the folder holds training shards that a new dataset would overwrite.
    """
    has_shards = any(folder.glob("*_train_??????.bin"))
    # Renamed files may be shuffled differently, and an unfinished dataset would then resume at
    # another place. So progress.json has a hash of their names in order.
    hash_of_names = hashlib.sha256(repr(paths).encode()).hexdigest()
    for path in (folder / "meta.json", folder / PROGRESS):
        if not path.exists():
            continue
        # A file of another program must not be replaced, so read it even if a new dataset begins.
        with explain_errors(f"{path}: not written by prepare.py"):
            saved = read_json(path)
            earlier = dict(saved["options"])
        if has_shards:
            other = [f"{name}={earlier.get(name)}, now {value}" for name, value in settings.items()
                     if earlier.get(name) != value]
            # meta.json does not have the hash.
            if saved.get("names", hash_of_names) != hash_of_names:
                other.append("other file names")
            check(not other, f"{folder}: made with {'; '.join(other)}; go back to the earlier "
                  "settings and files, give another --name, or remove the folder")
            if path.name == "meta.json":
                return None
            # Are the shards that progress.json counts still there?
            for number in range(saved["shards"]):
                check(shard_path(folder, number).exists(), f"{folder}: a shard is missing; give "
                      "another --name, or remove the folder")
            return saved
    check(not has_shards, f"{folder}: holds unknown shards, without a meta.json; give another "
          "--name, or remove the folder")
    # Begin a new dataset. If the shards of an earlier one were deleted, its meta.json is still here
    # and would call the new one complete.
    (folder / "meta.json").unlink(missing_ok=True)
    # `place` is where to go on reading the sources. None is the beginning.
    progress = {"options": settings, "names": hash_of_names, "shards": 0, "tokens": 0,
                "place": None, "left_over": ""}
    write_json(folder / PROGRESS, progress)
    return progress


def encode_chunks(tokenizer, chunks):
    """Encode chunks on all cores, and yield (tokens, number of bytes, place) of each in order."""
    def encode_chunk(chunk):
        data, begins, place = chunk
        return encode(tokenizer, data, begins), len(data), place

    # Threads are enough, because tiktoken releases the GIL. Give pool.map() 32 chunks at a time: it
    # reads all of its input before it yields anything, and FineWeb does not fit into memory.
    with ThreadPoolExecutor() as pool:
        while batch := list(itertools.islice(chunks, 32)):
            yield from pool.map(encode_chunk, batch)


def write_shards(folder, options, tokenizer, paths, progress):
    """Write the shards that are missing, the validation shard first. Raises DataError.

    The validation shard ends after val_tokens. Without that option it ends after the chunk that
    reaches 5% of the text, after 5% of --tokens, or after 10M tokens, whichever comes first.
    Training shards have shard_tokens each, and the last one may be shorter.
    """
    n_train = options.tokens or sys.maxsize
    val_tokens = options.val_tokens or min(10_000_000, max(1, n_train // 20))
    val_bytes = math.inf
    if paths:
        # A first pass counts the bytes, and finds text that is not UTF-8 before any shard is
        # written. The total, which limits the chunks, is not known yet. Any large number will do
        # here, because the sum does not depend on where the documents are cut.
        total = sum(len(chunk) for chunk, _, _ in read_files(paths, sys.maxsize))
        # Skip the chunks that have been read.
        chunks = itertools.islice(read_files(paths, total), progress["place"], None)
        if not options.val_tokens:
            val_bytes = total / 20
    else:
        chunks = stream_fineweb(options.subset, progress["place"])
    encoded = encode_chunks(tokenizer, chunks)
    # These tokens have been read, but are not in a shard yet. ("H" is uint16. Unlike a NumPy array,
    # this one can grow.)
    waiting = array("H", bytes.fromhex(progress["left_over"]))
    # disable=None shows the bar only if stderr is a terminal.
    bar = tqdm(unit=" tokens", unit_scale=True, disable=None)

    # progress["tokens"] counts the training tokens only.
    while progress["tokens"] < n_train:
        # Plan the next shard. The first one is for validation.
        is_val = progress["shards"] == 0
        n_left = n_train - progress["tokens"]
        n_wanted = val_tokens if is_val else min(options.shard_tokens, n_left)

        # Add encoded text until there is enough for the shard.
        n_bytes = 0
        while len(waiting) < n_wanted and not (is_val and n_bytes >= val_bytes):
            chunk = next(encoded, None)
            if chunk is None:
                break
            tokens, chunk_bytes, place = chunk
            progress["place"] = place
            waiting.frombytes(tokens.tobytes())
            n_bytes += chunk_bytes
            bar.update(len(tokens))
        if not waiting:
            break
        shard = waiting[:n_wanted]
        del waiting[:n_wanted]

        # Write the shard, and then save where to resume.
        write_shard(shard_path(folder, progress["shards"]), shard)
        progress["shards"] += 1
        if not is_val:
            progress["tokens"] += len(shard)
        progress["left_over"] = waiting.tobytes().hex()
        write_json(folder / PROGRESS, progress)
    check(progress["tokens"], f"{options.source}: nothing is left to train on; give more text, or "
          "a smaller --val_tokens")


def write_meta(folder, settings):
    """Write meta.json (the dataset's properties, sources and settings); delete progress.json."""
    meta = {"tokenizer": settings["tokenizer"], "source": settings["source"], "options": settings,
            "versions": {"python": sys.version}}
    lengths = token_lengths(meta)
    meta["vocab_size"] = len(lengths)
    meta["token_bytes"] = lengths.tobytes().hex()
    fingerprint = hashlib.sha256()
    for split in ("val", "train"):
        n_tokens = n_bytes = 0
        for path in sorted(folder.glob(f"*_{split}_??????.bin")):
            tokens = read_shard(path)
            fingerprint.update(tokens)
            n_tokens += len(tokens)
            n_bytes += int(lengths[tokens].sum())
        meta[f"{split}_tokens"] = n_tokens
        meta[f"{split}_bytes"] = n_bytes
    meta["fingerprint"] = fingerprint.hexdigest()
    write_json(folder / "meta.json", meta)
    (folder / PROGRESS).unlink()


# ---- The command ---------------------------------------------------------------------------------

def prepare(source="stdlib", **options):
    """Make a dataset, or finish one that was stopped, and return its folder.

    The keyword arguments are the command-line options. Raises ConfigError and DataError.
    """
    options = PrepareConfig(**clean_options(PrepareConfig, {"source": source, **options}))
    folder = Path(options.data_dir, options.name)
    tokenizer = get_tokenizer(options.tokenizer)
    paths = [] if options.source in FINEWEB else find_files(options.source, options.seed)
    target = folder.resolve()
    if any(target in path.resolve().parents for path in paths):
        print(f"{folder}: the dataset goes into the folder of its source; whoever removes this "
              "folder removes the texts, too")
    settings = dataset_settings(options, paths)
    with lock_folder(folder, "another prepare.py is at work here; waiting for it", wait=True):
        folder.mkdir(exist_ok=True)  # lock_folder has made its parent
        progress = load_progress(folder, settings, paths)
        if progress:
            if options.source in PRETOKENIZED:
                fetch_shards(folder, options)
            else:
                write_shards(folder, options, tokenizer, paths, progress)
            write_meta(folder, settings)

    meta = read_meta(folder)
    n_train, n_val = meta["train_tokens"], meta["val_tokens"]
    print(f"{folder}: {n_train:,} tokens to train on, {n_val:,} to validate on")
    if min(n_train, n_val) <= GPTConfig.block_size:
        print(f"{folder}: too few to train with --block_size={GPTConfig.block_size}; remove the "
              "folder and give more text, a larger --val_tokens or (if set) a larger --tokens, or "
              "set a smaller --block_size for train.py")
    return folder


if __name__ == "__main__":
    run_script(lambda words: prepare(**parse_options(words, __doc__, PrepareConfig)))

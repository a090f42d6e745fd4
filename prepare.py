"""Turn text into shards of tokens. All scripts import the options, errors and files helpers below.

    python prepare.py                                             # Python's standard library
    python prepare.py --source="books/*.txt" --tokenizer=gpt2     # your .txt, .jsonl or .parquet
    python prepare.py --source=fineweb --tokens=1_000_000_000     # FineWeb, streamed
    python prepare.py --source=fineweb10B-gpt2 --tokens=1_000_000_000    # tokenized by others

A dataset is a folder data/<name>/ of shards in llm.c's format, <name>_val_000000.bin to validate
on, <name>_train_000001.bin and so on to train on, and, written last, meta.json. The same command
resumes a preparation that was stopped.
"""
import argparse
import contextlib
import difflib
import glob
import inspect
import json
import math
import os
import random
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import get_args

import numpy as np
import tiktoken
from filelock import FileLock, Timeout
from tqdm import tqdm

from model import ConfigError


# ---- Errors and checks (all scripts use them) ----------------------------------------------------

class DataError(Exception):
    """An error in files or in what they hold, told in one line."""


def check(condition, message):
    """Raise DataError unless the condition holds."""
    if not condition:
        raise DataError(message)


@contextlib.contextmanager
def explain_errors(message):
    """Turn whatever exception a library raises into a DataError of one line."""
    try:
        yield
    except (DataError, ConfigError):
        raise
    except Exception as error:
        words = " ".join(str(error).split())
        raise DataError(f"{message} ({type(error).__name__}: {words:.200})") from error


# What users of nanoGPT type
NANOGPT_NAMES = {
    "lr": "learning_rate",
    "min_lr": "min_lr_ratio",
    "max_iters": "max_steps",
    "warmup_iters": "warmup_ratio",
    "eval_iters": "eval_tokens",
    "gradient_accumulation_steps": "total_batch_size",
    "dataset": "data",
    "start": "prompt",
}


def did_you_mean(word, names):
    """Return the name that a mistyped word most likely means as the end of a sentence, or ""."""
    word = str(word).lower()
    similar = difflib.get_close_matches(word, names)
    if NANOGPT_NAMES.get(word) in names:
        similar = [NANOGPT_NAMES[word]]
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
            raise ConfigError(f"{name}={value}: expected at least {minimum}")


# ---- Options (all scripts use them) --------------------------------------------------------------

PATH_OPTIONS = ("arch", "data", "data_dir", "file", "init_from", "out_dir", "results", "source")


def option_kinds(field):
    """Return the types that a dataclass field allows, or the strings if it is a Literal."""
    kinds = get_args(field.type) or (field.type,)        # (str, NoneType), (bool,), ("auto", "cpu")
    return get_args(kinds[0]) or kinds                   # Literal["a", "b"] | None -> ("a", "b")


def clean_option(field, value):
    """Return an option's value as a plain str, int, float or bool. Raises ConfigError."""
    name, kinds = field.name, option_kinds(field)
    if getattr(value, "ndim", None) == 0:                # a scalar of NumPy or torch
        value = value.item()
    elif isinstance(value, Path):
        value = str(value)

    if isinstance(kinds[0], str):
        if isinstance(value, bool):
            value = str(value).lower()
        check_choice(name, value, kinds)
        return value
    if kinds[0] is float and type(value) is int:
        value = float(value)
    if type(value) not in kinds:
        raise ConfigError(f"{name}={value!r}: expected {kinds[0].__name__}")

    # A shell leaves the ~ of --out_dir=~/runs as it is. Several folders have commas between them.
    if name in PATH_OPTIONS:
        value = ",".join(map(os.path.expanduser, value.split(",")))
    return value


def clean_options(cls, options):
    """Return the options that are not None, checked against a dataclass and made plain values.

    Raises ConfigError for an unknown name, a wrong type, and a value that a Literal lacks.
    """
    known = {field.name: field for field in fields(cls)}
    for name in options:
        if name not in known:
            raise ConfigError(f"{name}: no such option{did_you_mean(name, known)}")
    return {name: clean_option(known[name], value) for name, value in options.items()
            if value is not None}


def true_or_false(word):
    """Return the bool that a word on the command line stands for."""
    if word.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{word}: expected true or false")
    return word.lower() == "true"


def read_comments(classes):
    """Return two dicts, name of option -> its help and -> its heading, from dataclasses' source.

    The comment behind an option is its help. A comment line above it, as `    # Model`, begins a
    group of options; it has no full stop, unlike a sentence that explains something.
    """
    helps, headings = {}, {}
    for cls in classes:
        heading = None
        for line in inspect.getsource(cls).splitlines():
            if title := re.match(r"    # (.*[^.])$", line):
                heading = title[1]
            elif option := re.match(r"    (\w+): .+?  # (.+)$", line):
                helps[option[1]] = option[2]
                headings[option[1]] = heading
    return helps, headings


def parse_options(argv, description, *classes):
    """Return the options that a command line sets, as a dict of plain values.

    The options are the fields of the dataclasses; where two have the same name the first one's is
    meant. They are set by --name=value, --name value, or --name alone for true. --help prints them
    and exits. Raises argparse.ArgumentError and ConfigError.
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--name=value ...]", description=description, exit_on_error=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        argument_default=argparse.SUPPRESS)
    options, owners = {}, []
    for cls in reversed(classes):
        options |= {field.name: field for field in fields(cls)}
        owners += cls.__mro__[-2::-1]                    # what a subclass says comes last
    helps, headings = read_comments(owners)

    groups = {None: parser}
    for name, field in options.items():
        kinds = option_kinds(field)
        is_switch = kinds[0] is bool or "true" in kinds
        if isinstance(kinds[0], str):
            argument = dict(choices=kinds, type=str.lower)
        else:
            argument = dict(type=true_or_false if is_switch else kinds[0],
                            metavar=kinds[0].__name__)
        if is_switch:
            argument |= dict(nargs="?", const="true")    # --name alone
        about = helps.get(name, "").replace("%", "%%")
        if field.default is not None:
            about += f" [{field.default}]"
        heading = headings.get(name)
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        groups[heading].add_argument(f"--{name}", help=about, **argument)

    parsed, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ConfigError(explain_unknown(unknown[0], options))
    return {name: clean_option(options[name], value) for name, value in vars(parsed).items()}


def explain_unknown(word, options):
    """Return one line about a word on the command line that is no option."""
    name, equals, _ = word.lstrip("-").partition("=")
    if word.startswith("-"):
        return f"{word}: no such option{did_you_mean(name, options)}; --help lists them"
    message = f"{word}: no such option; options are written --name=value"
    if word.endswith(".py"):
        return f"{message}, there are no configuration files"
    if name in options and equals:
        return f"{message}, as in --{word}"
    for name in ("out_dir", "source"):
        if name in options:
            return f"{message}, as in --{name}={word}"
    return message


def run_script(main):
    """Call main with the words of the command line.

    An error that the user can mend becomes one line; the exit code is 2 or the exception's own.
    """
    # A cron job may close a stream, and a console may lack a character: neither ends a script.
    # (stderr writes characters that it lacks as \u.... by itself.)
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    sys.stdout.reconfigure(errors="replace")
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        # Die of the signal, so that a shell's loop around this script ends, too.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    except BrokenPipeError:
        # `| head -1` wants no more. What is still buffered goes nowhere, or Python would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)                                    # as a shell counts SIGPIPE
    except (argparse.ArgumentError, ConfigError, DataError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 2))


# ---- Files (all scripts use them) ----------------------------------------------------------------

@contextlib.contextmanager
def atomic_write(path):
    """Yield a binary file that gets its name only once it is whole and on the disk.

    If that fails, raise DataError, remove the temporary file, and leave an earlier file as it was.
    """
    temporary = Path(f"{path}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        # When the disk is full, torch.save ends in a RuntimeError about positions in the file. The
        # OSError that it came from says more.
        while error.__context__ and not isinstance(error, OSError):
            error = error.__context__
        raise DataError(f"{path}: cannot be written ({error})") from error
    finally:
        temporary.unlink(missing_ok=True)


def lock_folder(folder, message, wait=False):
    """Lock a folder until the `with` ends.

    If another process has locked it, wait for that process or raise DataError with the message.
    """
    folder = Path(folder).resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        return lock.acquire(blocking=False)
    except Timeout:
        check(wait, f"{folder}: {message}")
        print(f"{folder}: {message}", file=sys.stderr)
        return lock.acquire()
    except OSError as error:
        # Some file systems have no locks, and the parent folder may be read-only.
        print(f"{folder}: not locked ({error}), so let no other process write there",
              file=sys.stderr)
        return contextlib.nullcontext()


def write_json(path, value):
    """Write a value as JSON, whole or not at all."""
    with atomic_write(path) as file:
        file.write(json.dumps(value, indent=2).encode())


def read_json(path):
    """Return what a JSON file holds. Raises DataError."""
    with explain_errors(f"{path}: expected a JSON object, made by prepare.py"):
        return json.loads(Path(path).read_bytes())


# ---- Shards ----

MAGIC, VERSION = 20240520, 1
HEADER = 256                         # int32 numbers before the tokens
BEGUN = "begun.json"                 # what a corpus is made of and with, and how far it has come
TOKENIZERS = "bytes", "gpt2", "r50k_base", "p50k_base", "p50k_edit"  # those that fit in uint16

def get_tokenizer(name):
    """The tiktoken.Encoding of that name; "bytes": a token for each byte, end-of-text = 256."""
    if name == "bytes":  # nothing is ever merged, so the pattern only sets the speed
        return tiktoken.Encoding(name, pat_str="(?s).{1,64}", special_tokens={"<|endoftext|>": 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    with explain_errors(f"tokenizer={name}: unknown, or not to download; TIKTOKEN_CACHE_DIR may hold it"):
        return tiktoken.get_encoding(name)

def encode(tokenizer, data, new=True):
    """Text as uint16 tokens (n,), if `new` after an end-of-text; "<|endoftext|>" in it is text."""
    if tokenizer.name == "bytes":
        tokens = np.frombuffer(data, np.uint8)
    else:
        tokens = tokenizer.encode_to_numpy(data.decode(errors="replace"), disallowed_special=())
    tokens = tokens.astype(np.uint16)
    return np.insert(tokens, 0, tokenizer.eot_token) if new else tokens

def write_shard(path, tokens):
    header = np.zeros(HEADER, "<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    with atomic_write(path) as file:
        file.write(header)
        file.write(np.ascontiguousarray(tokens, "<u2"))

def read_shard(path):
    """The tokens of a whole shard, a read-only np.memmap (n,) of uint16. Raises DataError."""
    header = np.fromfile(path, "<i4", count=3).tolist()
    count = (os.path.getsize(path) - 4 * HEADER) / 2
    check(header == [MAGIC, VERSION, count], f"{path}: no whole shard of tokens, as llm.c has it")
    return np.memmap(path, "<u2", mode="r", offset=4 * HEADER)

def read_meta(folder):
    """meta.json, which a whole corpus has. Raises DataError."""
    path = Path(folder, "meta.json")
    check(path.exists(), f"data={folder}: no full corpus; python prepare.py --source=... makes it")
    return read_json(path)

def token_lengths(meta):
    """(vocab_size,) bytes of each token's text, from meta or its tokenizer; 0 for end-of-text."""
    if "token_bytes" in meta:
        return np.frombuffer(bytes.fromhex(meta["token_bytes"]), np.uint8)
    tokenizer = get_tokenizer(meta["tokenizer"])
    lengths = [len(tokenizer.decode_single_token_bytes(i)) for i in range(tokenizer.n_vocab)]
    lengths[tokenizer.eot_token] = 0
    return np.array(lengths, np.uint8)

PIECE = 900_000                      # bytes encoded at a time; tiktoken can't take 1M spaces
STREAMED = "fineweb", "fineweb10B-gpt2"
KINDS = ".txt", ".jsonl", ".parquet"

@dataclass
class PrepareConfig:
    source: str = "stdlib"             # stdlib, fineweb, fineweb10B-gpt2, a file, folder or glob
    name: str | None = None            # of the corpus (from the source)
    data_dir: str = "data"             # folder of all corpora
    tokenizer: str | None = None       # bytes, gpt2, or another of tiktoken's (fineweb: gpt2)
    subset: str = "sample-10BT"        # of fineweb
    tokens: int | None = None          # stop after that many to train on (all)
    val_tokens: int | None = None      # hold out at most that many (5% of the text, 10M)
    shard_tokens: int = 100_000_000    # in a file, about
    seed: int = 1337                   # of the order of files

    def __post_init__(self):
        check_at_least(1, self, "tokens", "val_tokens", "shard_tokens")
        self.name = self.name or Path(self.source.split("*")[0]).stem.strip(".") or "text"
        self.tokenizer = self.tokenizer or ("gpt2" if self.source in STREAMED else "bytes")
        check_choice("tokenizer", self.tokenizer,
               ["gpt2"] if self.source == "fineweb10B-gpt2" else TOKENIZERS)

def source_files(source, seed):
    """The files of a source on this machine, in a seeded order."""
    if source == "stdlib":  # without test folders, which some installations lack
        root = Path(os.__file__).parent
        left_out = {"site-packages", "dist-packages", "test", "tests"}
        by_text = {path.read_bytes(): path for path in sorted(root.rglob("*.py"))
                   if left_out.isdisjoint(path.relative_to(root).parts)}
        found = by_text.values()  # each text once
    else:
        matching = map(Path, glob.glob(source, recursive=True))
        found = [path for path in (Path(source), *Path(source).rglob("*"), *matching)
                 if path.suffix.lower() in KINDS or path == Path(source)]
    paths = sorted({path for path in found if path.is_file() and path.stat().st_size})
    check(paths, f"--source={source}: no .txt, .jsonl, .parquet with text, nor stdlib or fineweb")
    random.Random(seed).shuffle(paths)
    return paths

def read_texts(path):
    """Texts of a .jsonl or .parquet file. Not by `datasets`: it takes 2024-01-01 for a date."""
    if path.suffix.lower() == ".jsonl":
        for line in filter(bytes.strip, path.open("rb")):
            yield json.loads(line)["text"]
    else:
        from pyarrow.parquet import ParquetFile
        for batch in ParquetFile(path).iter_batches(1000, columns=["text"]):
            yield from batch["text"].to_pylist()

def read_files(paths):
    """Yields (bytes, begins a document?): a row, or lines; these are at most a 20th of the text."""
    half = min(PIECE, sum(path.stat().st_size for path in paths) // 20) // 2 or 1
    for path in paths:
        if path.suffix.lower() in (".jsonl", ".parquet"):
            with explain_errors(f"{path}: expected rows with a string `text`"):
                for text in read_texts(path):
                    yield text.encode(errors="replace"), True
        else:
            with path.open("rb") as file:
                while data := file.read(half) + file.readline(half):
                    yield data, file.tell() == len(data)

def read_source(options, paths, place):
    """Yields (bytes, begins a document?, place to go on from behind it), from a place on."""
    if paths:
        for number, piece in enumerate(read_files(paths), 1):
            if number > place:
                yield *piece, number
        return
    import datasets
    with explain_errors(f"{options.source}: failed; the same command goes on from the last whole shard"):
        rows = datasets.load_dataset("HuggingFaceFW/fineweb", name=options.subset, split="train",
                                     streaming=True)
        if place:
            rows.load_state_dict(place)
        for row in rows:
            yield row["text"].encode(), True, rows.state_dict()

def write_shards(folder, options, tokenizer, paths, begun):
    """Writes the missing shards, first the held-out one. Bytes end a shard, tokens the last one."""
    per_token = 1 if options.tokenizer == "bytes" else 5  # bytes: more than most have
    val_tokens = options.val_tokens or 10_000_000
    held_out = val_tokens * per_token
    if paths and not options.val_tokens:
        held_out = min(held_out, sum(len(data) for data, _ in read_files(paths)) / 20)
    pieces = iter(tqdm(read_source(options, paths, begun["place"]), disable=None))
    with ThreadPoolExecutor() as pool:
        while (left := (options.tokens or sys.maxsize) - begun["tokens"]) > 0:
            split, most, n_bytes = "val", val_tokens, held_out
            if begun["shards"]:
                split, most, n_bytes = "train", left, per_token * min(left, options.shard_tokens)
            encoding = []  # by threads, which suffice as tiktoken releases Python's lock
            while n_bytes > 0 and (piece := next(pieces, None)):
                data, begins, begun["place"] = piece
                encoding.append(pool.submit(encode, tokenizer, data, begins))
                n_bytes -= len(data)
            if not encoding:
                break
            tokens = np.concatenate([future.result() for future in encoding])[:most]
            write_shard(folder / f"{folder.name}_{split}_{begun['shards']:06d}.bin", tokens)
            begun["tokens"] += len(tokens) if split == "train" else 0
            begun["shards"] += 1
            write_json(folder / BEGUN, begun)
    check(begun["tokens"], f"{options.source}: all was held out; more text, or fewer --val_tokens")

def fetch_shards(folder, options):
    """FineWeb tokenized by others: a file held out, 103 to train on, of 100M tokens each."""
    import huggingface_hub
    count = math.ceil((options.tokens or 10_300_000_000) / 100_000_000)
    names = [f"fineweb_train_{number:06d}.bin" for number in range(1, count + 1)]
    names.append("fineweb_val_000000.bin")
    with explain_errors(f"--source={options.source}: failed; the same command goes on"):
        huggingface_hub.snapshot_download("kjj0/fineweb10B-gpt2", repo_type="dataset",
                                          local_dir=folder, allow_patterns=names)

def begin(folder, options, paths):
    """A corpus's BEGUN, new or as it was left; DataError where options or files were others."""
    made = asdict(options)
    del made["data_dir"]
    if paths:
        stats = [path.stat() for path in paths]
        newest = str(np.datetime64(int(max(s.st_mtime for s in stats)), "s")).replace("T", " ")
        n_bytes = sum(s.st_size for s in stats)
        made["files"] = f"{len(stats)} with {n_bytes:,} bytes, the newest of {newest} UTC"
    for path in (folder / "meta.json", folder / BEGUN):
        if path.exists():
            begun = read_json(path)
            earlier = begun | begun["options"]
            other = [f"{name}={earlier.get(name)}, now {value}" for name, value in made.items()
                     if earlier.get(name) != value]
            if not other:
                return begun
            check(not any(folder.glob("*.bin")), f"{folder}: made with {'; '.join(other)}; "
                   "go back, give another --name, or remove the folder")
    check(not any(folder.glob("*.bin")), f"{folder}: has unknown .bin files; give another --name")
    begun = {"source": options.source, "options": made, "shards": 0, "tokens": 0, "place": 0}
    write_json(folder / BEGUN, begun)
    return begun

def prepare(source="stdlib", **options):
    """The command, with its options; returns the corpus's folder. Raises ConfigError, DataError."""
    options = PrepareConfig(source, **options)
    folder = Path(options.data_dir, options.name)
    tokenizer = get_tokenizer(options.tokenizer)
    paths = [] if source in STREAMED else source_files(source, options.seed)
    with lock_folder(folder, "another prepare.py is at work here; wait, or give another --name"):
        folder.mkdir(exist_ok=True)
        begun = begin(folder, options, paths)
        if not (folder / "meta.json").exists():
            if source == "fineweb10B-gpt2":
                fetch_shards(folder, options)
            else:
                write_shards(folder, options, tokenizer, paths, begun)
            write_meta(folder, tokenizer, begun)
    meta = read_meta(folder)
    print(f"{folder}: {meta['train_tokens']:,} tokens to train on, {meta['val_tokens']:,} held out")
    return folder

def write_meta(folder, tokenizer, begun):
    """meta.json: what the corpus is, what it was made of and with."""
    lengths = token_lengths({"tokenizer": tokenizer.name})
    counts = {}
    for split in ("train", "val"):
        shards = [read_shard(path) for path in folder.glob(f"*_{split}_??????.bin")]
        counts[f"{split}_tokens"] = sum(map(len, shards))
        counts[f"{split}_bytes"] = sum(int(lengths[shard].sum()) for shard in shards)
    del begun["shards"], begun["tokens"], begun["place"]
    write_json(folder / "meta.json", {
        "tokenizer": tokenizer.name, "vocab_size": tokenizer.n_vocab, **counts, **begun,
        "versions": {"python": sys.version}, "token_bytes": lengths.tobytes().hex()})
    (folder / BEGUN).unlink()

if __name__ == "__main__":
    run_script(lambda words: prepare(**parse_options(words, __doc__, PrepareConfig)))

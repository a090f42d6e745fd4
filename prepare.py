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
import codecs
import collections
import contextlib
import difflib
import hashlib
import inspect
import io
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

from model import ConfigError, GPTConfig


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


# ---- Tokenizers ----------------------------------------------------------------------------------

TOKENIZERS = ("bytes", "gpt2", "r50k_base", "p50k_base", "p50k_edit")  # those that fit in uint16


def get_tokenizer(name):
    """Return the tiktoken.Encoding of that name.

    "bytes" has a token for each byte, and 256 for the end of a text.
    """
    if name == "bytes":
        # Nothing is ever merged, so the pattern only sets the speed.
        return tiktoken.Encoding(name, pat_str="(?s).{1,64}", special_tokens={"<|endoftext|>": 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    with explain_errors(f"tokenizer={name}: unknown, or it cannot be downloaded; TIKTOKEN_CACHE_DIR"
                        " may name a folder that has it"):
        return tiktoken.get_encoding(name)


def encode(tokenizer, data, new=True):
    """Return UTF-8 text as uint16 tokens (n,), after an end-of-text token if `new`.

    The words "<|endoftext|>" in the text are text.
    """
    if tokenizer.name == "bytes":
        tokens = np.frombuffer(data, np.uint8)
    else:
        tokens = tokenizer.encode_to_numpy(data.decode(errors="replace"), disallowed_special=())
    tokens = tokens.astype(np.uint16)
    return np.insert(tokens, 0, tokenizer.eot_token) if new else tokens


def token_lengths(meta):
    """Return how many bytes of text each token stands for, (vocab_size,); 0 for end-of-text."""
    if "token_bytes" in meta:
        return np.frombuffer(bytes.fromhex(meta["token_bytes"]), np.uint8)
    tokenizer = get_tokenizer(meta["tokenizer"])
    lengths = [len(tokenizer.decode_single_token_bytes(i)) for i in range(tokenizer.n_vocab)]
    lengths[tokenizer.eot_token] = 0
    return np.array(lengths, np.uint8)


# ---- Shards: llm.c's format ----------------------------------------------------------------------

MAGIC, VERSION = 20240520, 1
HEADER = 256                                             # int32 numbers before the tokens


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
    count = (os.path.getsize(path) - 4 * HEADER) / 2
    check(header == [MAGIC, VERSION, count], f"{path}: not a whole shard in llm.c's format")
    return np.memmap(path, "<u2", mode="r", offset=4 * HEADER)


def read_meta(folder):
    """Return a dataset's meta.json, which only a complete dataset has. Raises DataError."""
    path = Path(folder, "meta.json")
    check(path.exists(),
          f"data={folder}: no complete dataset; python prepare.py --source=... makes one")
    return read_json(path)


# ---- Options of this script ----------------------------------------------------------------------

# FineWeb as GPT-2's tokens, made by kjj0 on huggingface.co: name -> number of training shards
PRETOKENIZED = {"fineweb10B-gpt2": 103, "fineweb100B-gpt2": 1030}
SHARD_TOKENS = 100_000_000
SOURCES = ("stdlib", "fineweb", *PRETOKENIZED)


@dataclass
class PrepareConfig:
    """Options of prepare.py."""
    source: str = "stdlib"             # file, folder, glob, or one of stdlib, fineweb, ...-gpt2
    name: str | None = None            # name of the dataset (by source)
    data_dir: str = "data"             # folder of all datasets
    tokenizer: str | None = None       # bytes, gpt2, ... (bytes; for FineWeb gpt2)
    subset: str = "sample-10BT"        # which part of fineweb
    tokens: int | None = None          # stop after so many tokens to train on (all)
    val_tokens: int | None = None      # most tokens to validate on (5% of the text, 10M)
    shard_tokens: int = SHARD_TOKENS   # tokens per shard
    seed: int = 1337                   # seed of the order of files

    def __post_init__(self):
        check_at_least(1, self, "tokens", "val_tokens", "shard_tokens")
        self.name = self.name or Path(self.source.split("*")[0]).stem.strip(".") or "text"
        available = PRETOKENIZED.get(self.source, math.inf) * SHARD_TOKENS
        if self.tokens and self.tokens > available:
            raise ConfigError(f"tokens={self.tokens}: {self.source} has {available:,}; "
                              "fineweb100B-gpt2 has ten times those of fineweb10B-gpt2")
        is_fineweb = self.source == "fineweb" or self.source in PRETOKENIZED
        self.tokenizer = self.tokenizer or ("gpt2" if is_fineweb else "bytes")
        check_choice("tokenizer", self.tokenizer,
                     ("gpt2",) if self.source in PRETOKENIZED else TOKENIZERS)


# ---- Sources: files ------------------------------------------------------------------------------

CHUNK_BYTES = 900_000                # at most; tiktoken cannot take a million spaces at a time
SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
UNPACKERS = {b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "unzstd", b"\xfd7zXZ": "unxz",
             b"BZh": "bunzip2", b"PK": "unzip"}          # by the first bytes of a file


def find_files(source, seed):
    """Return the files of a source on this machine in a seeded order, each text once."""
    paths = find_library() if source == "stdlib" else find_text(source)

    # Of files with the same bytes keep the last. Only those of the same size need a closer look.
    sizes = collections.Counter(path.stat().st_size for path in paths)
    by_text = {}
    for path in sorted(paths):
        size, digest = path.stat().st_size, None
        if sizes[size] > 1:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").digest()
        by_text[size, digest] = path
    paths = sorted(by_text.values())
    random.Random(seed).shuffle(paths)
    return paths


def find_library():
    """Return Python's own source files, without test folders, which some installations lack."""
    root = Path(os.__file__).parent
    left_out = {"site-packages", "dist-packages", "test", "tests"}
    return [path for path in root.rglob("*.py")
            if left_out.isdisjoint(path.relative_to(root).parts) and path.stat().st_size]


def find_text(source):
    """Return the files that are not empty of a file, folder, or glob. Raises DataError."""
    place = Path(source)
    if place.is_dir():
        found = place.rglob("*")
    elif place.exists():                                 # even if its name looks like a glob
        found = [place]
    else:
        # Not by glob.glob, whose ** follows links, even back to a folder that holds the link.
        with explain_errors(f"--source={source}: does not exist, and is no pattern"):
            pattern = re.sub(r"\*\*$", "**/*", source.removeprefix(place.anchor))
            found = list(Path(place.anchor).glob(pattern))
        check(found, f"--source={source}: does not exist; expected a file, a folder, a pattern, or "
              f"one of {', '.join(SOURCES)}{did_you_mean(source, SOURCES)}")

    # Hidden files and folders, as Jupyter's copies, count only if the source names them.
    found = [path for path in found if path.is_file() and path.stat().st_size and not
             any(part.startswith(".") and part not in place.parts for part in path.parts)]
    if place.is_dir():
        skipped = [path.name for path in found if path.suffix.lower() not in SUFFIXES]
        found = [path for path in found if path.suffix.lower() in SUFFIXES]
        if skipped:
            print(f"{source}: {len(skipped)} files skipped that are not {', '.join(SUFFIXES)}: "
                  f"{', '.join(sorted(skipped)):.60}")
    check(found, f"--source={source}: no text in it; a folder's {', '.join(SUFFIXES)} are read")
    return found


def open_documents(path):
    """Yield each document of a file as a binary file: a row's `text`, or the whole file's."""
    suffix = path.suffix.lower()
    if suffix not in (".jsonl", ".parquet"):
        with path.open("rb") as file:
            if file.read(3) != codecs.BOM_UTF8:
                file.seek(0)
            yield file
        return
    for number, row in enumerate(read_rows(path), 1):
        if suffix == ".parquet" or row.strip():
            with explain_errors(f"{path}, row {number}: expected a string `text`"):
                text = row if suffix == ".parquet" else json.loads(row)["text"]
                data = text.encode(errors="replace")
            yield io.BytesIO(data)


def read_rows(path):
    """Yield the lines of a .jsonl file, or the values in the column `text` of a .parquet file."""
    with explain_errors(f"{path}: cannot be read"):
        if path.suffix.lower() == ".jsonl":
            with path.open("rb") as file:
                yield from file
        else:
            # Not by `datasets`, which takes the text 2024-01-01 for a date.
            from pyarrow.parquet import ParquetFile
            for batch in ParquetFile(path).iter_batches(1000, columns=["text"]):
                yield from batch["text"].to_pylist()


def cut(document, size):
    """Yield a document in chunks of about size to 2 size bytes that end with a line if one ends."""
    while chunk := document.read(size) + document.readline(size):
        # Do not cut a character: all but the first of its bytes begin with the bits 10.
        ahead = document.read(3)
        n_bytes = next((i for i, byte in enumerate(ahead) if byte >> 6 != 0b10), len(ahead))
        document.seek(n_bytes - len(ahead), os.SEEK_CUR)
        yield chunk + ahead[:n_bytes]


def check_text(path, chunk, offset):
    """Raise DataError unless a chunk of a file, from a byte offset on, is UTF-8 text."""
    try:
        chunk.decode()
        error = chunk.find(0)                            # UTF-16 has zeros, and text has none
    except UnicodeDecodeError as exception:
        error = exception.start
    if error >= 0:
        unpackers = [program for magic, program in UNPACKERS.items() if chunk.startswith(magic)]
        advice = f"unpack it, {unpackers[0]} does" if unpackers else "iconv can convert other text"
        raise DataError(f"{path}: not UTF-8 text at byte {offset + error:,}; {advice}")


def read_files(paths, size, place=0):
    """Yield (chunk, does it begin a document, place to resume from behind it), from a place on."""
    number = 0
    for path in paths:
        is_text = path.suffix.lower() not in (".jsonl", ".parquet")
        for document in open_documents(path):
            begins = True
            for chunk in cut(document, size):
                if is_text:
                    check_text(path, chunk, document.tell() - len(chunk))
                number += 1
                if number > place:
                    yield chunk, begins, number
                begins = False


def count_bytes(paths):
    """Return how many bytes of text files hold. A thousand million is as good as more."""
    n_bytes = 0
    for chunk, _, _ in read_files(paths, CHUNK_BYTES // 2):
        n_bytes += len(chunk)
        if n_bytes > 1e9:
            break
    return n_bytes


# ---- Sources: FineWeb ----------------------------------------------------------------------------

def stream_fineweb(subset, place):
    """Yield (chunk, does it begin a document, place to resume from behind it), from a place on.

    A place is the state of the stream before a row, and how many of the row's chunks are done.
    """
    import datasets
    state, n_done = place or (None, 0)
    with explain_errors("fineweb: failed; the same command resumes from the last whole shard"):
        rows = datasets.load_dataset("HuggingFaceFW/fineweb", name=subset, split="train",
                                     streaming=True)
        if state:
            rows.load_state_dict(state)
        for row in rows:
            document = io.BytesIO(row["text"].encode(errors="replace"))
            for number, chunk in enumerate(cut(document, CHUNK_BYTES // 2), 1):
                if number > n_done:
                    yield chunk, number == 1, [state, number]
            state, n_done = rows.state_dict(), 0


def fetch_shards(folder, options):
    """Download FineWeb's tokens, as many shards as --tokens asks for. Raises DataError."""
    import huggingface_hub
    n_shards = PRETOKENIZED[options.source]
    if options.tokens:
        n_shards = math.ceil(options.tokens / SHARD_TOKENS)
    names = [f"fineweb_train_{number:06d}.bin" for number in range(1, n_shards + 1)]
    names.append("fineweb_val_000000.bin")
    failed = f"{options.source}: not complete; the same command resumes"
    with explain_errors(failed):
        huggingface_hub.snapshot_download(f"kjj0/{options.source}", repo_type="dataset",
                                          local_dir=folder, allow_patterns=names)
    # Without a network snapshot_download returns what there is.
    for name in names:
        check((folder / name).exists(), f"{failed} ({name} could not be downloaded)")
        read_shard(folder / name)


# ---- Writing -------------------------------------------------------------------------------------

PROGRESS = "progress.json"           # what an unfinished dataset is made of, and where to resume


def describe(options, paths):
    """Return what a dataset is made of and with, as meta.json keeps it."""
    settings = asdict(options)
    del settings["data_dir"]
    if paths:
        stats = [path.stat() for path in paths]
        newest = np.datetime64(int(max(stat.st_mtime for stat in stats)), "s").item()
        n_bytes = sum(stat.st_size for stat in stats)
        settings["files"] = f"{len(stats)} with {n_bytes:,} bytes, the newest of {newest} UTC"
    return settings


def load_progress(folder, settings):
    """Return the progress, or the meta.json, of the dataset in a folder, or a new one's progress.

    Raises DataError if the folder holds a dataset that was made with other settings.
    """
    has_shards = any(folder.glob("*.bin"))
    for path in (folder / "meta.json", folder / PROGRESS):
        if path.exists():
            progress = read_json(path)
            earlier = progress | progress["options"]
            other = [f"{name}={earlier.get(name)}, now {value}" for name, value in settings.items()
                     if earlier.get(name) != value]
            if not other:
                return progress
            check(not has_shards, f"{folder}: made with {'; '.join(other)}; "
                  "go back, give another --name, or remove the folder")
    check(not has_shards, f"{folder}: holds other .bin files; give another --name, or remove it")
    progress = {"options": settings, "shards": 0, "tokens": 0, "place": None, "left_over": ""}
    write_json(folder / PROGRESS, progress)
    return progress


def encode_chunks(tokenizer, chunks):
    """Yield (tokens, bytes of text, place) of chunks in their order, encoded by all cores."""
    waiting = collections.deque()
    with ThreadPoolExecutor() as pool:                   # tiktoken releases Python's lock
        for chunk, begins, place in chunks:
            waiting.append((pool.submit(encode, tokenizer, chunk, begins), len(chunk), place))
            if len(waiting) > 2 * os.cpu_count():
                future, n_bytes, place = waiting.popleft()
                yield future.result(), n_bytes, place
        for future, n_bytes, place in waiting:
            yield future.result(), n_bytes, place


def write_shards(folder, options, tokenizer, paths, progress):
    """Write the shards that are missing, the one to validate on first. Raises DataError.

    That one ends after val_tokens, or with the chunk at 5% of the text. Other shards have
    shard_tokens, the last one fewer.
    """
    n_train = options.tokens or sys.maxsize
    val_tokens = options.val_tokens or min(10_000_000, n_train // 20 or 1)
    val_bytes = math.inf
    if paths:
        n_bytes = count_bytes(paths)
        chunk_bytes = min(CHUNK_BYTES, n_bytes // 20)
        chunks = read_files(paths, chunk_bytes // 2 or 1, progress["place"] or 0)
        if not options.val_tokens:
            val_bytes = n_bytes / 20
    else:
        chunks = stream_fineweb(options.subset, progress["place"])
    encoded = encode_chunks(tokenizer, chunks)
    left_over = np.frombuffer(bytes.fromhex(progress["left_over"]), np.uint16)
    bar = tqdm(unit=" tokens", unit_scale=True, disable=None)

    while progress["tokens"] < n_train:
        # Plan the next shard.
        if progress["shards"] == 0:
            split, most_tokens, most_bytes = "val", val_tokens, val_bytes
        else:
            split, most_bytes = "train", math.inf
            most_tokens = min(options.shard_tokens, n_train - progress["tokens"])

        # Take text, encoded, until the shard is full. What the previous one left comes first.
        parts = [left_over]
        n_tokens, n_bytes = len(left_over), 0
        while n_tokens < most_tokens and n_bytes < most_bytes:
            chunk = next(encoded, None)
            if chunk is None:
                break
            tokens, chunk_bytes, progress["place"] = chunk
            parts.append(tokens)
            n_tokens += len(tokens)
            n_bytes += chunk_bytes
            bar.update(len(tokens))
        if n_tokens == 0:
            break
        tokens, left_over = np.split(np.concatenate(parts), [most_tokens])

        # Write the shard, and then where to resume behind it.
        write_shard(folder / f"{folder.name}_{split}_{progress['shards']:06d}.bin", tokens)
        progress["shards"] += 1
        if split == "train":
            progress["tokens"] += len(tokens)
        progress["left_over"] = left_over.tobytes().hex()
        write_json(folder / PROGRESS, progress)

    if progress["tokens"] == 0:
        # Leave nothing behind that would refuse a smaller --val_tokens.
        for path in (*folder.glob("*.bin"), folder / PROGRESS):
            path.unlink()
        raise DataError(f"{options.source}: all text was held out to validate on; give more text, "
                        "or a smaller --val_tokens")


def write_meta(folder, tokenizer, settings):
    """Write meta.json: what the dataset is, and what it was made of and with."""
    lengths = token_lengths({"tokenizer": tokenizer.name})
    counts = {}
    fingerprint = hashlib.sha256()
    for split in ("val", "train"):
        shards = [read_shard(path) for path in sorted(folder.glob(f"*_{split}_??????.bin"))]
        counts[f"{split}_tokens"] = sum(map(len, shards))
        counts[f"{split}_bytes"] = sum(int(lengths[shard].sum()) for shard in shards)
        for shard in shards:
            fingerprint.update(shard)
    write_json(folder / "meta.json", {
        "tokenizer": tokenizer.name, "vocab_size": tokenizer.n_vocab, **counts,
        "fingerprint": fingerprint.hexdigest(), "source": settings["source"], "options": settings,
        "versions": {"python": sys.version}, "token_bytes": lengths.tobytes().hex()})
    (folder / PROGRESS).unlink()


# ---- The command ---------------------------------------------------------------------------------

def prepare(source="stdlib", **options):
    """Make a dataset, or what is missing of it, and return its folder.

    The options are the command's. Raises ConfigError and DataError.
    """
    options = PrepareConfig(**clean_options(PrepareConfig, {"source": source, **options}))
    folder = Path(options.data_dir, options.name)
    tokenizer = get_tokenizer(options.tokenizer)
    is_fineweb = options.source == "fineweb" or options.source in PRETOKENIZED
    paths = [] if is_fineweb else find_files(options.source, options.seed)
    settings = describe(options, paths)
    with lock_folder(folder, "another prepare.py is at work here; waiting for it", wait=True):
        folder.mkdir(exist_ok=True)
        progress = load_progress(folder, settings)
        if not (folder / "meta.json").exists():
            if options.source in PRETOKENIZED:
                fetch_shards(folder, options)
            else:
                write_shards(folder, options, tokenizer, paths, progress)
            write_meta(folder, tokenizer, settings)

    meta = read_meta(folder)
    n_train, n_val = meta["train_tokens"], meta["val_tokens"]
    print(f"{folder}: {n_train:,} tokens to train on, {n_val:,} to validate on")
    if min(n_train, n_val) <= GPTConfig.block_size:
        print(f"{folder}: too few to train with --block_size={GPTConfig.block_size}; "
              "give more text, or train.py a smaller --block_size")
    return folder


if __name__ == "__main__":
    run_script(lambda words: prepare(**parse_options(words, __doc__, PrepareConfig)))

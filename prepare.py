"""Turn text into shards of tokens for train.py; and the reader of every script's options.

    python prepare.py                                                    # the Python standard library's source
    python prepare.py --source="books/*.txt" --tokenizer=gpt2            # your own .txt, .jsonl or .parquet
    python prepare.py --source=fineweb --tokens=1_000_000_000            # FineWeb, streamed
    python prepare.py --source=fineweb10B-gpt2 --tokens=1_000_000_000    # FineWeb, tokenized by others

A corpus is a folder data/<name>/ of shards in llm.c's format, <name>_val_000000.bin held out, <name>_train_000001.bin
and so on to train on, and of meta.json, written last. Files come in a seeded order. The first are held out: 5% of the
text, at most 10M tokens; of a file too large for that, its end. Stopped, it goes on from the last whole shard.
"""
import argparse
import contextlib
import difflib
import glob
import inspect
import itertools
import json
import math
import os
import random
import re
import signal
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
import tiktoken
from filelock import FileLock, Timeout
from tqdm import tqdm

from model import ConfigError

# ---- Options and errors of every script: here, since all other scripts import this one ------------------------------

class DataError(Exception):
    """A fault of files or of what they hold, told in one line."""

def expect(condition, message):
    if not condition:
        raise DataError(message)

@contextlib.contextmanager
def blame(message):
    """Turn whatever a library raises into one line."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        short = textwrap.shorten(str(error), 200, placeholder=" ...")
        raise DataError(f"{message} ({type(error).__name__}: {short})") from error

def nearest(word, names):
    """The name that a mistyped word most likely means, as the end of a sentence."""
    near = difflib.get_close_matches(str(word).lower(), names, 1, 0.6)
    return f"; did you mean {near[0]}?" if near else ""

def choose(option, given, valid, hint=""):
    """Raises ConfigError with the nearest valid name unless `given` is one of `valid`."""
    if given not in valid:
        raise ConfigError(f"{option}={given}: expected one of {', '.join(valid)}{hint}{nearest(given, valid)}")

def at_least(least, config, *names):
    """Raises ConfigError where an option of these names is below `least`; None is not set yet."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not least <= value < math.inf:
            raise ConfigError(f"{name}={value}: expected at least {least}")

class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ConfigError(message)

def true_or_false(word):
    if word.lower() not in ("true", "false"):
        raise ValueError                                 # argparse says what was given
    return word.lower() == "true"

def add_options(parser, cls):
    """Fields of a dataclass as options; the comment behind a field is its help."""
    group = parser.add_argument_group(cls.__doc__.split(".")[0])
    source = "".join(inspect.getsource(owner) for owner in cls.__mro__[:-1])
    comments = dict(re.findall(r"^    (\w+): .+?  # (.+)$", source, re.MULTILINE))
    hints = get_type_hints(cls)
    for field in fields(cls):
        kind = hints[field.name]
        if type(None) in get_args(kind):
            kind = get_args(kind)[0]                     # int of int | None
        about = comments.get(field.name, "").replace("%", "%%")
        if field.default is not None:
            about += f" [{field.default}]"
        if get_origin(kind) is Literal:
            option = dict(choices=get_args(kind))
        elif kind is bool:
            option = dict(type=true_or_false, metavar="true|false")
        else:
            option = dict(type=kind, metavar=kind.__name__)
        if kind is bool or "true" in get_args(kind):
            option |= dict(nargs="?", const="true")      # --name alone
        group.add_argument(f"--{field.name}", help=about, **option)

def typed(argv, description, *classes):
    """What a command line's words give of the fields of dataclasses, as one dict: --name=value,
    --name value, or --name alone for true. Raises ConfigError; --help prints the options, and
    exits."""
    parser = Parser(description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS,
                    formatter_class=argparse.RawDescriptionHelpFormatter, conflict_handler="resolve")
    for cls in reversed(classes):                        # of two options of one name the first class's stays
        add_options(parser, cls)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        names = [field.name for cls in classes for field in fields(cls)]
        meant = nearest(unknown[0].split("=")[0].lstrip("-"), names)
        raise ConfigError(f"{unknown[0]}: no such option{meant}; --help lists them")
    return vars(given)

def run_script(main):
    """Calls main with the command line's words. What a user can mend ends in one line and exit code
    2, or the exception's own; Ctrl-C ends the process as the signal itself would, so that a shell's
    loop ends, too."""
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except (ConfigError, DataError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 2))

# ---- Tokens ---------------------------------------------------------------------------------------------------------

MAGIC = 20240520
VERSION = 1
HEADER = 256                         # int32 numbers before the tokens
PIECE = 900_000                      # bytes of a text that are encoded at a time; tiktoken can't take a million spaces
TOKENIZERS = "bytes", "gpt2", "r50k_base", "p50k_base", "p50k_edit"  # tiktoken's others do not fit in uint16

def get_tokenizer(name):
    """The tiktoken.Encoding of that name; "bytes" is a token for each byte, and end-of-text =
    256."""
    if name == "bytes":  # nothing is ever merged, so the pattern only sets the speed
        return tiktoken.Encoding(name, pat_str=r"[\s\S]{1,64}", special_tokens={"<|endoftext|>": 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    with blame(f"tokenizer={name}: unknown, or not to be downloaded; TIKTOKEN_CACHE_DIR may point at a local copy"):
        return tiktoken.get_encoding(name)

def bytes_per_token(tokenizer):
    """(n_vocab,) length of each token's text; end-of-text has none."""
    texts = (tokenizer.decode_single_token_bytes(token) for token in range(tokenizer.n_vocab))
    lengths = np.array([len(text) for text in texts])
    lengths[tokenizer.eot_token] = 0
    return lengths

def encode(tokenizer, data, new=True):
    """Bytes of text as uint16 tokens (n,), if `new` after an end-of-text; an "<|endoftext|>" inside
    it is mere text."""
    if tokenizer.name == "bytes":
        tokens = np.frombuffer(data, np.uint8)
    else:
        tokens = tokenizer.encode_to_numpy(data.decode("utf-8", errors="replace"), disallowed_special=())
    tokens = tokens.astype(np.uint16)
    return np.insert(tokens, 0, tokenizer.eot_token) if new else tokens

@contextlib.contextmanager
def atomic(path):
    """A file to write that gets its name only once it is whole and on the disk."""
    try:
        with open(f"{path}.tmp", "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.tmp", path)
    finally:
        Path(f"{path}.tmp").unlink(missing_ok=True)

def write_json(path, value):
    with atomic(path) as file:
        file.write(json.dumps(value, indent=2).encode())

def read_json(path):
    with blame(f"{path}: expected a JSON object, made by prepare.py"):
        return dict(json.loads(Path(path).read_bytes()))

def write_shard(path, tokens):
    header = np.zeros(HEADER, "<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    with atomic(path) as file:
        file.write(header)
        file.write(np.ascontiguousarray(tokens, "<u2"))

def read_shard(path):
    """The tokens of a shard, a read-only np.memmap (n,) of uint16. Raises DataError unless it is
    whole."""
    header = np.fromfile(path, "<i4", count=3).tolist()
    count = header[2] if len(header) == 3 else 0
    size = os.path.getsize(path)
    whole = count > 0 and header[:2] == [MAGIC, VERSION] and size == 4 * HEADER + 2 * count
    expect(whole, f"{path}: begins with {header} and has {size} bytes, expected magic number {MAGIC}, "
                  f"version {VERSION}, a count of tokens, and {4 * HEADER} bytes + 2 for each")
    return np.memmap(path, "<u2", mode="r", offset=4 * HEADER)

def read_meta(folder):
    """meta.json of a whole corpus. Shards that others made, for llm.c, have none: they are taken to
    be GPT-2's."""
    folder = Path(folder)
    hint = "python prepare.py --source=... makes a corpus"
    if folder.is_file():
        hint = f"that is a text: python prepare.py --source={folder}, then --data=data/{folder.stem}"
    expect(folder.is_dir(), f"data={folder}: no such corpus; {hint}")
    ours = (folder / "meta.json").exists() or (folder / "state.json").exists()
    if not ours and list(folder.glob("*_train_*.bin")):
        return {"tokenizer": "gpt2", "vocab_size": 50257}
    expect((folder / "meta.json").exists(), f"data={folder}: no whole corpus; the command that began it goes on: "
                                            "python prepare.py --source=...")
    meta = read_json(folder / "meta.json")
    for key, kind in dict(tokenizer=str, vocab_size=int, complete=bool, train_tokens=int, val_tokens=int).items():
        expect(type(meta.get(key)) is kind, f"{folder}/meta.json: {key} is {meta.get(key)!r}, expected {kind.__name__}")
    return meta

def token_lengths(meta):
    """(vocab_size,) bytes of each token's text, from meta.json, which has them as hexadecimal
    digits, or the tokenizer."""
    if "token_bytes" in meta:
        with blame("meta.json: token_bytes are no hexadecimal digits"):
            return np.frombuffer(bytes.fromhex(meta["token_bytes"]), np.uint8)
    return bytes_per_token(get_tokenizer(meta["tokenizer"]))

# ---- Corpora --------------------------------------------------------------------------------------------------------

@dataclass
class PrepareConfig:
    """Options."""
    source: str = "stdlib"             # stdlib, fineweb, fineweb10B-gpt2, or a file, a folder or a glob
    name: str | None = None            # of the corpus (from the source)
    data_dir: str = "data"             # folder of all corpora
    tokenizer: str | None = None       # bytes | gpt2 | r50k_base | p50k_base | p50k_edit (bytes; for fineweb gpt2)
    subset: str = "sample-10BT"        # of fineweb
    tokens: int | None = None          # stop after that many to train on (all)
    val_tokens: int | None = None      # hold out at most that many (5% of the text, 10M)
    shard_tokens: int = 100_000_000    # in a file, about
    workers: int = os.cpu_count()      # threads that encode
    seed: int = 1337                   # of the order of files
    force: bool = False                # start over, replacing what is there

    def __post_init__(self):
        at_least(1, self, "tokens", "val_tokens", "shard_tokens", "workers")
        at_least(0, self, "seed")
        stem = Path(self.name).name if self.name else Path(self.source.split("*")[0]).stem
        self.name = stem.strip(".") or "text"
        if self.tokenizer is None:
            self.tokenizer = "gpt2" if self.source in ("fineweb", "fineweb10B-gpt2") else "bytes"
        choose("tokenizer", self.tokenizer, ["gpt2"] if self.source == "fineweb10B-gpt2" else TOKENIZERS)

def source_files(source, seed):
    """The files of a source on this machine, in a seeded order."""
    if source == "stdlib":  # without test folders, which some installations lack
        root = Path(os.__file__).parent
        left_out = {"site-packages", "dist-packages", "test", "tests"}
        found = [path for path in sorted(root.rglob("*.py")) if left_out.isdisjoint(path.relative_to(root).parts)]
        found = {path.read_bytes(): path for path in found}.values()  # each text once
    else:
        paths = list(Path(source).rglob("*")) or [Path(name) for name in glob.glob(source, recursive=True) or [source]]
        found = [path for path in paths if path.suffix.lower() in (".txt", ".jsonl", ".parquet")]
    paths = sorted({path for path in found if path.stat().st_size})
    what = "empty" if found else "no .txt, .jsonl, .parquet file, nor stdlib or fineweb"
    expect(paths, f"--source={source}: {what}")
    random.Random(seed).shuffle(paths)
    return paths

def has_rows(path):
    return path.suffix.lower() in (".jsonl", ".parquet")

def rows_of(path):
    """Yields the texts of a .jsonl or .parquet file, as bytes."""
    with open(path, "rb") as file, blame(f"{path}: expected rows with a string `text`"):
        if path.suffix.lower() == ".jsonl":
            for number, line in enumerate(filter(bytes.strip, file), 1):
                with blame(f"{path}, row {number}: expected JSON with a string `text`"):
                    yield json.loads(line)["text"].encode("utf-8", errors="replace")
        else:
            from pyarrow.parquet import ParquetFile
            for batch in ParquetFile(file).iter_batches(batch_size=1000, columns=["text"]):
                for text in batch["text"].to_pylist():
                    yield text.encode()

def read_file(path, start=0, stop=None):
    """Yields (bytes, begins a document?): rows start to stop of .jsonl and .parquet files; of a
    text its bytes from start to stop, in pieces of whole lines, unless those are overlong."""
    if has_rows(path):
        for row in itertools.islice(rows_of(path), start, stop):
            yield row, True
        return
    if stop is None:
        stop = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(start)
        while file.tell() < stop:
            first = file.tell() == start
            data = file.read(min(PIECE, stop - file.tell()))
            yield data + file.readline(min(50_000, stop - file.tell())), first

def end_of(path, size):
    """Where the last `size` bytes of a file begin: the number of a row, or of a byte, that of a
    line if one begins near."""
    whole = path.stat().st_size
    if has_rows(path):
        rows = sum(1 for _ in rows_of(path))
        return max(0, rows - max(1, rows * size // whole))
    with open(path, "rb") as file:
        file.seek(whole - size)
        file.readline(50_000)
        return file.tell() if file.tell() < whole else whole - size

def hold_out(paths, size):
    """Two lists of (path, start, stop): about `size` bytes to hold out, and the rest to train on.
    Whole files are held out in their order; of one that would make it twice the size, or more than
    a tenth of all, the end."""
    most = min(2 * size, sum(path.stat().st_size for path in paths) / 10)
    held, rest = [], []
    done = 0
    for path in paths:
        whole = path.stat().st_size
        if done >= size:
            rest.append((path, 0, None))
        elif done + whole <= most:
            held.append((path, 0, None))
        else:
            place = end_of(path, min(whole, size - done))
            rest.append((path, 0, place))
            held.append((path, place, None))
        done += whole
    return held, rest

class ShardWriter:
    """Encodes pieces of text in threads, which suffice as tiktoken releases Python's lock, and
    writes them as shards."""

    def __init__(self, folder, options, tokenizer, pool, bar):
        self.folder, self.options, self.tokenizer, self.pool, self.bar = folder, options, tokenizer, pool, bar
        self.bytes_per_token = 1 if options.tokenizer == "bytes" else 5  # more than most have

    def path(self, number):
        return self.folder / f"{self.options.name}_{'train' if number else 'val'}_{number:06d}.bin"

    def write(self, number, pieces, most_bytes, most_tokens):
        """Takes the next pieces up to a number of bytes; writes a shard of them unless it is there.
        How many tokens it has: 0 if no pieces were left. As bytes decide, where a shard ends is
        known without encoding those before."""
        path = self.path(number)
        is_there = path.exists()
        shard, waiting = bytearray(), []
        while most_bytes > 0 and (piece := next(pieces, None)):
            most_bytes -= len(piece[0])
            self.bar.update(len(piece[0]))
            if not is_there:
                waiting.append(self.pool.submit(encode, self.tokenizer, *piece))
            if len(waiting) > 16 * self.options.workers:
                shard += waiting.pop(0).result().tobytes()
        for future in waiting:
            shard += future.result().tobytes()
        if shard:
            write_shard(path, np.frombuffer(shard, np.uint16)[:min(most_tokens, len(shard))])
        return len(read_shard(path)) if path.exists() else 0

    def write_training(self, pieces, first=1, after_shard=lambda number: None):
        """Shards to train on, from number `first`, until --tokens are there or no pieces are
        left."""
        left = self.options.tokens or math.inf
        for number in range(1, first):
            left -= len(read_shard(self.path(number)))
        number = first
        while left > 0:
            at_once = min(left, self.options.shard_tokens, 400_000_000)  # counts are int32
            count = self.write(number, pieces, self.bytes_per_token * at_once, left)
            if count == 0:
                break
            after_shard(number)
            left -= count
            number += 1
        expect(number > 1, f"{self.options.source}: all was held out; "
                           "give it more text, or fewer --val_tokens and --force")

def tokenize_files(paths, folder, options, tokenizer):
    """Writes those shards of texts on this machine that are not there yet."""
    def pieces(parts):
        for path, start, stop in parts:
            yield from read_file(path, start, stop)

    total = sum(path.stat().st_size for path in paths)
    most = options.val_tokens or 10_000_000
    with ThreadPoolExecutor(options.workers) as pool, tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        writer = ShardWriter(folder, options, tokenizer, pool, bar)
        size = most * writer.bytes_per_token
        if not options.val_tokens:
            size = min(size, math.ceil(total / 20))
        held, rest = hold_out(paths, size)
        writer.write(0, pieces(held), math.inf, most)
        writer.write_training(pieces(rest))

def tokenize_fineweb(folder, options, tokenizer):
    """The same of FineWeb, streamed. rows.json says how many shards are whole, and where the stream
    goes on."""
    import datasets
    progress = folder / "rows.json"
    saved = read_json(progress) if progress.exists() else {"shards": 0}
    failed = f"--source={options.source}: failed; the same command goes on from the last whole shard"
    with blame(failed):
        rows = datasets.load_dataset("HuggingFaceFW/fineweb", name=options.subset, split="train", streaming=True)
        if saved["shards"]:
            rows.load_state_dict(saved["rows"])

    def read():
        with blame(failed):
            for row in rows:
                yield row["text"].encode(), True

    def after_shard(number):
        write_json(progress, {"shards": number + 1, "rows": rows.state_dict()})

    pieces = read()
    with ThreadPoolExecutor(options.workers) as pool, tqdm(unit="B", unit_scale=True, disable=None) as bar:
        writer = ShardWriter(folder, options, tokenizer, pool, bar)
        if saved["shards"] == 0:
            most = options.val_tokens or 10_000_000
            writer.write(0, pieces, most * writer.bytes_per_token, most)
            after_shard(0)
        writer.write_training(pieces, max(1, saved["shards"]), after_shard)

def fetch_shards(folder, options):
    """FineWeb tokenized by others: a file held out, 103 to train on, 100M tokens each; names are
    theirs."""
    import huggingface_hub
    count = 103 if options.tokens is None else math.ceil(options.tokens / 10 ** 8)
    names = [f"fineweb_train_{number:06d}.bin" for number in range(1, min(count, 103) + 1)]
    with blame(f"--source={options.source}: failed; the same command goes on"):
        huggingface_hub.snapshot_download("kjj0/fineweb10B-gpt2", repo_type="dataset", local_dir=folder,
                                          allow_patterns=["fineweb_val_000000.bin", *names])

def shards_of(folder):
    return sorted(folder.glob("*_train_??????.bin")) + sorted(folder.glob("*_val_??????.bin"))

def state_of(paths):
    """What tells whether files have changed, in words."""
    stats = [path.stat() for path in paths]
    newest = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(max(s.st_mtime for s in stats)))
    return f"{len(stats)} with {sum(s.st_size for s in stats):,} bytes, the newest of {newest} UTC"

def check_folder(folder, made, files):
    """Raises DataError if shards in the folder were made with other options, or of files that have
    changed since."""
    if not shards_of(folder):
        return
    earlier = {"options": {"source": "unknown"}}
    for path in (folder / "state.json", folder / "meta.json"):
        if path.exists():
            earlier |= read_json(path)
    other = []
    for name, value in earlier["options"].items():
        if value != made.get(name):
            other.append(f"{name}={value}, now {made.get(name)}")
    expect(not other, f"{folder}: made with {'; '.join(other)}; go back to that, give another --name, or --force")
    expect(earlier.get("files") in (None, files),
           f"{folder}: made of files, {earlier.get('files')}; now there are {files}; --force makes it anew, "
           "another --name keeps both")

def prepare(source="stdlib", **options):
    """What the command does, with the same options; returns the corpus's folder. Raises ConfigError
    and DataError."""
    options = PrepareConfig(source, **options)
    made = {key: value for key, value in asdict(options).items() if key not in ("data_dir", "workers", "force")}
    folder = Path(options.data_dir, options.name)
    tokenizer = get_tokenizer(options.tokenizer)
    streamed = source in ("fineweb", "fineweb10B-gpt2")
    paths = [] if streamed else source_files(source, options.seed)
    files = None if streamed else state_of(paths)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder / ".lock", blocking=False).acquire()
    except Timeout:
        raise DataError(f"{folder}: another prepare.py is at work here; wait for it, or give another --name") from None
    with lock:
        if options.force:
            ours = [folder / "meta.json", folder / "state.json", folder / "rows.json"]
            for path in ours + shards_of(folder):
                path.unlink(missing_ok=True)
        check_folder(folder, made, files)
        if not (folder / "meta.json").exists():
            write_json(folder / "state.json", {"options": made, "files": files})
            if source == "fineweb10B-gpt2":
                fetch_shards(folder, options)
            elif source == "fineweb":
                tokenize_fineweb(folder, options, tokenizer)
            else:
                tokenize_files(paths, folder, options, tokenizer)
            write_meta(folder, tokenizer, options={"source": source, "options": made, "files": files})
    print("{}: {train_tokens:,} tokens to train on, {val_tokens:,} held out".format(folder, **read_meta(folder)))
    return folder

def write_meta(folder, tokenizer, options):
    """meta.json: what the corpus is, what it was made of and with."""
    lengths = bytes_per_token(tokenizer).astype(np.uint8)
    counts = {}
    for split in ("train", "val"):
        shards = [read_shard(path) for path in folder.glob(f"*_{split}_??????.bin")]
        counts[f"{split}_tokens"] = sum(len(shard) for shard in shards)
        counts[f"{split}_bytes"] = sum(int(lengths[shard].sum(dtype=np.int64)) for shard in shards)
    versions = {"python": sys.version.split()[0], "tiktoken": tiktoken.__version__, "numpy": np.__version__}
    write_json(folder / "meta.json", {"tokenizer": tokenizer.name, "vocab_size": tokenizer.n_vocab, **counts, **options,
                                      "shards": [path.name for path in shards_of(folder)], "complete": True,
                                      "versions": versions, "token_bytes": lengths.tobytes().hex()})

if __name__ == "__main__":
    run_script(lambda words: prepare(**typed(words, __doc__, PrepareConfig)))

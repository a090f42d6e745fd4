"""Turn text into shards of tokens. Options and errors of all scripts, which import it, are here.

    python prepare.py                                             # Python's standard library
    python prepare.py --source="books/*.txt" --tokenizer=gpt2     # your .txt, .jsonl or .parquet
    python prepare.py --source=fineweb --tokens=1_000_000_000     # FineWeb, streamed
    python prepare.py --source=fineweb10B-gpt2 --tokens=1_000_000_000    # tokenized by others

A corpus is a folder data/<name>/ of shards in llm.c's format, <name>_val_000000.bin held out,
<name>_train_000001.bin and so on to train on, and, written last, meta.json. Files come in a seeded
order; their first 5%, at most 10M tokens, are held out. Stopped, it goes on after a whole shard.
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
        words = " ".join(str(error).split())
        raise DataError(f"{message} ({type(error).__name__}: {words:.200})") from error

def nearest(word, names):
    """The name that a mistyped word most likely means, as the end of a sentence."""
    near = difflib.get_close_matches(word.lower(), names)
    return f"; did you mean {near[0]}?" if near else ""

def choose(option, given, valid, hint=""):
    """Raises ConfigError with the nearest valid name unless `given` is one of `valid`."""
    if given not in valid:
        raise ConfigError(f"{option}={given}: expected one of {', '.join(valid)}"
                          f"{nearest(given, valid)}{hint}")

def at_least(least, config, *names):
    """Raises ConfigError where an option of these names is a number and below `least`."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, (int, float)) and not least <= value < math.inf:
            raise ConfigError(f"{name}={value}: expected at least {least}")

def true_or_false(word):
    return bool(["false", "true"].index(word.lower()))   # another word: argparse refuses it

def typed(argv, description, *classes):
    """A command line's --name=value, --name value, or --name alone for true, as a dict. Options are
    the fields of dataclasses, of two of one name the first's; help is the comment behind a field.
    Raises argparse.ArgumentError, ConfigError; --help prints the options, and exits."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--name=value ...]", description=description, exit_on_error=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        argument_default=argparse.SUPPRESS)
    options = {}
    comments = {}
    for cls in reversed(classes):
        options |= {field.name: field for field in fields(cls)}
        for owner in cls.__mro__[-2::-1]:                    # what a subclass says comes last
            comments |= re.findall(r"^    (\w+): .+?  # (.+)$", inspect.getsource(owner), re.M)
    for name, field in options.items():
        kinds = get_args(field.type) or [field.type]         # (str, None), [bool], ("auto", "cpu")
        is_switch = kinds[0] is bool or "true" in kinds
        if isinstance(kinds[0], str):                        # those of a Literal
            option = dict(choices=kinds)
        else:
            option = dict(type=true_or_false if is_switch else kinds[0], metavar=kinds[0].__name__)
        if is_switch:
            option |= dict(nargs="?", const="true")          # --name alone
        about = comments.get(name, "").replace("%", "%%")
        if field.default is not None:
            about += f" [{field.default}]"
        parser.add_argument(f"--{name}", help=about, **option)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        meant = nearest(unknown[0].split("=")[0].lstrip("-"), options)
        raise ConfigError(f"{unknown[0]}: no such option{meant}; --help lists them")
    return vars(given)

def run_script(main):
    """Calls main(words). What a user can mend ends in one line; exit code 2, or exception's own."""
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)                   # so that a shell's loop ends, too
    except (argparse.ArgumentError, ConfigError, DataError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 2))

MAGIC, VERSION = 20240520, 1
HEADER = 256                         # int32 numbers before the tokens
BEGUN = "begun.json"                 # what a corpus is made of and with, and how far it has come
TOKENIZERS = "bytes", "gpt2", "r50k_base", "p50k_base", "p50k_edit"  # those that fit in uint16

def get_tokenizer(name):
    """The tiktoken.Encoding of that name; "bytes": a token for each byte, end-of-text = 256."""
    if name == "bytes":  # nothing is ever merged, so the pattern only sets the speed
        return tiktoken.Encoding(name, pat_str="(?s).{1,64}", special_tokens={"<|endoftext|>": 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    with blame(f"tokenizer={name}: unknown, or not to download; TIKTOKEN_CACHE_DIR may hold it"):
        return tiktoken.get_encoding(name)

def encode(tokenizer, data, new=True):
    """Text as uint16 tokens (n,), if `new` after an end-of-text; "<|endoftext|>" in it is text."""
    if tokenizer.name == "bytes":
        tokens = np.frombuffer(data, np.uint8)
    else:
        tokens = tokenizer.encode_to_numpy(data.decode(errors="replace"), disallowed_special=())
    tokens = tokens.astype(np.uint16)
    return np.insert(tokens, 0, tokenizer.eot_token) if new else tokens

@contextlib.contextmanager
def atomic(path):
    """A file to write that gets its name only once it is whole and on the disk."""
    with open(f"{path}.tmp", "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)

def only_one_in(folder, otherwise):
    """Locks a folder at once, until the `with` ends. Raises DataError if another process has it."""
    folder = Path(folder).resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(folder.with_name(f".{folder.name}.lock")).acquire(blocking=False)
    except Timeout:
        raise DataError(f"{folder}: {otherwise}") from None

def write_json(path, value):
    with atomic(path) as file:
        file.write(json.dumps(value, indent=2).encode())

def read_json(path):
    with blame(f"{path}: expected a JSON object, made by prepare.py"):
        return json.loads(Path(path).read_bytes())

def write_shard(path, tokens):
    header = np.zeros(HEADER, "<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    with atomic(path) as file:
        file.write(header)
        file.write(np.ascontiguousarray(tokens, "<u2"))

def read_shard(path):
    """The tokens of a whole shard, a read-only np.memmap (n,) of uint16. Raises DataError."""
    header = np.fromfile(path, "<i4", count=3).tolist()
    count = (os.path.getsize(path) - 4 * HEADER) / 2
    expect(header == [MAGIC, VERSION, count], f"{path}: no whole shard of tokens, as llm.c has it")
    return np.memmap(path, "<u2", mode="r", offset=4 * HEADER)

def read_meta(folder):
    """meta.json, which a whole corpus has. Raises DataError."""
    path = Path(folder, "meta.json")
    expect(path.exists(), f"data={folder}: no full corpus; python prepare.py --source=... makes it")
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
        at_least(1, self, "tokens", "val_tokens", "shard_tokens")
        self.name = self.name or Path(self.source.split("*")[0]).stem.strip(".") or "text"
        self.tokenizer = self.tokenizer or ("gpt2" if self.source in STREAMED else "bytes")
        choose("tokenizer", self.tokenizer,
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
    expect(paths, f"--source={source}: no .txt, .jsonl, .parquet with text, nor stdlib or fineweb")
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
            with blame(f"{path}: expected rows with a string `text`"):
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
    with blame(f"{options.source}: failed; the same command goes on from the last whole shard"):
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
    expect(begun["tokens"], f"{options.source}: all was held out; more text, or fewer --val_tokens")

def fetch_shards(folder, options):
    """FineWeb tokenized by others: a file held out, 103 to train on, of 100M tokens each."""
    import huggingface_hub
    count = math.ceil((options.tokens or 10_300_000_000) / 100_000_000)
    names = [f"fineweb_train_{number:06d}.bin" for number in range(1, count + 1)]
    names.append("fineweb_val_000000.bin")
    with blame(f"--source={options.source}: failed; the same command goes on"):
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
            expect(not any(folder.glob("*.bin")), f"{folder}: made with {'; '.join(other)}; "
                   "go back, give another --name, or remove the folder")
    expect(not any(folder.glob("*.bin")), f"{folder}: has unknown .bin files; give another --name")
    begun = {"source": options.source, "options": made, "shards": 0, "tokens": 0, "place": 0}
    write_json(folder / BEGUN, begun)
    return begun

def prepare(source="stdlib", **options):
    """The command, with its options; returns the corpus's folder. Raises ConfigError, DataError."""
    options = PrepareConfig(source, **options)
    folder = Path(options.data_dir, options.name)
    tokenizer = get_tokenizer(options.tokenizer)
    paths = [] if source in STREAMED else source_files(source, options.seed)
    with only_one_in(folder, "another prepare.py is at work here; wait, or give another --name"):
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
    run_script(lambda words: prepare(**typed(words, __doc__, PrepareConfig)))

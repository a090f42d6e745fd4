"""Turn text into shards of tokens for train.py; and the reader of every script's options.

    python prepare.py                                                    # the Python standard library's source
    python prepare.py --source="books/*.txt" --tokenizer=gpt2            # your own .txt, .jsonl or .parquet
    python prepare.py --source=fineweb --tokens=1_000_000_000            # FineWeb, streamed
    python prepare.py --source=fineweb10B-gpt2 --tokens=1_000_000_000    # FineWeb, tokenized by others

A corpus is a folder data/<name>/ of shards in llm.c's format, <name>_val_000000.bin held out, <name>_train_000001.bin
and so on to train on, and of meta.json, written last. Files come in a seeded order. The first are held out: 5% of the
text, at most 10M tokens, whole documents or a lone text's first lines. Stopped, it goes on from the last whole shard.
"""
import argparse, contextlib, dataclasses, difflib, glob, json, os, random, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tiktoken
from filelock import FileLock
from tqdm import tqdm
from model import ConfigError, option

MAGIC, VERSION, HEADER = 20240520, 1, 256
PIECE = 900_000  # bytes of a text that are read and encoded at a time; a million spaces are too many for tiktoken
TOKENIZERS = "bytes", "gpt2", "r50k_base", "p50k_base", "p50k_edit"  # tiktoken's others do not fit in uint16

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
        raise DataError(f"{message} ({type(error).__name__}: {' '.join(str(error).split())[:200]})") from error

def choose(name, given, valid, hint=""):
    """Raises ConfigError with the nearest valid name unless `given` is one of `valid`."""
    if given not in valid:
        near = "".join(f"; did you mean {x}?" for x in difflib.get_close_matches(str(given).lower(), valid, 1, 0.4))
        raise ConfigError(f"{name}={given}: expected one of {', '.join(valid)}{near}{hint}")

def check(config, names, holds, expected):
    """Raises ConfigError unless `holds` is true of the options of those names; None, which is not set yet, passes."""
    for name in names.split():
        value = getattr(config, name)
        if value is not None and not holds(value):
            raise ConfigError(f"{name}={value}: expected {expected}")

def parse(cls, argv, description):
    """An instance of cls, a dataclass of model.option's, from words: --key=value, --key value, or --key alone for true.
    Raises ConfigError, one line, for what it can't take; --help prints `description` and the options, and exits."""
    def fail(message):
        raise ConfigError(message)

    def boolean(text):
        return ["false", "true"].index(text.lower()) == 1

    parser = argparse.ArgumentParser(description=description, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error, groups, names = fail, {"options": parser}, [f.name for f in dataclasses.fields(cls)]
    for f in dataclasses.fields(cls):
        kind = next(t for t in (bool, int, float, str) if t in (f.type, *getattr(f.type, "__args__", ())))
        about, title = f.metadata["help"].replace("%", "%%"), f.metadata.get("group", "options")
        groups[title] = groups.get(title) or parser.add_argument_group(title)
        bare = dict(nargs="?", const=kind("true")) if kind is bool or "true" in about.split(":")[0].split(" | ") else {}
        groups[title].add_argument(f"--{f.name}", type=boolean if kind is bool else kind, default=f.default, **bare,
                                   metavar=kind.__name__, help=about + " [%(default)s]" * (f.default is not None))
    given, unknown = parser.parse_known_args(argv)
    for word in unknown:
        key = word.split("=")[0].lstrip("-")
        near = ([name for name in names if "".join(part[0] for part in name.split("_")) == key]  # lr: learning_rate
                or [name for name in names if key in name.split("_")]  # steps: max_steps
                or difflib.get_close_matches(key, names, 1, 0.7))
        fail(f"unknown option {word}; " + (f"did you mean --{' or --'.join(near)}?" if near else "--help lists them"))
    return cls(**vars(given))

def run_script(main):
    """Calls main with the command line's words. What a user can mend ends in one line on stderr and exit code 2, or the
    exception's own `exit_code`; Ctrl-C in 130. Only other exceptions, which are bugs, show a traceback."""
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `| head`, has had enough; at its exit Python would flush once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (Exception, KeyboardInterrupt) as error:
        code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", None)
        said = f"{error.filename}: {error.strerror}" if getattr(error, "filename", None) else str(error)
        if isinstance(error, MemoryError) or "tried to allocate" in said or "out of memory" in said:
            said = f"out of memory; a smaller model or batch takes less ({said:.200})"
        elif code is None and not isinstance(error, (ConfigError, DataError, OSError, UnicodeError)):
            raise
        print(f"{Path(sys.argv[0]).name}: {' '.join(said.split()) or 'stopped; saved work is intact'}", file=sys.stderr)
        sys.exit(code or 2)

def get_tokenizer(name):
    """The tiktoken.Encoding of that name; "bytes" is a token for each byte, and end-of-text = 256."""
    if name == "bytes":  # nothing is ever merged, so the pattern only sets the speed
        return tiktoken.Encoding(name, pat_str=r"[\s\S]{1,64}", special_tokens={"<|endoftext|>": 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    with blame(f"tokenizer={name}: unknown, or not to be downloaded; TIKTOKEN_CACHE_DIR may point at a local copy"):
        return tiktoken.get_encoding(name)

def bytes_per_token(tokenizer):
    """(n_vocab,) length of each token's text; end-of-text has none."""
    eot, tokens = tokenizer.eot_token, range(tokenizer.n_vocab)
    return np.array([0 if token == eot else len(tokenizer.decode_single_token_bytes(token)) for token in tokens])

def encode(tokenizer, data, new=True):
    """Bytes of text as uint16 tokens (n,), if `new` after an end-of-text; an "<|endoftext|>" inside it is mere text."""
    tokens = (np.frombuffer(data, np.uint8) if tokenizer.name == "bytes" else
              tokenizer.encode_to_numpy(data.decode("utf-8", errors="replace"), disallowed_special=()))
    return np.append(np.full(int(new), tokenizer.eot_token, np.uint16), tokens.astype(np.uint16))

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
    with atomic(path) as file:
        file.write(np.array([MAGIC, VERSION, len(tokens)] + [0] * (HEADER - 3), "<i4"))
        file.write(np.ascontiguousarray(tokens, "<u2"))

def read_shard(path):
    """The tokens of a shard, a read-only np.memmap (n,) of uint16. Raises DataError unless it is whole."""
    *kind, count = np.fromfile(path, "<i4", count=3).tolist() or [0]
    found, whole = [*kind, os.path.getsize(path)], [MAGIC, VERSION, 4 * HEADER + 2 * max(1, count)]
    expect(found == whole, f"{path}: magic number, version and bytes are {found}, expected {whole} for {count} tokens")
    return np.memmap(path, "<u2", mode="r", offset=4 * HEADER)

def read_meta(folder):
    """meta.json of a whole corpus. Shards that others made, for llm.c, have none: they are taken to be GPT-2's."""
    if not any(Path(folder, f"{x}.json").exists() for x in ("meta", "state")) and [*Path(folder).glob("*_train_*.bin")]:
        return {"tokenizer": "gpt2", "vocab_size": 50257}
    meta = read_json(Path(folder, "meta.json"))
    for key, kind in dict(tokenizer=str, vocab_size=int, complete=bool, train_tokens=int, val_tokens=int).items():
        expect(type(meta.get(key)) is kind, f"{folder}/meta.json: {key} is {meta.get(key)!r}, expected {kind.__name__}")
    return meta

@dataclasses.dataclass
class PrepareConfig:
    source: str = option("stdlib", "stdlib, fineweb, fineweb10B-gpt2, or a file, a folder or a glob", "options")
    name: str | None = option(None, "of the corpus (from the source)", "options")
    data_dir: str = option("data", "folder of all corpora", "options")
    tokenizer: str | None = option(None, " | ".join(TOKENIZERS) + " (bytes; for fineweb gpt2)", "options")
    subset: str = option("sample-10BT", "of fineweb", "options")
    tokens: int | None = option(None, "stop after that many to train on (all)", "options")
    val_tokens: int | None = option(None, "hold out at most that many (5% of the text, 10M)", "options")
    shard_tokens: int = option(100_000_000, "in a file, about", "options")
    workers: int = option(os.cpu_count() or 1, "threads that encode", "options")
    seed: int = option(1337, "of the order of files", "options")
    force: bool = option(False, "start over, replacing what is there", "options")

    def __post_init__(self):
        check(self, "tokens val_tokens shard_tokens workers", lambda x: x >= 1, "at least 1")
        self.name = (Path(self.name).name if self.name else Path(self.source.split("*")[0]).stem).strip(".") or "text"
        self.tokenizer = self.tokenizer or ("gpt2" if self.source in ("fineweb", "fineweb10B-gpt2") else "bytes")
        choose("tokenizer", self.tokenizer, ["gpt2"] if self.source == "fineweb10B-gpt2" else TOKENIZERS)

def source_files(source, seed):
    """The files of a source on this machine, in a seeded order."""
    if source == "stdlib":  # without test folders, which some installations lack
        root, other = Path(os.__file__).parent, {"site-packages", "dist-packages", "test", "tests"}
        found = [path for path in sorted(root.rglob("*.py")) if not other & {*path.relative_to(root).parts}]
        found = {path.read_bytes(): path for path in found}.values()  # each text once
    else:
        here = [*Path(source).rglob("*")] or map(Path, glob.glob(source, recursive=True) or [source])
        found = [path for path in here if path.suffix.lower() in (".txt", ".jsonl", ".parquet")]
    paths = sorted({path for path in found if path.stat().st_size})
    expect(paths, f"--source={source}: {'empty' if found else 'no .txt, .jsonl, .parquet file, nor stdlib or fineweb'}")
    random.Random(seed).shuffle(paths)
    return paths

def read_files(paths, size=PIECE):
    """Yields (bytes, begins a document?): rows of .jsonl and .parquet files, texts in pieces of about `size` bytes."""
    for path in paths:
        with open(path, "rb") as file, blame(f"{path}: expected rows with a string `text`"):
            if path.suffix.lower() == ".jsonl":
                for number, line in enumerate(filter(bytes.strip, file), 1):
                    with blame(f"{path}, row {number}: expected JSON with a string `text`"):
                        yield json.loads(line)["text"].encode("utf-8", errors="replace"), True
            elif path.suffix.lower() == ".parquet":
                from pyarrow.parquet import ParquetFile
                for batch in ParquetFile(file).iter_batches(batch_size=1000, columns=["text"]):
                    yield from ((text.encode(), True) for text in batch["text"].to_pylist())
            else:
                while data := file.read(size) + file.readline(min(size, 50_000)):  # whole lines, if not overlong
                    yield data, file.tell() == len(data)

def tokenize(folder, options, tokenizer, paths):
    """Writes a source's shards that are not there yet. Where they end is a matter of bytes, known without encoding."""
    total, left = sum(len(data) for data, _ in read_files(paths)), options.val_tokens or 10_000_000
    width, number = 1 if options.tokenizer == "bytes" else 5, 0  # more bytes than most tokens have
    size = left * width if options.val_tokens or not paths else min(left * width, -(-total // 20))
    pieces = read_files(paths, min(size, PIECE) if len(paths) == 1 else PIECE)
    if not paths:
        import datasets
        rows = datasets.load_dataset("HuggingFaceFW/fineweb", name=options.subset, split="train", streaming=True)
        pieces = ((row["text"].encode(), True) for row in rows)
    with ThreadPoolExecutor(options.workers) as pool, tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        while left > 0:
            shard, waiting = bytearray(), []  # threads suffice: tiktoken releases the GIL
            path = folder / f"{options.name}_{'train' if number else 'val'}_{number:06d}.bin"
            while size > 0 and (piece := next(pieces, None)):
                size -= len(piece[0])
                bar.update(len(piece[0]))
                waiting += [] if path.exists() else [pool.submit(encode, tokenizer, *piece)]
                if len(waiting) > 16 * options.workers:
                    shard += waiting.pop(0).result().tobytes()
            shard += b"".join(future.result().tobytes() for future in waiting)
            if shard:
                write_shard(path, np.frombuffer(shard, np.uint16)[:left])
            elif not path.exists():
                break
            left = left - len(read_shard(path)) if number else options.tokens or 10 ** 15
            size, number = width * min(left, options.shard_tokens, 400_000_000), number + 1  # a count is an int32
    expect(number > 1, f"{options.source}: all was held out; give it more text, or fewer --val_tokens and --force")

def prepare(source="stdlib", **options):
    """What the command does, with the same options; returns the corpus's folder. Raises ConfigError and DataError."""
    options = PrepareConfig(source, **options)
    made = {key: value for key, value in vars(options).items() if key not in ("data_dir", "workers", "force")}
    folder, tokenizer = Path(options.data_dir, options.name), get_tokenizer(options.tokenizer)
    paths = [] if source in ("fineweb", "fineweb10B-gpt2") else source_files(source, options.seed)
    folder.mkdir(parents=True, exist_ok=True)
    with blame(f"{folder}: another prepare.py is at work here; wait for it, or give another --name"):
        lock = FileLock(folder / ".lock", blocking=False).acquire()
    with lock, blame(f"--source={source}: failed; the same command goes on from the last whole shard"):
        meta, state = folder / "meta.json", folder / "state.json"
        for path in [meta, state, *folder.glob("*.bin")] if options.force else []:
            path.unlink(missing_ok=True)
        saved = [read_json(path).get("options") or {"source": "unknown"} for path in (meta, state) if path.exists()]
        then = [*saved, {"source": "unknown"}][0] if [*folder.glob("*.bin")] else made
        other = [f"{key}={then[key]}, now {made.get(key)}" for key in then if then[key] != made.get(key)]
        expect(not other, f"{folder}: made with {'; '.join(other)}; go back to that, give another --name, or --force")
        write_json(state, {"options": made})
        if not meta.exists():
            if source == "fineweb10B-gpt2":  # one file held out, 103 to train on, 100M tokens each; names are theirs
                import huggingface_hub
                names = [f"fineweb_{'train' if i else 'val'}_{i:06d}.bin" for i in range(104)]
                huggingface_hub.snapshot_download("kjj0/fineweb10B-gpt2", repo_type="dataset", local_dir=folder,
                                                  allow_patterns=names[:1 - (options.tokens or 10 ** 11) // -10 ** 8])
            else:
                tokenize(folder, options, tokenizer, paths)
            lengths, counts = bytes_per_token(tokenizer).astype(np.uint16), {}
            for split in "train", "val":
                shards = [read_shard(path) for path in folder.glob(f"*_{split}_??????.bin")]
                counts[f"{split}_tokens"] = sum(map(len, shards))
                counts[f"{split}_bytes"] = sum(int(lengths[shard].sum()) for shard in shards)
            shards = sorted(path.name for path in folder.glob("*.bin"))
            versions = {"python": sys.version.split()[0], "tiktoken": tiktoken.__version__, "numpy": np.__version__}
            write_json(meta, {"tokenizer": options.tokenizer, "vocab_size": tokenizer.n_vocab, "source": source,
                              "shards": shards, "options": made, "complete": True, "versions": versions, **counts})
    print("{}: {train_tokens:,} tokens to train on, {val_tokens:,} held out".format(folder, **read_meta(folder)))
    return folder

if __name__ == "__main__":
    run_script(lambda words: prepare(**vars(parse(PrepareConfig, words, __doc__))))

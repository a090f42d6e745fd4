"""Turn text into shards of tokens for train.py.

    python prepare.py                                                    # the Python standard library's source
    python prepare.py --source="books/*.txt" --tokenizer=gpt2            # your own .txt, .jsonl or .parquet
    python prepare.py --source=fineweb --tokens=1_000_000_000            # FineWeb, streamed
    python prepare.py --source=fineweb10B-gpt2 --tokens=1_000_000_000    # FineWeb, tokenized by others

The first needs no download: it reads the .py files of the Python that runs it (without test folders, which some
installations lack), a byte a token. Files are read in a seeded order, and the first documents, 5% of the text
but at most 10M tokens, are held out: of a lone text its last lines. Each corpus is a folder data/<name>/ with

    <name>_val_000000.bin, <name>_train_000001.bin, ...    llm.c's format: 256 int32, then uint16 tokens
    meta.json        tokenizer, counts, source; it is written last and means "complete"

End-of-text precedes each document. The shards depend on text and options, not on --workers or interruptions:
stop at any moment, and the same command goes on from the last whole shard.
"""
import argparse, difflib, functools, glob, hashlib, json, math, mmap, os, platform, random, re, shutil, sys, sysconfig
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

MAGIC, VERSION, HEADER = 20240520, 1, 256
PIECE = 1 << 18  # a longer document is read and encoded in pieces of about this size
FINEWEB = ["fineweb", "fineweb10B-gpt2"]
SOURCES = ["stdlib", *FINEWEB]
ENDINGS = [".txt", ".jsonl", ".parquet"]
META = {"tokenizer": str, "source": str, "vocab_size": int, "train_tokens": int, "val_tokens": int, "train_bytes": int,
        "val_bytes": int, "versions": dict, "options": dict, "complete": bool}

class DataError(Exception):
    """A fault of the data or of the options, told in one line."""

def expect(condition, message):
    if not condition:
        raise DataError(message)

@contextmanager
def blame(message):
    """Turn whatever a library raises into one line."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{message} ({type(error).__name__}: {' '.join(str(error).split())[:200]})") from error

def nearest(word, choices):
    return difflib.get_close_matches(word, choices, n=1, cutoff=0)[0]

# ---------------------------------------------------------------------------------------------- tokenizers
@functools.cache
def get_tokenizer(name):
    """The tiktoken.Encoding of that name; "bytes" is a token for each byte, and end-of-text = 256."""
    if name == "bytes":  # nothing is ever merged, so the pattern only sets the speed
        return tiktoken.Encoding(name, pat_str=r"[\s\S]{1,64}", special_tokens={"<|endoftext|>": 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    known = ["bytes", *tiktoken.list_encoding_names()]
    expect(name in known, f"--tokenizer={name} is unknown, the nearest is {nearest(str(name), known)}")
    with blame(f"--tokenizer={name}: download failed; TIKTOKEN_CACHE_DIR may point at a local copy"):
        tokenizer = tiktoken.get_encoding(name)
    expect(tokenizer.n_vocab <= 65536, f"--tokenizer={name} has {tokenizer.n_vocab} tokens, expected at most 65536 "
                                       "since shards are uint16; the nearest is gpt2")
    return tokenizer

def bytes_per_token(tokenizer):
    """(n_vocab,) length of each token's text; end-of-text has none."""
    lengths = [len(tokenizer.decode_single_token_bytes(token)) for token in range(tokenizer.n_vocab)]
    lengths[tokenizer.eot_token] = 0
    return np.array(lengths)

def encode(tokenizer, data):
    """A document's bytes as uint16 tokens after end-of-text; an "<|endoftext|>" inside it is mere text."""
    if tokenizer.name == "bytes":
        slices = [np.frombuffer(data, np.uint8)]
    else:  # in slices, for tiktoken overflows its stack on a million spaces in a row
        text, size = data.decode("utf-8", errors="replace"), 2 * PIECE
        slices = [tokenizer.encode_to_numpy(text[i:i + size], disallowed_special=()) for i in range(0, len(text), size)]
    return np.concatenate([[tokenizer.eot_token], *slices]).astype(np.uint16)

# --------------------------------------------------------------------------------------------------- files
@contextmanager
def atomic(path):
    """A file to write that gets its name only once it is whole and on the disk."""
    try:
        with open(f"{path}.tmp", "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.tmp", path)
    except BaseException:
        Path(f"{path}.tmp").unlink(missing_ok=True)
        raise

def write_json(path, value):
    with atomic(path) as file:
        file.write(json.dumps(value, indent=2).encode())

def read_json(path):
    expect(os.path.isfile(path), f"{path}: no such file, expected a corpus made by prepare.py")
    with open(path, "rb") as file, blame(f"{path}: not a JSON object"):
        return dict(json.load(file))

def write_shard(path, tokens):
    header = np.zeros(HEADER, "<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    with atomic(path) as file:
        file.writelines([header, np.ascontiguousarray(tokens, "<u2")])

def read_shard(path):
    """The tokens of a shard, as a read-only np.memmap."""
    expect(os.path.isfile(path), f"{path}: no such file, expected a shard made by prepare.py")
    size, start = os.path.getsize(path), 4 * HEADER
    expect(size > start, f"{path}: {size} bytes, expected a header of {start} bytes and at least one token")
    magic, version, count = np.fromfile(path, "<i4", count=3).tolist()
    expect(magic == MAGIC, f"{path}: magic number {magic}, expected {MAGIC}")
    expect(version == VERSION, f"{path}: version {version}, expected {VERSION}")
    expect(size == start + 2 * count, f"{path}: {size} bytes, expected {start + 2 * count} for {count} tokens")
    return np.memmap(path, "<u2", mode="r", offset=start, shape=(count,))

def read_meta(folder):
    """meta.json of a complete corpus. Bits per byte = nats per token * val_tokens / val_bytes / ln 2.

    Shards that others made, for llm.c or modded-nanogpt, have none: they are taken to be of GPT-2's tokens.
    """
    path = Path(folder, "meta.json")
    if not path.exists() and not Path(folder, ".lock").exists() and [*Path(folder).glob("*_train_*.bin")]:
        return {"tokenizer": "gpt2", "vocab_size": 50257}
    meta = read_json(path)
    for key, kind in META.items():
        found = meta.get(key)
        expect(type(found) is kind and found, f"{path}: {key!r} is {found!r}, expected {kind.__name__}, not empty")
    return meta

@contextmanager
def locked(folder):
    with open(folder / ".lock", "w") as file:
        try:
            import fcntl
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # Windows
            pass
        except BlockingIOError:
            raise DataError(f"{folder}: another prepare.py is at work here; wait for it, or give another --name")
        yield

# ----------------------------------------------------------------------------------------------- documents
# Every source is a stream of pieces (begins a document?, bytes), the same each time it is read.
def document(text, where):
    """A text from a row, as a piece of its own."""
    expect(isinstance(text, str), f"{where}: `text` is {type(text).__name__}, expected a string")
    return True, text.encode("utf-8", errors="replace")

def cut(text, low, high, find):
    """Where to cut text from low to high: behind the line that `find` finds, or where there is none before a character."""
    characters = (i for i in range(high, max(low, high - 4), -1) if text[i] & 0xC0 != 0x80)  # of UTF-8
    return find(b"\n", low, high) + 1 or next(characters, high)

def read_text(path, held):
    """A file as one document; its last `held` bytes, or a line more, come first as another, to be held out."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        size = len(text)
        middle = cut(text, max(size // 4, size - held - max(held, 4096)), size - held, text.rfind) if held else size
        for start, end in (middle, size), (0, middle):
            new = True
            while start < end:
                stop = cut(text, start + PIECE, start + 2 * PIECE, text.find) if end - start > 2 * PIECE else end
                yield new, text[start:stop]
                new, start = False, stop

def read_jsonl(path):
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                with blame(f"{path}, line {number}: not JSON"):
                    row = json.loads(line)
                expect(isinstance(row, dict) and "text" in row, f"{path}, line {number}: expected a field `text`")
                yield document(row["text"], f"{path}, line {number}")

def read_parquet(path):
    from pyarrow.parquet import ParquetFile
    with blame(f"{path}: not readable as parquet"), ParquetFile(path) as file:
        names = file.schema_arrow.names
        expect("text" in names, f"{path}: columns {', '.join(names)}, expected a column `text`")
        for batch in file.iter_batches(batch_size=1000, columns=["text"]):
            yield from (document(text, path) for text in batch.column("text").to_pylist())

def read_fineweb(subset, skip):
    import datasets
    with blame("HuggingFaceFW/fineweb: download failed; the same command goes on from the last whole shard"):
        rows = datasets.load_dataset("HuggingFaceFW/fineweb", name=subset, split="train", streaming=True)
        yield from (document(row["text"], "HuggingFaceFW/fineweb") for row in rows.skip(skip))

TABLES = {".jsonl": read_jsonl, ".parquet": read_parquet}

def read_files(paths, held=0):
    for path in paths:
        read = TABLES.get(path.suffix.lower())
        yield from read(path) if read else read_text(path, held)

def text_bytes(paths):
    """Bytes of text in the files, which may hold more than that or compress it; beyond 2 GB any number will do."""
    total = sum(path.stat().st_size for path in paths if path.suffix.lower() not in TABLES)
    for _, data in read_files([path for path in paths if path.suffix.lower() in TABLES]):
        total += len(data)
        if total > 2e9:
            break
    return total

def source_files(source, seed):
    """The files of a source on this machine, in a seeded order."""
    if source == "stdlib":
        paths = []
        for folder, inside, names in os.walk(sysconfig.get_paths()["stdlib"]):
            inside[:] = set(inside) - {"site-packages", "dist-packages", "__pycache__", "test", "tests"}
            paths += [Path(folder, name) for name in names if name.endswith(".py")]
        paths = {path.read_bytes(): path for path in sorted(paths) if path.is_file()}.values()  # each text once
    elif os.path.isdir(source):
        paths = [path for path in Path(source).rglob("*") if path.suffix.lower() in ENDINGS]
    else:
        paths = [Path(path) for path in ([source] if os.path.isfile(source) else glob.glob(source, recursive=True))]
        for path in paths:
            expect(path.suffix.lower() in ENDINGS, f"{path}: ends in {path.suffix!r}, expected {', '.join(ENDINGS)}")
    paths = sorted({path for path in paths if path.is_file() and path.stat().st_size})
    near = difflib.get_close_matches(source, SOURCES, 1)
    expect(paths, f"--source={source}: no text found, expected files ending in {', '.join(ENDINGS)}, or one of "
                  f"{', '.join(SOURCES)}" + (f"; the nearest is {near[0]}" if near else ""))
    random.Random(seed).shuffle(paths)
    return paths

# -------------------------------------------------------------------------------------------------- shards
def encoded(pieces, tokenizer, workers):
    """Yield (begins a document?, bytes, tokens) in the order of `pieces`, of which few are held at a time."""
    def work(new, data):
        return new, len(data), encode(tokenizer, data)[0 if new else 1:]

    waiting = deque()
    with ThreadPoolExecutor(workers) as pool:  # threads suffice: tiktoken releases the GIL
        for piece in pieces:
            waiting.append(pool.submit(work, *piece))
            if len(waiting) > 16 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

def check_same(path, then, now):
    for key in now:
        expect(then.get(key) == now[key], f"{path}: made with {key}={then.get(key)}, now {key}={now[key]}; go back "
                                          "to the former, give another --name, or start over with --force")

def shard_path(folder, name, number):
    return folder / f"{name}_{'train' if number else 'val'}_{number:06d}.bin"

class Writer:
    """Cuts a stream of documents into shards: number 0 to hold out, the others to train on. After each of them,
    state.json takes down how much of the stream they hold."""

    def __init__(self, folder, identity):
        self.folder, self.state, self.held = folder, folder / "state.json", bytearray()
        self.at = {"identity": identity, "pieces": 0, "shards": 0, "tokens": [0, 0], "bytes": [0, 0]}
        if self.state.exists() and (at := read_json(self.state)).get("shards"):
            check_same(self.state, at["identity"], identity)
            self.at = at
        expect(self.state.exists() or not [*folder.glob("*.bin")],
               f"{folder}: holds shards of unknown origin; give another --name, or --force to replace them")
        write_json(self.state, self.at)

    def full(self):
        limits, (val_tokens, _), (val_bytes, _) = self.at["identity"], self.at["tokens"], self.at["bytes"]
        if self.at["shards"]:
            return len(self.held) >= 2 * limits["shard_tokens"]
        if limits["held"]:
            return val_tokens > 0
        if limits["val_tokens"]:
            return val_tokens >= limits["val_tokens"]
        return val_tokens >= 10_000_000 or 0 < limits["text_bytes"] <= 20 * val_bytes

    def add(self, new, size, tokens):
        if self.full() and (new or self.at["shards"]):
            self.close()
        split = min(1, self.at["shards"])
        self.at["pieces"] += 1
        self.at["tokens"][split] += len(tokens)
        self.at["bytes"][split] += size
        self.held += tokens.tobytes()

    def close(self):
        path = shard_path(self.folder, self.at["identity"]["name"], self.at["shards"])
        write_shard(path, np.frombuffer(self.held, np.uint16))
        self.at["shards"] += 1
        self.held = bytearray()
        write_json(self.state, self.at)

def tokenize(folder, options, tokenizer, identity, paths):
    """Write the shards of a source of text; returns the bytes of text held out and to train on."""
    listing, size, held = [(str(path), path.stat().st_size) for path in paths], text_bytes(paths), 0
    if len(paths) == 1 and paths[0].suffix.lower() not in TABLES:  # a lone text: its end, as so many bytes
        token_size = 1 if options.tokenizer == "bytes" else 4  # about
        most = token_size * (options.val_tokens or 10_000_000)
        held = max(1, min(most, size // 2 if options.val_tokens else math.ceil(size / 20)))
    writer = Writer(folder, identity | {"text_bytes": size, "held": held,
                                        "files": hashlib.sha256(repr(listing).encode()).hexdigest()})
    at, done = writer.at, writer.at["pieces"]
    pieces = islice(read_files(paths, held), done, None) if paths else read_fineweb(options.subset, done)
    with tqdm(total=options.tokens, initial=at["tokens"][1], unit=" tokens", unit_scale=True, disable=None) as bar:
        for new, size, tokens in encoded(pieces, tokenizer, options.workers):
            if at["tokens"][1] >= (options.tokens or math.inf):
                break
            writer.add(new, size, tokens)
            bar.update(len(tokens))
    expect(at["shards"], f"--source={options.source}: all {at['tokens'][0]} tokens were held out, expected some to "
                         "train on; give it more text or documents, or fewer --val_tokens")
    if writer.held:
        writer.close()
    return at["bytes"]

def download(folder, options, tokenizer, identity):
    """Fetch shards of 100M tokens that others made; returns the bytes of text held out and to train on."""
    import huggingface_hub
    lengths, size, writer = bytes_per_token(tokenizer), [0, 0], Writer(folder, identity)
    for number in tqdm(range(1 + min(103, math.ceil((options.tokens or 1e12) / 1e8))), unit="shard", disable=None):
        path = shard_path(folder, options.name, number)
        if not path.exists():
            with blame("kjj0/fineweb10B-gpt2: download failed; the same command goes on from here"):
                fetched = huggingface_hub.hf_hub_download(
                    "kjj0/fineweb10B-gpt2", shard_path(folder, "fineweb", number).name, repo_type="dataset", local_dir=folder)
            read_shard(fetched)
            os.replace(fetched, path)
            writer.at["shards"] = number + 1
            write_json(writer.state, writer.at)
        tokens = read_shard(path)
        expect(tokens.max() < len(lengths), f"{path}: token {tokens.max()}, expected at most {len(lengths) - 1}")
        size[number > 0] += sum(int(lengths[tokens[i:i + PIECE]].sum()) for i in range(0, len(tokens), PIECE))
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return size

# ------------------------------------------------------------------------------------------------- command
def parse(argv):
    parser = argparse.ArgumentParser("prepare.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = functools.partial(expect, False)  # one line, without the usage
    add = parser.add_argument
    add("--source", default="stdlib", help="stdlib, fineweb, fineweb10B-gpt2, or a file, a folder or a glob")
    add("--name", help="of the corpus; default: from the source")
    add("--data_dir", default="data", help="folder of all corpora; default: data")
    add("--tokenizer", help="bytes or any of tiktoken's; default: bytes, for fineweb gpt2")
    add("--subset", default="sample-10BT", help="of fineweb; default: sample-10BT")
    add("--tokens", type=int, help="stop after that many to train on; default: all")
    add("--val_tokens", type=int, help="hold out that many; default: 5%% of the text, at most 10M")
    add("--shard_tokens", type=int, default=100_000_000, help="in a file; default: 100_000_000")
    add("--workers", type=int, default=os.cpu_count() or 1, help="threads that encode; default: one a core")
    add("--seed", type=int, default=1337, help="of the order of files; default: 1337")
    add("--force", action="store_true", help="start over, replacing what is there")
    options, unknown = parser.parse_known_args(argv)
    known = [f"--{key}" for key in vars(options)]
    for option in unknown:
        close = nearest(option.split("=")[0], known) if option.startswith("-") else f"--source={option}"
        parser.error(f"unknown option {option}, the nearest is {close}")
    for key in ("tokens", "val_tokens", "shard_tokens", "workers"):
        value = getattr(options, key)
        expect(value is None or value > 0, f"--{key}={value}, expected at least 1")
    expect(options.shard_tokens < 2 ** 31, f"--shard_tokens={options.shard_tokens}, expected less than 2 ** 31")
    fixed = [part for part in Path(options.source).parts if not re.search(r"[*?\[]", part)] or ["text"]    # of a glob
    options.name = options.name or re.sub(r"\W+", "-", Path(fixed[-1]).stem).strip("-") or "text"
    expect(re.fullmatch(r"\w[\w.-]*", options.name), f"--name={options.name}, expected letters, digits, _, - and .")
    options.tokenizer = options.tokenizer or ("gpt2" if options.source in FINEWEB else "bytes")
    expect(options.source != "fineweb10B-gpt2" or options.tokenizer == "gpt2",
           f"--tokenizer={options.tokenizer}, expected gpt2, with which {options.source} was made")
    return options

def prepare(source="stdlib", **options):
    """What the command does, with the same options; returns the corpus's folder."""
    given = {"source": source, **options}.items()
    options = parse([f"--{key}" if value is True else f"--{key}={value}" for key, value in given
                     if value is not None and value is not False])
    identity = {key: value for key, value in vars(options).items() if key not in ("data_dir", "workers", "force")}
    source, folder = options.source, Path(options.data_dir, options.name)
    if (folder / "meta.json").exists() and not options.force:
        check_same(folder / "meta.json", read_meta(folder)["options"], identity)
        print(f"{folder} is complete already; --force makes it anew")
        return folder
    tokenizer = get_tokenizer(options.tokenizer)
    paths = [] if source in FINEWEB else source_files(source, options.seed)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        if options.force:
            for path in [folder / "meta.json", folder / "state.json", *folder.glob("*.bin")]:
                path.unlink(missing_ok=True)
        if source == "fineweb10B-gpt2":
            val_bytes, train_bytes = download(folder, options, tokenizer, identity)
        else:
            val_bytes, train_bytes = tokenize(folder, options, tokenizer, identity, paths)
        shards = {path.name: len(read_shard(path)) for path in sorted(folder.glob(f"{options.name}_*.bin"))}
        val_tokens = shards[shard_path(folder, options.name, 0).name]
        train_tokens = sum(shards.values()) - val_tokens
        write_json(folder / "meta.json", {
            "tokenizer": options.tokenizer, "vocab_size": tokenizer.n_vocab, "source": source,
            "train_tokens": train_tokens, "train_bytes": train_bytes, "val_tokens": val_tokens, "val_bytes": val_bytes,
            "shards": list(shards), "options": identity, "complete": True, "versions": {
                "python": platform.python_version(), "tiktoken": tiktoken.__version__, "numpy": np.__version__}})
    share = val_tokens / (train_tokens + val_tokens)
    note = f" ({share:.0%}, as documents are held out whole)" if share > 0.1 and not options.val_tokens else ""
    print(f"{folder}: {train_tokens:,} tokens to train on, {val_tokens:,} held out{note}")
    return folder

if __name__ == "__main__":
    try:
        prepare(**vars(parse(sys.argv[1:])))
    except (DataError, OSError) as error:
        sys.exit(print(f"prepare.py: {error}", file=sys.stderr) or 2)
    except KeyboardInterrupt:
        message = "prepare.py: interrupted; the same command goes on from the last whole shard"
        sys.exit(print(message, file=sys.stderr) or 130)

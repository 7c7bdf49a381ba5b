"""Bundles from nobody in particular: whatever the bytes are, the outcome is an error of ours or a unit with the right
bytes, and memory stays in proportion to the header."""

import json
import random
import re
import struct
import subprocess
import sys
import textwrap
import tracemalloc
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kitelib.errors import BundleError, FormatError
from kitelib.upcycle.bundle import Bundle
from tests.support.bundle_units import BUNDLE_ROOT, IDENTITY, header_of, raw_file, sample_units, write_raw
from tests.support.bundles import write_units

# Bytes of memory for each byte of a header, while it is opened. The header itself, its text, what is parsed, and what is
# kept; an honest one takes 6.
MOST_PER_BYTE = 16
SLACK = 2**20
SOURCES = {(unit.kind, unit.cf): unit.data.tobytes() for unit in sample_units()}


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    """The same units in three forms."""
    folder = tmp_path_factory.mktemp("wholes")
    made = []
    for name, options in {
        "none": {},
        "zstd": {"compression": "zstd", "hmac_key": b"0123456789abcdef"},
        "entropy": {"compression": "entropy", "labels": {"a": "b"}},
    }.items():
        write_units(folder / name, sample_units(), IDENTITY, BUNDLE_ROOT, **options)
        made.append((folder / name).read_bytes())
    return made


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch") / "x.kite"


def outcome(path):
    """Opens a file and reads all units; anything but an error of ours or the right bytes is a failure of the test."""
    try:
        bundle = Bundle.open(path)
    except BundleError:
        return "refused"
    read = wrong = 0
    with bundle:
        for unit in bundle.units:
            try:
                found = bundle.read(unit)
            except FormatError:
                wrong += 1
                continue
            assert found.data.tobytes() == SOURCES[unit.kind, unit.cf]
            read += 1
    return "read" if not wrong else "in part" if read else "unreadable"


def split(blob):
    (length,) = struct.unpack_from("<Q", blob)
    return blob[8 : 8 + length], blob[8 + length :]


def flip_bit(chance, blob):
    position = chance.randrange(len(blob))
    return blob[:position] + bytes([blob[position] ^ 1 << chance.randrange(8)]) + blob[position + 1 :]


def flip_header_bit(chance, blob):
    header, data = split(blob)
    return raw_file(flip_bit(chance, header), data)


def flip_data_bit(chance, blob):
    header, data = split(blob)
    return raw_file(header, flip_bit(chance, data))


def cut(chance, blob):
    return blob[: chance.randrange(len(blob))]


def extend(chance, blob):
    return blob + chance.randbytes(chance.randrange(1, 100))


def other_length(chance, blob):
    (length,) = struct.unpack_from("<Q", blob)
    wrong = chance.choice([0, 1, length - 1, length + 1, length + 64, len(blob), 2**24, 2**31, 2**63, 2**64 - 1])
    return struct.pack("<Q", wrong) + blob[8:]


def other_number(chance, blob):
    """Some number becomes another one, a giant one, or none."""
    header, data = split(blob)
    number = chance.choice(list(re.finditer(rb"(?<![0-9a-f])\d+(?![0-9a-f])", header)))
    value = chance.choice([b"0", b"1", b"-1", b"96", b"1e9", b"1.5", b"NaN", b"1e999", b"9" * 30, b"9" * 5000, b"null"])
    return raw_file(header[: number.start()] + value + header[number.end() :], data)


def remove_bytes(chance, blob):
    start = chance.randrange(8, len(blob))
    return blob[:start] + blob[start + chance.randrange(1, 20) :]


def copy_bytes(chance, blob):
    """A part of the file once more, in another place: names and fields that are there twice."""
    start, to = chance.randrange(8, len(blob)), chance.randrange(8, len(blob))
    return blob[:to] + blob[start : start + chance.randrange(1, 300)] + blob[to:]


def swap_tensors(chance, blob):
    """Two tensors change places, types or shapes."""
    header, data = split(blob)
    plain = json.loads(header)
    first, second = chance.sample([name for name in plain if name != "__metadata__"], 2)
    field = chance.choice(["data_offsets", "dtype", "shape", None])
    if field is None:
        plain[first], plain[second] = plain[second], plain[first]
    else:
        plain[first][field], plain[second][field] = plain[second][field], plain[first][field]
    return raw_file(plain, data)


def double_key(chance, blob):
    header, data = split(blob)
    key = chance.choice(list(re.finditer(rb'"[a-z_.0-9]+":', header)))
    return raw_file(header[: key.start()] + key.group() + b"0," + header[key.start() :], data)


def edit_unit(chance, blob):
    """A field of a unit becomes that of another, or something else."""
    header, data = split(blob)
    plain = json.loads(header)
    units = json.loads(plain["__metadata__"]["kite.units"])
    first, second = chance.sample(units, 2)
    field = chance.choice(list(first))
    first[field] = chance.choice(
        [
            second[field],
            None,
            "",
            [],
            {},
            -1,
            2**31,
            2**64,
            True,
            "raw/none",
            "raw/zstd",
            "int8_kv/none",
            "fp16_quant/zstd",
        ]
    )
    plain["__metadata__"]["kite.units"] = json.dumps(units)
    return raw_file(plain, data)


def shift_data(chance, blob):
    """The tensors no longer lie where they lay."""
    header, data = split(blob)
    plain = json.loads(header)
    name = chance.choice([name for name in plain if name != "__metadata__"])
    by = chance.choice([-8, -1, 1, 2, 8, 2**40])
    start, stop = plain[name]["data_offsets"]
    plain[name]["data_offsets"] = [start + by, stop + by * chance.randrange(2)]
    return raw_file(plain, data)


MUTATIONS = [
    flip_bit,
    flip_header_bit,
    flip_data_bit,
    cut,
    extend,
    other_length,
    other_number,
    remove_bytes,
    copy_bytes,
    swap_tensors,
    double_key,
    edit_unit,
    shift_data,
]


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_mutated_files(mutate, wholes, scratch):
    chance = random.Random(mutate.__name__)
    seen = Counter()
    for turn in range(250):
        blob = wholes[turn % len(wholes)]
        scratch.write_bytes(mutate(chance, blob))
        seen[outcome(scratch)] += 1
    assert seen["refused"] + seen["in part"] + seen["unreadable"] > 50, seen


def test_whole_files_are_read(wholes, scratch):
    for blob in wholes:
        scratch.write_bytes(blob)
        assert outcome(scratch) == "read"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner, max_size=5),
    max_leaves=20,
)
TENSOR = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F16", "BF16", "F32", "U8", "I64", "f16", "", 1]) | JSON,
        "shape": st.lists(st.integers(-1, 2**64), max_size=9) | JSON,
        "data_offsets": st.lists(st.integers(-1, 2**64), max_size=3) | JSON,
    },
    optional={"more": JSON},
)
RELAXED = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@RELAXED
@given(st.binary(max_size=300) | st.builds(raw_file, st.binary(max_size=200), st.binary(max_size=50)))
def test_any_bytes(scratch, blob):
    scratch.write_bytes(blob)
    assert outcome(scratch) == "refused"


@RELAXED
@given(st.dictionaries(st.text(max_size=20), TENSOR | JSON, max_size=4), JSON, st.binary(max_size=100))
def test_any_header(scratch, tensors, metadata, data):
    write_raw(scratch, {**tensors, "__metadata__": metadata}, data)
    assert outcome(scratch) == "refused"


@RELAXED
@given(st.data())
def test_any_metadata_around_real_tensors(wholes, scratch, data):
    """One value somewhere in the manifest becomes any JSON at all."""
    header, payloads = split(data.draw(st.sampled_from(wholes)))
    plain = json.loads(header)
    texts = plain["__metadata__"]
    name = data.draw(st.sampled_from(["kite.bundle", "kite.units"]))
    inner = json.loads(texts[name])
    holder = [inner]
    at, key = holder, 0
    while data.draw(st.booleans()) and isinstance(at[key], (dict, list)) and at[key]:
        at, key = (
            at[key],
            data.draw(st.sampled_from(list(at[key]) if isinstance(at[key], dict) else range(len(at[key])))),
        )
    at[key] = data.draw(JSON)
    texts[name] = json.dumps(holder[0])
    write_raw(scratch, plain, payloads)
    outcome(scratch)


def many(item, size, per):
    """As many items as make about `size` bytes, if each has `per`."""
    return ",".join(item(index) for index in range(size // per))


def inside(text):
    return json.dumps({"__metadata__": {"kite.bundle": text, "kite.units": text}})


# Headers of about `size` bytes that make many objects of each byte, by what they are made of.
DENSE = {
    "lists": lambda size: '{"__metadata__":[' + many(lambda _: "[]", size, 3) + "]}",
    "objects": lambda size: '{"__metadata__":[' + many(lambda _: "{}", size, 3) + "]}",
    "keys": lambda size: '{"__metadata__":{' + many(lambda index: f'"{index:x}":""', size, 12) + "}}",
    "sparse keys": lambda size: '{"__metadata__":{' + many(lambda index: f'"{index:017x}":1', size, 22) + "}}",
    "texts": lambda size: '{"__metadata__":[' + many(lambda index: f'"{index:x}"', size, 9) + "]}",
    "sparse texts": lambda size: '{"__metadata__":[' + many(lambda index: f'"{index:013x}"', size, 16) + "]}",
    "numbers": lambda size: '{"__metadata__":[' + many(lambda index: f"{index + 1000}", size, 7) + "]}",
    "floats": lambda size: '{"__metadata__":[' + many(lambda index: f"{index}e1", size, 7) + "]}",
    "tensors": lambda size: (
        "{" + many(lambda index: f'"{index:x}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', size, 62) + "}"
    ),
    "sparse tensors": lambda size: (
        "{" + many(lambda index: f'"{index:060x}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', size, 116) + "}"
    ),
    "deep": lambda size: '{"a":' * (size // 6) + "1" + "}" * (size // 6),
    "deep lists": lambda size: '{"a":' + "[" * (size // 2) + "]" * (size // 2) + "}",
    "sparse deep lists": lambda size: '{"a":' + "[" * (size // 64) + "]" * (size // 64) + " " * size + "}",
    "digits": lambda size: '{"a":' + "9" * size + "}",
    "wide text": lambda size: '{"__metadata__":{"a":"\\ud83d\\ude00' + "x" * size + '"}}',
    "spaces": lambda size: "{" + " " * size + "}",
    "lists inside": lambda size: inside("[" + many(lambda _: "[]", size, 6) + "]"),
    "escaped lists inside": lambda size: inside("\n").replace("\\n", "\\u005b" * (size // 12)),
    "keys inside": lambda size: inside("{" + many(lambda index: f'"{index:x}":1', size, 18) + "}"),
    "sparse keys inside": lambda size: inside("{" + many(lambda index: f'"{index:018x}":1', size, 48) + "}"),
    "sparse lists inside": lambda size: inside("[" + many(lambda _: "[]" + " " * 62, size, 130) + "]"),
    "texts inside": lambda size: inside("[" + many(lambda index: f'"{index:014x}"', size, 38) + "]"),
    "numbers inside": lambda size: inside("[" + many(lambda index: f"{index + 1000}", size, 14) + "]"),
}


@pytest.mark.parametrize("name", DENSE)
def test_memory_is_in_proportion_to_the_header(name, scratch):
    header = DENSE[name](2**19)
    write_raw(scratch, header)
    # Once for what is allocated once, like the modules that a check imports.
    for _ in range(2):
        tracemalloc.start()
        try:
            with pytest.raises(BundleError):
                Bundle.open(scratch)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < MOST_PER_BYTE * len(header) + SLACK, f"{peak / len(header):.1f} bytes per byte"


def test_memory_of_an_honest_bundle(scratch):
    units = [unit for unit in sample_units() if unit.kind == "kv"]
    write_units(scratch, units, IDENTITY, BUNDLE_ROOT)
    header, _ = header_of(scratch)
    (entry, *_) = json.loads(header["__metadata__"]["kite.units"])
    tensor = header[f"kv.{entry['cf']}"]
    entries, tensors = [], {}
    for index in range(2000):
        cf = f"{index:064x}"
        entries.append({**entry, "cf": cf})
        tensors[f"kv.{cf}"] = {**tensor, "data_offsets": [96 * index, 96 * index + 96]}
    header = {"__metadata__": {**header["__metadata__"], "kite.units": json.dumps(entries)}, **tensors}
    write_raw(scratch, header, bytes(96 * 2000))
    length = struct.unpack("<Q", scratch.read_bytes()[:8])[0]
    tracemalloc.start()
    try:
        with Bundle.open(scratch) as bundle:
            kept, peak = tracemalloc.get_traced_memory()
        assert len(bundle.units) == 2000
    finally:
        tracemalloc.stop()
    assert kept < 3 * length
    assert peak < 9 * length


def test_a_header_that_asks_for_everything_is_not_read(scratch):
    """The file is as long as it says, all of it a hole: the length is refused before anything is read."""
    for length in (2**24 + 1, 2**33):
        with scratch.open("wb") as file:
            file.write(struct.pack("<Q", length) + b"{")
            file.truncate(8 + length)
        tracemalloc.start()
        try:
            with pytest.raises(BundleError, match="at most 16777216 are read"):
                Bundle.open(scratch)
            assert tracemalloc.get_traced_memory()[1] < 100_000
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("claim", [2**20, 2**29, 2**30 + 1, 2**40])
def test_a_compressed_unit_that_claims_to_be_large(wholes, scratch, claim):
    """What a unit says of its size is compared with its frame before anything is allocated."""
    header, data = split(wholes[1])
    plain = json.loads(header)
    units = json.loads(plain["__metadata__"]["kite.units"])
    for unit in units:
        if unit["codec"] == "paged_kvcache_v2/zstd" and unit["dtype"] == "float16":
            unit["data_bytes"], unit["shape"] = claim, [claim // 2]
    plain["__metadata__"]["kite.units"] = json.dumps(units)
    write_raw(scratch, plain, data)
    tracemalloc.start()
    try:
        outcome(scratch)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_hostile_headers_under_a_limit_of_memory(scratch):
    """16 MiB of header; the process may take 512 MiB of address space more than it has."""
    paths = []
    for name in ("lists", "sparse keys", "sparse texts", "wide text", "spaces"):
        paths.append(write_raw(scratch.with_name(name), DENSE[name](2**24 - 2**16)))
        assert 2**23 < paths[-1].stat().st_size < 2**24
    code = """
        import resource, sys
        from kitelib.errors import BundleError
        from kitelib.upcycle.bundle import Bundle
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, used + 2**29))
        for path in sys.argv[1:]:
            try:
                Bundle.open(path)
            except BundleError as error:
                print("refused", len(str(error)) < 2000, "memory" in str(error))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, paths)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["refused True False"] * len(paths)

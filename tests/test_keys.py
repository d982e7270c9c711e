"""Names: published vectors, a second implementation written from docs/keys.md, and what must change a name."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import keys as naming
from perdure.errors import InvalidArgument

VECTORS = json.loads((Path(__file__).parent / "vectors" / "keys.json").read_text())
LAYOUT = naming.KVLayout(4, 4096, "bfloat16", "LBHNC", layers=(0, 2), kv_heads=(0, 3))
IDENTITY = naming.KeyspaceIdentity("model", "sha256:00", LAYOUT)


# --- the second implementation: from docs/keys.md, with nothing of perdure
def derive(secret: bytes, purpose: str, data: bytes = b"") -> bytes:
    return hmac.new(secret, purpose.encode() + b"\0" + data, hashlib.sha256).digest()


def fields(pairs: list[tuple[str, bytes]]) -> bytes:
    return b"".join(struct.pack("<I", len(n)) + n.encode() + struct.pack("<I", len(v)) + v for n, v in pairs)


def second_digests(root: bytes, case: dict[str, Any]) -> tuple[bytes, bytes, bytes]:
    """(tenant id, shared, digest) of a vector's keyspace."""
    tenant = derive(root, "perdure/1/tenant", case["tenant"].encode())
    lay, text = case["layout"], lambda name: str(case.get(name, "")).encode()
    u64 = lambda value: struct.pack("<Q", value)  # noqa: E731
    shared = [
        ("model", text("model")),
        ("weights", text("weights")),
        ("lora", text("lora")),
        ("draft", text("draft")),
        ("block_tokens", u64(lay["block_tokens"])),
        ("dtype", lay["dtype"].encode()),
        ("kv_dtype", (lay["kv_dtype"] or lay["dtype"]).encode()),
        ("order", lay["order"].encode()),
        ("scales", lay["scales"].encode()),
        ("isa", lay["isa"].encode()),
    ]
    shard = [
        ("block_bytes", u64(lay["block_bytes"])),
        ("layers", u64(lay["layers"][0]) + u64(lay["layers"][1])),
        ("kv_heads", u64(lay["kv_heads"][0]) + u64(lay["kv_heads"][1])),
        ("replicated", b"\1" if lay["replicated"] else b"\0"),
        ("group", lay["group"].encode()),
    ]
    first = derive(tenant, "perdure/1/keyspace", struct.pack("<I", 1) + fields(shared))
    return (
        derive(tenant, "perdure/1/tenant-id")[:16],
        first,
        derive(tenant, "perdure/1/shard", first + fields(shard)),
    )


def second_chain(parent: bytes, tokens: list[int], block_tokens: int, extras: dict[int, bytes]) -> list[bytes]:
    keys = []
    for i in range(len(tokens) // block_tokens):
        extra = extras.get(i, b"")
        suffix = struct.pack("<I", len(extra)) + extra if extra else b""
        block = tokens[i * block_tokens : (i + 1) * block_tokens]
        parent = hashlib.sha256(parent + b"".join(struct.pack("<I", t) for t in block) + suffix).digest()
        keys.append(parent)
    return keys


def digests(identity: naming.KeyspaceIdentity, tenant: str = "acme") -> naming.KeyspaceDigests:
    return naming.keyspace_digests(naming.tenant_secret(bytes(32), tenant), identity)


# --- vectors
@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
def test_vectors(case: dict[str, Any]) -> None:
    root = bytes.fromhex(VECTORS["root"])
    layout = naming.KVLayout(**{k: tuple(v) if isinstance(v, list) else v for k, v in case["layout"].items()})
    identity = naming.KeyspaceIdentity(
        case["model"], case["weights"], layout, case.get("lora", ""), case.get("draft", "")
    )
    secret = naming.tenant_secret(root, case["tenant"])
    found = naming.keyspace_digests(secret, identity)
    assert naming.tenant_id(secret).hex() == case["tenant_id"]
    assert (found.shared.hex(), found.digest.hex()) == (case["shared"], case["digest"])
    tenant_id, shared, digest = second_digests(root, case)
    assert (tenant_id.hex(), shared.hex(), digest.hex()) == (case["tenant_id"], case["shared"], case["digest"])
    extras = {int(i): bytes.fromhex(v) for i, v in case["extras"].items()}
    tokens, per_block = case["tokens"], layout.block_tokens
    keys = naming.chain(found.digest, tokens, per_block, extras)
    assert [key.hex() for key in naming.key_list(keys)] == case["keys"]
    assert [key.hex() for key in second_chain(digest, tokens, per_block, extras)] == case["keys"]
    groups = naming.chain_groups(found.shared, keys, tokens, per_block)
    assert [group.hex() for group in groups] == case["groups"]
    adopted = naming.adopt_hashes(found.digest, [b"engine-hash"])
    assert adopted[0].tobytes().hex() == case["adopted"]
    assert derive(digest, "perdure/1/adopt", b"engine-hash").hex() == case["adopted"]


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=60),
    block_tokens=st.integers(1, 9),
    extras=st.dictionaries(st.integers(0, 9), st.binary(min_size=1, max_size=20), max_size=3),
)
def test_chain_equals_the_second_implementation(tokens: list[int], block_tokens: int, extras: dict[int, bytes]) -> None:
    extras = {i: extra for i, extra in extras.items() if i <= len(tokens) // block_tokens}
    array = np.array(tokens, np.int64)
    keys = naming.key_list(naming.chain(b"p" * 32, array, block_tokens, extras))
    assert keys == second_chain(b"p" * 32, tokens, block_tokens, extras)


def test_groups_follow_the_document() -> None:
    tokens = np.arange(4 * 600)
    found = digests(IDENTITY)
    keys = naming.chain(found.digest, tokens, 4)
    groups = naming.chain_groups(found.shared, keys, tokens, 4)
    parent = found.shared
    for start in range(0, 600, 256):
        for i in range(start, min(start + 256, 600)):
            assert groups[i] == parent[:16] + bytes([keys[i, 0] & 31])
        parent = hashlib.sha256(parent + tokens[4 * start : 4 * (start + 256)].astype("<u4").tobytes()).digest()


# --- what a name depends on
CHANGES = {
    "model": "other",
    "weights": "sha256:01",
    "lora": "sha256:aa",
    "draft": "sha256:bb",
    "salt": "x",
    "block_tokens": 8,
    "block_bytes": 8192,
    "dtype": "float16",
    "kv_dtype": "float8_e4m3",
    "order": "LBNHC",
    "layers": (2, 2),
    "kv_heads": (3, 3),
    "replicated": True,
    "group": "window",
    "scales": "sha256:cc",
    "isa": "amx",
}


def changed(name: str) -> naming.KeyspaceIdentity:
    if name in {field.name for field in dataclasses.fields(naming.KVLayout)}:
        return dataclasses.replace(IDENTITY, layout=dataclasses.replace(LAYOUT, **{name: CHANGES[name]}))
    return dataclasses.replace(IDENTITY, **{name: CHANGES[name]})


def test_every_identity_field_is_tried() -> None:
    names = {f.name for f in dataclasses.fields(naming.KVLayout)} | {
        f.name for f in dataclasses.fields(naming.KeyspaceIdentity)
    }
    assert set(CHANGES) == names - {"layout"}


@pytest.mark.parametrize("name", CHANGES)
def test_every_identity_field_changes_the_name(name: str) -> None:
    assert digests(changed(name)).digest != digests(IDENTITY).digest


def test_no_two_keyspaces_share_a_digest() -> None:
    everything = [IDENTITY, *map(changed, CHANGES)]
    found = {digests(identity, tenant).digest for identity in everything for tenant in ("acme", "acm", "acme ")}
    assert len(found) == 3 * len(everything)


def test_fields_cannot_run_into_each_other() -> None:
    one = dataclasses.replace(IDENTITY, model="ab", weights="sha256:c")
    other = dataclasses.replace(IDENTITY, model="abs", weights="ha256:c")
    assert digests(one).digest != digests(other).digest
    assert naming.encode_fields([("a", b"bc")]) != naming.encode_fields([("ab", b"c")])


def test_an_equal_slice_has_an_equal_name_under_any_parallel_size() -> None:
    """Nothing but the slice itself goes in: rank, world size and host have no field."""
    assert {name for name, _ in IDENTITY.shard_fields()} == {
        "block_bytes", "layers", "kv_heads", "replicated", "group",
    }  # fmt: skip
    left = dataclasses.replace(IDENTITY, layout=dataclasses.replace(LAYOUT, kv_heads=(0, 3)))
    right = dataclasses.replace(IDENTITY, layout=dataclasses.replace(LAYOUT, kv_heads=(3, 3)))
    assert digests(left).shared == digests(right).shared
    assert digests(left).digest != digests(right).digest


def test_names_do_not_depend_on_the_process() -> None:
    code = (
        "import numpy as np; from perdure import keys as k;print(k.chain(b'p'*32, np.arange(64), 16).tobytes().hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True, text=True
        ).stdout
        for seed in ("0", "1", "4711")
    }
    assert found == {naming.chain(b"p" * 32, np.arange(64), 16).tobytes().hex() + "\n"}


def test_a_chain_continues_from_a_block() -> None:
    tokens = np.arange(40)
    whole = naming.chain(b"p" * 32, tokens, 4)
    rest = naming.chain(whole[3].tobytes(), tokens[16:], 4)
    assert (whole[4:] == rest).all()


def test_a_changed_token_changes_every_later_key() -> None:
    tokens = np.arange(40)
    before = naming.chain(b"p" * 32, tokens, 4)
    tokens[17] += 1
    after = naming.chain(b"p" * 32, tokens, 4)
    assert (before[:4] == after[:4]).all()
    assert not (before[4:] == after[4:]).all(axis=1).any()


@pytest.mark.parametrize("tokens", [[1, -1, 2, 3], [2**32, 1, 2, 3], [1.5, 2, 3, 4], [[1, 2], [3, 4]], ["a"]])
def test_bad_tokens_are_refused(tokens: Any) -> None:
    with pytest.raises(InvalidArgument, match="token ids"):
        naming.chain(b"p" * 32, tokens, 2)


def test_no_tokens_have_no_keys() -> None:
    assert naming.chain(b"p" * 32, [], 4).shape == (0, 32)
    assert naming.chain(b"p" * 32, [1, 2, 3], 4).shape == (0, 32)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, np.uint32, np.uint64])
def test_the_integer_type_of_tokens_does_not_matter(dtype: type) -> None:
    assert (naming.chain(b"p" * 32, np.arange(32, dtype=dtype), 8) == naming.chain(b"p" * 32, list(range(32)), 8)).all()

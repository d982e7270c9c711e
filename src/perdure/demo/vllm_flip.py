"""One byte of a stored block is flipped: in Perdure's store, and in a file of vLLM's own `fs` tier.

Contract
- The flipped byte lies in the middle of a block in the middle of the prefix, in both.
- For the `fs` tier one vLLM process asks three times, with its own caches emptied between: the second answer comes from
  the files as they were written, the third after the flip. It has no checksum, so what it answers then is its matter.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

from perdure import limits
from perdure.catalog.lmdb import LmdbIndex
from perdure.demo.process import CONNECT_S, DemoError
from perdure.service.client import connect
from perdure.testing.vllm_offline import OfflineEngine

BLOCK_TOKENS = 128  # vLLM's on a CPU
_KEYS_MAX = 100_000
_NUMBER_BYTES = 4  # of a number in fp32: the flipped bit is the highest of its exponent, in its last byte
_FLIPPED_BITS = 0x40
_TIER_BYTES = 1 << 30
_SETTLED_S = 60.0
_POLL_S = 0.25


def seen(store: Path) -> dict[bytes, tuple[bytes, int]]:
    """Where every stored block lies (segment, offset), by key, but for the service's own probe, which is smaller than
    any block of KV. Works beside the service."""
    index = LmdbIndex(store / "index", map_bytes=limits.catalog_map_grow_bytes_min, read_only=True)
    try:
        keys, records = index.scan(b"", _KEYS_MAX)
    finally:
        index.close()
    return {
        key.tobytes(): (bytes(record["segment"]), int(record["offset"]))
        for key, record in zip(keys, records, strict=True)
        if record["block_bytes"] > limits.page_bytes
    }


def settled(count: Any) -> int:
    """Wait until what `count` counts has begun and stays the same; its value. Saves are written behind the answer."""
    before, give_up = 0, time.monotonic() + _SETTLED_S
    while time.monotonic() < give_up:
        time.sleep(_POLL_S)
        now = int(count())
        if now and now == before:
            return now
        before = now
    raise DemoError(f"what was computed was not stored in {_SETTLED_S:.0f} s")


def in_store(store: Path, prefix: dict[bytes, tuple[bytes, int]]) -> dict[str, Any]:
    """Flip it in one of these blocks, which were written in their order; which, and what `explain` says of it then."""
    fresh = sorted((place, key) for key, place in prefix.items())
    if len(fresh) < 3:
        raise DemoError(f"only {len(fresh)} blocks were stored for the prompt that is to be damaged")
    position = len(fresh) // 2
    key = fresh[position][1]
    with connect(store, wait_s=CONNECT_S, name="demo flip") as client:
        where = client.explain(key)
        path, payload = store / where["file"], where["record"]["offset"] + limits.page_bytes
        offset = payload + _middle(where["record"]["stored_bytes"])
        _flip(path, offset)
        verdict = client.explain(key)["verdict"]
    return {
        "key": key.hex(), "position": position, "blocks": len(fresh), "file": where["file"], "offset": offset,
        "verdict": verdict,
    }  # fmt: skip


def explained(store: Path, key: str) -> dict[str, Any]:
    with connect(store, wait_s=CONNECT_S, name="demo look") as client:
        answer: dict[str, Any] = client.explain(bytes.fromhex(key))
    return answer


def in_fs_tier(model: Path, folder: Path, log: Path, prompt: str, answer: dict[str, Any]) -> dict[str, Any]:
    """The same with vLLM's tier: both answers, and how much of the second prompt came from the files."""
    files = folder / "fs"
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",  # vLLM's own refuses a CPU
            "spec_module_path": "perdure.engines.vllm.cpu_spec",
            "cpu_bytes_to_use": _TIER_BYTES,
            "secondary_tiers": [{"type": "fs", "root_dir": str(files)}],
        },
    }
    with OfflineEngine({"model": model, "dtype": "float32"}, log, transfer=transfer) as engine:
        [before] = engine.generate([prompt], **answer)

        def stored() -> int:
            engine.generate(["."], max_tokens=1)  # a step, in which vLLM looks after its stores
            return len(_blocks(files))

        settled(stored)
        engine.call("reset_prefix_cache", reset_connector=True)
        [control] = engine.generate([prompt], **answer)
        hashes = _hashes(before.prompt_tokens)
        chosen = next((path for path in _blocks(files) if path.stem == hashes[len(hashes) // 2].hex()), None)
        if chosen is None:
            raise DemoError(f"{files}: no file is named by the hash of block {len(hashes) // 2}")
        offset = _middle(chosen.stat().st_size)
        _flip(chosen, offset)
        engine.call("reset_prefix_cache", reset_connector=True)
        [after] = engine.generate([prompt], **answer)
    return {
        "file": str(chosen.relative_to(files)),
        "offset": offset,
        "blocks": len(hashes),
        "cached_tokens": after.cached_tokens,
        "identical_before": control.tokens == before.tokens,
        "identical": after.tokens == before.tokens,
        "text_before": before.text,
        "text": after.text,
    }


def _blocks(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.bin") if path.is_file()]


def _hashes(tokens: list[int]) -> list[bytes]:
    """vLLM's names of full blocks: SHA-256 of (the name before, tokens, no extra keys) in canonical CBOR."""
    import cbor2

    def digest(value: object) -> bytes:
        return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()

    names = [digest("vllm-none-hash")]
    for at in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        names.append(digest((names[-1], tuple(tokens[at : at + BLOCK_TOKENS]), None)))
    return names[1:]


def _middle(nbytes: int) -> int:
    return nbytes // 2 // _NUMBER_BYTES * _NUMBER_BYTES + _NUMBER_BYTES - 1


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ _FLIPPED_BITS]), offset)
        os.fsync(file.fileno())

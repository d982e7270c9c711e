"""The Merkle tree of RFC 9162 (and 6962): roots, inclusion and consistency proofs. Pure functions and one accumulator.

    leaf = SHA-256(0x00 ‖ data)    node = SHA-256(0x01 ‖ left ‖ right)    split at the largest power of two below n

Contract
- `Tree` appends in O(1) amortised and holds O(log n) hashes, whatever n is; `Tree(size, frontier)` goes on from there.
- Proofs are made from the list of all leaf hashes, by who looks offline; checking one needs the proof alone.
- A checker never raises for a proof that is wrong, however it is wrong: it says False.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from perdure.errors import InvalidArgument

HASH_BYTES = 32
EMPTY_ROOT = hashlib.sha256(b"").digest()


def leaf_hash(data: bytes) -> bytes:
    return hashlib.sha256(b"\x00" + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


class Tree:
    """The hashes of the perfect subtrees that `size` leaves fall into, largest first. Not thread-safe."""

    __slots__ = ("frontier", "size")

    def __init__(self, size: int = 0, frontier: Sequence[bytes] = ()):
        if size < 0 or len(frontier) != size.bit_count() or any(len(one) != HASH_BYTES for one in frontier):
            raise InvalidArgument(f"{len(frontier)} hashes are no frontier of {size} leaves")
        self.size, self.frontier = size, list(frontier)

    def append(self, leaf: bytes) -> None:
        """Add the hash of one more leaf."""
        carry = self.size
        while carry & 1:
            leaf = node_hash(self.frontier.pop(), leaf)
            carry >>= 1
        self.frontier.append(leaf)
        self.size += 1

    def root(self) -> bytes:
        if not self.frontier:
            return EMPTY_ROOT
        found = self.frontier[-1]
        for left in reversed(self.frontier[:-1]):
            found = node_hash(left, found)
        return found


def root(leaves: Sequence[bytes]) -> bytes:
    """Root over leaf hashes."""
    tree = Tree()
    for leaf in leaves:
        tree.append(leaf)
    return tree.root()


def _split(count: int) -> int:
    """The largest power of two below `count` (2 or more)."""
    return 1 << (count - 1).bit_length() - 1


def inclusion_proof(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """PATH(index, leaves) of RFC 9162 section 2.1.3.1, leaf hashes given."""
    if not 0 <= index < len(leaves):
        raise InvalidArgument(f"there is no leaf {index} among {len(leaves)}")
    first, count = 0, len(leaves)
    path: list[bytes] = []
    while count > 1:
        left = _split(count)
        if index - first < left:
            path.append(root(leaves[first + left : first + count]))
            count = left
        else:
            path.append(root(leaves[first : first + left]))
            first, count = first + left, count - left
    return path[::-1]


def consistency_proof(leaves: Sequence[bytes], old_size: int) -> list[bytes]:
    """PROOF(old_size, leaves) of RFC 9162 section 2.1.4.1; empty for 0 and for the whole tree."""
    if not 0 <= old_size <= len(leaves):
        raise InvalidArgument(f"a tree of {len(leaves)} leaves was never larger: {old_size}")
    if old_size in (0, len(leaves)):
        return []
    first, count, size, whole = 0, len(leaves), old_size, True
    path: list[bytes] = []
    while size != count:
        left = _split(count)
        if size <= left:
            path.append(root(leaves[first + left : first + count]))
            count = left
        else:
            path.append(root(leaves[first : first + left]))
            first, count, size, whole = first + left, count - left, size - left, False
    if not whole:
        path.append(root(leaves[first : first + count]))
    return path[::-1]


def included(leaf: bytes, index: int, size: int, proof: Sequence[bytes], expected_root: bytes) -> bool:
    """RFC 9162 section 2.1.3.2."""
    if not 0 <= index < size or any(len(one) != HASH_BYTES for one in proof):
        return False
    number, last, found = index, size - 1, leaf
    for other in proof:
        if last == 0:
            return False
        if number & 1 or number == last:
            found = node_hash(other, found)
            while not number & 1 and number:
                number, last = number >> 1, last >> 1
        else:
            found = node_hash(found, other)
        number, last = number >> 1, last >> 1
    return last == 0 and found == expected_root


def consistent(old_size: int, old_root: bytes, size: int, new_root: bytes, proof: Sequence[bytes]) -> bool:
    """RFC 9162 section 2.1.4.2; a tree is consistent with the empty one, and with itself."""
    if not 0 <= old_size <= size or any(len(one) != HASH_BYTES for one in proof):
        return False
    if old_size == size:
        return not proof and old_root == new_root
    if old_size == 0:
        return not proof and old_root == EMPTY_ROOT
    path = list(proof) if old_size & (old_size - 1) else [old_root, *proof]
    if not path:
        return False
    number, last = old_size - 1, size - 1
    while number & 1:
        number, last = number >> 1, last >> 1
    old, new = path[0], path[0]
    for other in path[1:]:
        if last == 0:
            return False
        if number & 1 or number == last:
            old, new = node_hash(other, old), node_hash(other, new)
            while not number & 1 and number:
                number, last = number >> 1, last >> 1
        else:
            new = node_hash(new, other)
        number, last = number >> 1, last >> 1
    return last == 0 and old == old_root and new == new_root

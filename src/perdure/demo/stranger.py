"""python stranger.py RECEIPT.json KEY: whether the log whose verifier key is KEY has recorded this erasure."""

import base64, hashlib, json, sys
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

receipt, (name, key_id, public) = json.load(open(sys.argv[1])), sys.argv[2].split("+", 2)


def opened(note: str) -> list[str]:  # the lines that are signed; raises InvalidSignature
    text, _, signatures = note.rpartition("\n\n")
    (raw,) = [base64.b64decode(s.split(" ")[2]) for s in signatures.splitlines() if s.split(" ")[1] == name]
    Ed25519PublicKey.from_public_bytes(base64.b64decode(public)[1:]).verify(raw[4:], f"{text}\n".encode())
    return text.splitlines()


statement, (path, _, checkpoint) = opened(receipt["statement"]), receipt["proof"].partition("\n\n")
(log, size, root), (_, index, *hashes) = opened(checkpoint)[:3], path.splitlines()
at, last, found = int(index.split()[1]), int(size) - 1, hashlib.sha256(b"\0" + receipt["record"].encode()).digest()
for other in map(base64.b64decode, hashes):  # RFC 9162, 2.1.3.2
    found = hashlib.sha256(b"\1" + (other + found if at & 1 or at == last else found + other)).digest()
    while at == last and not at & 1 and at:
        at, last = at >> 1, last >> 1
    at, last = at >> 1, last >> 1
recorded = statement[-1] == "record " + hashlib.sha256(receipt["record"].encode()).hexdigest()
whole = last == 0 and found == base64.b64decode(root) and recorded and (log, statement[0]) == (name, f"{name}/erasure")
print(*statement, sep="\n") if whole else sys.exit("this is no receipt of that log")

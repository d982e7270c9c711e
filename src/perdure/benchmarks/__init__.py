"""Benchmarks that ship with the package: `store` (against fio and memcpy), `peers` (against other KV-cache stores),
`sessions` (many sessions on one service, against an ideal queue).

Contract
- A figure is only ever printed beside a reference that was measured in the same run on the same machine, interleaved
  with ours and repeated. Nothing here holds a figure of its own; only targets are written down.
- Rows that miss their target, and rows where the reference wins, are reported like all others.
- The benchmarks use public calls of the store; they never switch off what users have on (checksums, accounting).
"""

"""What the catalogs of a Valkey Cluster call their keys, and the scripts that change them.

A key is `<store>{<tag>}<kind><name>`: the tag alone decides its hash slot. Tags are chosen so that their slots lie
evenly in the slot space: a cluster of n primaries with equal ranges holds equal shares.

The block index lies in `limits.cluster_index_slots` slots, by the first bits of a block's key. A group is therefore
known from the key alone (reclaim, recovery and quarantine know nothing else of a block), its keys are a range in key
order, and its recency is found by the fingerprint. 64 is the least number that keeps every slot below 2 % of the
records. Looking up 16, 1,000 and 4,096 blocks of a chain took 0.14, 0.63 and 2.4 ms with it (3 primaries on one
2-core machine), 0.17, 1.3 and 3.3 with 256; 0.08, 1.05 and 3.7 with the chain groups of `keys.chain_groups`, which no
caller but a reader knows.
"""

from __future__ import annotations

from functools import cache
from typing import Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from perdure import limits
from perdure.catalog.api import KeyArray
from perdure.catalog.valkey_cluster import SLOTS, key_slot
from perdure.catalog.valkey_link import Script

BLOCK, USAGE, EPOCHS, CLOSED, RECENCY, WHOLE, PUBLISHED = b"b", b"u", b"e", b"c", b"r", b"m", b"w"
DOCUMENTS, DOCUMENT_ORDER, SEGMENTS, SEGMENT_LOG, LEASES = b"d", b"o", b"s", b"n", b"l"
LAST_TOKEN, PINS, RELEASED = b"t", b"p", b"x"
GROUPS: Final = limits.cluster_index_slots
_SHIFT: Final = 8 - (GROUPS.bit_length() - 1)


@cache
def tags(count: int) -> tuple[bytes, ...]:
    """`count` hash tags whose slots lie evenly: the middles of equal ranges."""
    wanted = {(2 * number + 1) * SLOTS // (2 * count): number for number in range(count)}
    found: dict[int, bytes] = {}
    candidate = 0
    while len(found) < count:
        tag = b"%x" % candidate
        number = wanted.get(key_slot(tag))
        if number is not None:
            found.setdefault(number, tag)
        candidate += 1
    return tuple(found[number] for number in range(count))


class Names:
    """Keys of one store, in one of its two halves. `store` is short and has no braces."""

    def __init__(self, store: bytes, count: int):
        self.prefixes = [b"%b{%b}" % (store, tag) for tag in tags(count)]
        self.slots = [key_slot(tag) for tag in tags(count)]
        self.count = count

    def key(self, group: int, kind: bytes, name: bytes = b"") -> bytes:
        return self.prefixes[group] + kind + name

    def group_of(self, name: bytes) -> int:
        """Of a document, lease or segment, by its name."""
        return crc32(name) % self.count


def groups(keys: KeyArray) -> NDArray[np.uint8]:
    """Group of each block key."""
    shifted: NDArray[np.uint8] = keys[:, 0] >> np.uint8(_SHIFT)
    return shifted


def first_key(group: int) -> bytes:
    return bytes([group << _SHIFT]) + bytes(limits.key_bytes - 1)


def groups_of_prints(fingerprints: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Group of each fingerprint, whose lowest byte is the key's first."""
    shifted: NDArray[np.uint8] = (fingerprints & np.uint64(0xFF)).astype(np.uint8) >> np.uint8(_SHIFT)
    return shifted


# --- block index ----------------------------------------------------------------------------------------------

CHANGE: Final = Script("""
-- Compare-and-swap of records, usage with them. KEYS: usage, epochs, closed segments, then blocks. ARGV: channel of the
-- news or '', '1' if closed segments take no more, then per block what is expected ('' nothing, '*' anything) and what
-- it becomes ('' nothing). Returns per block 0 changed meanwhile, 1 done, 2 it is so already; or for all of them E: a
-- record is of an epoch of its tenant that is over; or S: a record is in a segment that was closed.
local floors, closed = {}, {}
for i = 4, #KEYS do
  local new = ARGV[2 * i - 4]
  if #new > 0 then
    local segment, tenant = string.sub(new, 1, 16), string.sub(new, 17, 32)
    if not floors[tenant] then floors[tenant] = tonumber(redis.call('HGET', KEYS[2], tenant) or '0') end
    if struct.unpack('<I4', new, 57) < floors[tenant] then return 'E' end
    if closed[segment] == nil then
      closed[segment] = ARGV[2] == '1' and redis.call('HEXISTS', KEYS[3], segment) == 1
    end
    if closed[segment] then return 'S' end
  end
end
local totals, done, news = {}, {}, {}
local function count(record, sign)
  local tenant = string.sub(record, 17, 32)
  local stored, block = struct.unpack('<I4I4', record, 41)
  local total = totals[tenant] or {0, 0, 0}
  total[1] = total[1] + sign
  total[2] = total[2] + sign * block
  total[3] = total[3] + sign * (math.ceil(stored / 4096) + 1) * 4096
  totals[tenant] = total
end
for i = 4, #KEYS do
  local expected, new = ARGV[2 * i - 5], ARGV[2 * i - 4]
  local present = redis.call('GET', KEYS[i]) or ''
  if present == expected or (expected == '*' and present ~= '') then
    if present ~= '' then count(present, -1) end
    if new == '' then
      redis.call('DEL', KEYS[i])
    else
      redis.call('SET', KEYS[i], new)
      count(new, 1)
      news[#news + 1] = string.sub(KEYS[i], -32, -25)
    end
    done[#done + 1] = '1'
  elseif present == new and new ~= '' then
    done[#done + 1] = '2'
  else
    done[#done + 1] = '0'
  end
end
for tenant, total in pairs(totals) do
  for field = 1, 3 do
    local sum = redis.call('HINCRBY', KEYS[1], tenant .. field, string.format('%.0f', total[field]))
    if field == 1 and sum == 0 then
      redis.call('HDEL', KEYS[1], tenant .. 1, tenant .. 2, tenant .. 3)
      break
    end
  end
end
if ARGV[1] ~= '' and #news > 0 then redis.call('SPUBLISH', ARGV[1], table.concat(news)) end
return table.concat(done)
""")

CLOSE: Final = Script("""
-- KEYS: closed segments. ARGV: segment, now (seconds), age at which a mark is of no use any more (seconds).
local marks = redis.call('HGETALL', KEYS[1])
for i = 1, #marks, 2 do
  if tonumber(marks[i + 1]) + tonumber(ARGV[3]) < tonumber(ARGV[2]) then redis.call('HDEL', KEYS[1], marks[i]) end
end
return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
""")

RAISE_EPOCH: Final = Script("""
-- KEYS: epochs. ARGV: tenant, epoch. It never falls.
local epoch = math.max(tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '0'), tonumber(ARGV[2]))
return redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f', epoch))
""")

TOUCH: Final = Script("""
-- KEYS: recency. ARGV: pairs of fingerprint and minute. A minute never falls.
for i = 1, #ARGV, 2 do
  local present = redis.call('HGET', KEYS[1], ARGV[i])
  if not present or tonumber(present) < tonumber(ARGV[i + 1]) then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
return 1
""")

# --- control store --------------------------------------------------------------------------------------------

SET_DOCUMENT: Final = Script("""
-- KEYS: documents, their order. ARGV: key, this change's own number, expected ('' nothing, else '=' and the value), new
-- (likewise). What is stored is the number of the change and the value, so that a change that is sent again is known.
local present = redis.call('HGET', KEYS[1], ARGV[1])
if present and string.sub(present, 1, 16) == ARGV[2] then
  redis.call('HSET', KEYS[1], ARGV[1], present)
  return 1
end
local value = ''
if present then value = '=' .. string.sub(present, 17) end
if value ~= ARGV[3] then return 0 end
if ARGV[4] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('ZREM', KEYS[2], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. string.sub(ARGV[4], 2))
  redis.call('ZADD', KEYS[2], 0, ARGV[1])
end
return 1
""")

SET_SEGMENT: Final = Script("""
-- KEYS: segments, their log. ARGV: segment, expected record ('' nothing, '*' anything), new record ('' none), number of
-- this change, length of the log. What is so already is done.
local present = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if ARGV[2] ~= '*' and present ~= ARGV[2] and present ~= ARGV[3] then return 0 end
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[5], '*', 'n', ARGV[4], 's', ARGV[1])
return 1
""")

SEGMENT_NEWS: Final = Script("""
-- KEYS: segments, their log. ARGV: the entry that was read last, its number, segments to be told in any case. Returns
-- the last entry, its number, 1 if all segments follow or 0 if those that were changed since do, and name, record (''
-- deleted) of each.
local at = ARGV[1] ~= '' and redis.call('XRANGE', KEYS[2], ARGV[1], ARGV[1])[1]
if at and at[2][2] == ARGV[2] then
  local last, number, seen, out = ARGV[1], ARGV[2], {}, {}
  local function tell(segment)
    if seen[segment] then return end
    seen[segment] = true
    out[#out + 1] = segment
    out[#out + 1] = redis.call('HGET', KEYS[1], segment) or ''
  end
  for _, entry in ipairs(redis.call('XRANGE', KEYS[2], '(' .. last, '+')) do
    last, number = entry[1], entry[2][2]
    tell(entry[2][4])
  end
  for i = 3, #ARGV do tell(ARGV[i]) end
  return {last, number, 0, out}
end
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
return {last and last[1] or '', last and last[2][2] or '', 1, redis.call('HGETALL', KEYS[1])}
""")

ACQUIRE: Final = Script("""
-- KEYS: leases, last token. ARGV: scope, holder, now, deadline (f64). A token is the server's microseconds, or one more
-- than the last: greater than every earlier one, also of those that a failover lost.
local raw = redis.call('HGET', KEYS[1], ARGV[1])
local token
if raw and struct.unpack('<d', raw, 9) > struct.unpack('<d', ARGV[3]) then
  if string.sub(raw, 17) ~= ARGV[2] then return '' end
  token = string.sub(raw, 1, 8)
else
  local time = redis.call('TIME')
  local number = math.max(tonumber(redis.call('GET', KEYS[2]) or '0') + 1, time[1] * 1000000 + time[2])
  redis.call('SET', KEYS[2], string.format('%.0f', number))
  token = struct.pack('<I8', number)
end
local lease = token .. ARGV[4] .. ARGV[2]
redis.call('HSET', KEYS[1], ARGV[1], lease)
return lease
""")

RENEW: Final = Script("""
-- KEYS: leases. ARGV: scope, token, deadline.
local raw = redis.call('HGET', KEYS[1], ARGV[1])
if not raw or string.sub(raw, 1, 8) ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ARGV[3] .. string.sub(raw, 17))
return 1
""")

RELEASE: Final = Script("""
-- KEYS: leases. ARGV: scope, token, channel of the news.
local raw = redis.call('HGET', KEYS[1], ARGV[1])
if not raw or string.sub(raw, 1, 8) ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('SPUBLISH', ARGV[3], ARGV[1])
return 1
""")

END_OWNER: Final = Script("""
-- KEYS: leases, pins. ARGV: owner. Pins are its own by the whole name, leases by its beginning.
local ended = 0
local leases = redis.call('HGETALL', KEYS[1])
for i = 1, #leases, 2 do
  if string.sub(leases[i + 1], 17, 16 + #ARGV[1]) == ARGV[1] then
    ended = ended + redis.call('HDEL', KEYS[1], leases[i])
  end
end
local pins = redis.call('HGETALL', KEYS[2])
for i = 1, #pins, 2 do
  local size = struct.unpack('<I4', pins[i + 1], 9)
  if string.sub(pins[i + 1], 13, 12 + size) == ARGV[1] then ended = ended + redis.call('HDEL', KEYS[2], pins[i]) end
end
return ended
""")

EXPIRE: Final = Script("""
-- KEYS: pins. ARGV: now (f64).
local ended = 0
local pins = redis.call('HGETALL', KEYS[1])
for i = 1, #pins, 2 do
  if struct.unpack('<d', pins[i + 1]) <= struct.unpack('<d', ARGV[1]) then
    ended = ended + redis.call('HDEL', KEYS[1], pins[i])
  end
end
return ended
""")

INDEX_SCRIPTS: Final = (CHANGE, RAISE_EPOCH, CLOSE, TOUCH)
CONTROL_SCRIPTS: Final = (SET_DOCUMENT, SET_SEGMENT, SEGMENT_NEWS, ACQUIRE, RENEW, RELEASE, END_OWNER, EXPIRE)

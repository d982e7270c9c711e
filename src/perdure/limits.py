"""Every limit of the core in one place, the unit last in the name; relations are asserted at import.

These are properties of the format and the engine, not settings: a user-visible setting is an argument of
`perdure.open`. Sizes are bytes, times are seconds unless the name says otherwise.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

# --- format ---------------------------------------------------------------------------------------------------
format_version: Final = 1
key_bytes: Final = 32
id_bytes: Final = 16  # segment ids and tenant ids
page_bytes: Final = 4 * KIB  # records start on page boundaries and their header fills one page (O_DIRECT)
header_bytes: Final = 256  # used part of the header page
block_bytes_max: Final = 64 * MIB
segment_bytes_max: Final = 256 * MIB
segment_bytes_min: Final = 1 * MIB
segment_records_max: Final = segment_bytes_max // (2 * page_bytes)
block_tokens_max: Final = 4096

# --- calls ----------------------------------------------------------------------------------------------------
batch_blocks_max: Final = 65_536
block_parts_max: Final = 16_384
tenant_name_bytes_max: Final = 255
identity_field_bytes_max: Final = 4096
ttl_s_max: Final = 10 * 365 * 86_400
deadline_s_max: Final = 365 * 86_400  # farther away is no deadline: the system's timers end somewhere
capacity_bytes_min: Final = 4 * segment_bytes_min

# --- I/O ------------------------------------------------------------------------------------------------------
io_vectors_max: Final = 1024  # IOV_MAX of Linux
read_io_bytes_max: Final = 512 * KIB  # adjacent records are merged up to this, larger ones are cut into such pieces
write_io_bytes_max: Final = 2 * MIB
inflight_per_device_max: Final = 8  # above this only the latency grows (notes: 2 MB read p50 1.6 ms at 1, 24 ms at 16)
io_threads_max: Final = inflight_per_device_max
scratch_idle_bytes_max: Final = 64 * MIB  # aligned buffers kept for reuse
aio_inflight_per_call_max: Final = 4 * inflight_per_device_max  # kernel AIO slots of one call, over all its devices
aio_contexts_idle_max: Final = 16  # kept for reuse, one per concurrent call; fs.aio-max-nr is shared by the machine

# --- catalog --------------------------------------------------------------------------------------------------
publish_batch_blocks_max: Final = 4096
lookup_gallop_first_blocks: Final = 16
lookup_gallop_factor: Final = 4
ephemeral_publish_delay_s: Final = 0.1
recency_flush_s: Final = 60.0
background_retry_s: Final = 1.0  # then twice as long each time, up to recency_flush_s
recency_tick_s: Final = 0.05  # resolution of recency in memory; on disk it is kept to the minute
index_load_txn_records_max: Final = 50_000
index_load_sort_records_max: Final = 1_000_000  # sorted together in memory: 100 MB, but a third of the time and file
index_map_bytes_min: Final = 1 * MIB
catalog_map_grow_bytes_min: Final = 256 * MIB  # address space, not disk: one batch dirties up to 16 MiB of pages
catalog_map_bytes_max: Final = 4096 * GIB
catalog_reader_threads_max: Final = 1024
catalog_reader_check_s: Final = 60.0  # a reader killed inside a transaction holds back page reuse until then
catalog_reserve_bytes_min: Final = 1 * MIB  # disk space each catalog may still grow by when the disk is full
catalog_reserve_bytes_max: Final = 16 * MIB  # of the block index
control_map_bytes: Final = 1 * GIB  # address space; 100,000 sessions take 100 MB
control_name_bytes_max: Final = 480  # namespace with document key, or lease scope (an LMDB key ends at 511)
document_bytes_max: Final = 64 * MIB
pin_blocks_max: Final = batch_blocks_max

# --- catalog of many hosts (Valkey Cluster) -------------------------------------------------------------------
cluster_index_slots: Final = 64  # the block index lies in so many hash slots: 1.6 % of the records in each
cluster_control_slots: Final = 16
cluster_log_records_max: Final = 4096  # of segments, per slot: who looks twice a second has seen them by then
cluster_script_keys_max: Final = 512  # of one script: the server does nothing else while it runs
cluster_read_s_default: Final = 0.1  # by then what could not be asked is a miss
cluster_write_s_default: Final = 1.0
cluster_call_s_max: Final = 60.0
cluster_wait_ratio: Final = 0.85  # WAIT gets this much of the time left: its answer must still come
cluster_judge_s_min: Final = 0.02  # a node that was given less time is not blamed for not having answered
cluster_retry_s_min: Final = 0.05  # a node that did not answer is left alone so long, then twice as long each time
cluster_retry_s_max: Final = 0.4  # so a healed node is used again within 1 s
cluster_pause_s_min: Final = 0.002  # before asking again while the cluster is moving slots or choosing a primary
cluster_pause_s_max: Final = 0.05
cluster_refresh_s: Final = 0.1  # the map of slots is asked for at most so often
cluster_rounds_attempts_max: Final = 8  # of a publish that meets others' publishes of the same blocks
cluster_connections_idle_max: Final = 32  # per node
cluster_listing_s: Final = 5.0  # a scan goes on for so long with the keys it has listed
cluster_listing_keys: Final = 4096  # per step of a scan
cluster_closed_s: Final = 7 * 86_400  # a writer that slept longer than this may publish what nobody will find
cluster_lease_s_default: Final = 10.0  # who was silent for longer has lost its segments
cluster_lease_s_min: Final = 1.0
tenant_lease_s: Final = 2.0  # a host that has not heard for so long which tenants were erased delivers nothing
tenant_beat_s: Final = 0.5  # and it asks so often
cluster_beat_s: Final = 0.5  # leases are renewed and the set of segments is looked at so often
cluster_unseen_s: Final = 120.0  # twice what NFS remembers that a name was not there (acdirmax): then a file is gone
cluster_orphans_s: Final = 5.0  # open segments of writers that have gone silent are looked for so often
cluster_turn_s: Final = 10.0  # how long to wait for another host that is making room
cluster_clock_s: Final = 60.0  # the cluster's clock is read again so often
cluster_poll_s: Final = 0.5  # waiters look by themselves so often while a shard's channel cannot be listened to

# --- memory ---------------------------------------------------------------------------------------------------
presence_load_max: Final = 0.6  # used slots / slots; 0.7 % of the keys leave their home bucket at 0.48, 2.1 % at 0.6
presence_gallop_first_keys: Final = 64
presence_gallop_keys_max: Final = 4096  # 256 KiB of buckets: stays in the L2 cache
pool_chunk_bytes: Final = 64 * MIB
huge_page_bytes: Final = 2 * MIB
lent_bytes_min: Final = 128 * MIB  # staging and rings of engines may take so much beyond a small pool
adapter_staging_bytes_max: Final = 64 * MIB  # what an engine adapter gathers or scatters at a time; two at once

# --- admission ------------------------------------------------------------------------------------------------
admission_sample_keys_max: Final = 4096  # per keyspace: below 1 MB, and 0.5 ms for an estimate, at most one a second
admission_sample_factor: Final = 8  # at most every eighth key, so that most questions meet none
admission_survivors_keys_min: Final = 64  # standard error of a probability of 0.1: 0.04
admission_heads_entries_max: Final = 4096
admission_seen_entries: Final = 1 << 17  # 1 MiB per keyspace
admission_own_request_s: Final = 1.0  # one request asks several times; 99 % of agents' pauses are 2 s or more
admission_patience_s: Final = 256.0  # by then about three quarters of what is reused has been (chat: 300 s, 79 %)
admission_half_life_s: Final = 3600.0
admission_age_s_max: Final = 2**14  # 4.5 h: older is never; p99 of the gap is 1,710 s (chat)

# --- service --------------------------------------------------------------------------------------------------
wire_version: Final = 3
message_bytes_max: Final = 128 * KIB  # of one datagram; longer batches are cut by the client
message_keys_max: Final = 2048
message_extents_max: Final = 4096  # parts of registered memory in one message, 16 bytes each
message_descriptors_max: Final = 64  # chunks handed over at a time; the kernel's own limit is 253
message_tokens_max: Final = 24_576  # of `explain_prefix`
socket_path_bytes_max: Final = 107  # sun_path
fetch_bytes_max: Final = 256 * MIB  # one message brings at most so much into the DRAM tier, and a quarter of the pool
staging_bytes_max: Final = 64 * MIB  # of one client, taken at its first write
region_bytes_max: Final = 1024 * GIB
regions_per_client_max: Final = 64
spaces_per_client_max: Final = 1024
connections_per_client_max: Final = 512  # each call that waits has one
connections_idle_max: Final = 64  # a client keeps so many for its next calls
connections_max: Final = 4096
service_threads: Final = 32
service_data_threads_max: Final = 24  # of them; what is left answers questions while the disk hangs
switch_interval_s: Final = 0.0005  # Python's 5 ms is what a short call waits behind one busy thread
service_waking_threads: Final = 2  # answer questions that have waited, however many
turn_bytes: Final = 4 * MIB  # what a question may move in one turn of its tenant's; more counts as several
hello_wait_s: Final = 10.0
fetch_grant_s: Final = 30.0  # a client that copies longer than this has died or sleeps
view_ttl_s_default: Final = 30.0
view_ttl_s_max: Final = 600.0
beat_s: Final = 0.05  # rings are drained, clocks told
call_s_default: Final = 30.0  # how long a call without a deadline waits for a service that does not answer
reconnect_wait_s: Final = 0.02
reconnect_s_default: Final = 1.0  # a call without a deadline waits so long for a service that is not there
frame_blocks_bytes_max: Final = 16 * MIB  # of blocks in one frame between hosts (one block more, if it is larger)
frame_payload_bytes_max: Final = frame_blocks_bytes_max + block_bytes_max
transfers_inflight_max: Final = 32  # of blocks from and to other hosts at one time: each may hold a frame's bytes
nixl_landing_regions_max: Final = 4  # a client's buffers for NIXL in use at a time, frame_blocks_bytes_max each
nixl_lost_regions_max: Final = 16  # of them that a node may still write into; then payload goes by TCP
nixl_bounce_regions_max: Final = 4  # a node's buffers for NIXL, frame_blocks_bytes_max each
stall_s: Final = 10.0  # who neither takes nor sends a byte of a frame for so long is cut off
keepalive_idle_s: Final = 5
keepalive_attempts_max: Final = 3
ring_entries: Final = 8192  # touches a client may report between two beats
answer_spin_s: Final = 0.0001  # how long a client looks for an answer before it sleeps: 60 us less per question here
send_wait_s: Final = 1.0  # a client that does not take its answer is cut off

# --- lifetimes ------------------------------------------------------------------------------------------------
lease_ttl_s_default: Final = 30.0
lease_ttl_s_max: Final = 600.0
wait_s_min: Final = 0.001  # to another host; 0 would not be waiting
wait_grace_s: Final = 1.0  # how late the answer of a service may come to who has waited
wait_check_s: Final = 1.0  # waiters look at the lease's clock so often, should nobody wake them: machines sleep
pin_ttl_s_max: Final = 7 * 86_400.0
clock_step_s_max: Final = 60.0
session_name_bytes_max: Final = 255
session_head_bytes_max: Final = KIB
session_ttl_s_default: Final = 7 * 86_400  # idle time after which a session is over
session_ttl_s_max: Final = 365 * 86_400
sessions_counted_s: Final = 10.0  # how old the number in `status` may be
handoff_ttl_s_default: Final = 60
handoff_ttl_s_max: Final = 3600
next_use_s_max: Final = 3600.0
prefetch_batch_bytes: Final = 16 * MIB  # read ahead at a time, behind nobody's back

# --- segments -------------------------------------------------------------------------------------------------
segments_open_max: Final = 64
segment_idle_seal_s: Final = 300.0
kept_back_ratio: Final = 0.01  # of the capacity, and one segment at least: room to seal, copy forward and delete in
segments_per_capacity_min: Final = 16  # a small store gets small segments, so that reclaim has a choice

# --- cold tier (object store) ---------------------------------------------------------------------------------
object_call_s: Final = 10.0  # a ranged read, a deletion; then the store counts as not reachable
object_connect_s: Final = 2.0
object_upload_s: Final = 300.0  # of a whole segment
object_retries_max: Final = 1
object_threads: Final = 16  # ranged reads under way at one time
object_retry_s_min: Final = 0.25  # a store that failed is left alone so long, then twice as long each time
object_retry_s_max: Final = 5.0
cold_read_bytes_max: Final = 8 * MIB  # records of a segment are merged up to this, larger ones are cut into such pieces
cold_gap_bytes_max: Final = 256 * KIB  # so far apart they are still one request: that costs less than a second one
cold_ahead_ratio: Final = 0.1  # of the disk's capacity is made free ahead of the writes that will need it
cold_worth_ratio_min: Final = 0.25  # a segment of which less is live and not released is dropped, not stored again
cold_ttl_s_min: Final = 600.0  # what expires sooner is not worth an upload
cold_check_s: Final = 1.0
promotion_bytes_max: Final = 64 * MIB  # read from the object store and not yet written back to the disk

# --- health ---------------------------------------------------------------------------------------------------
corrupt_window_s: Final = 60.0
corrupt_removals_per_window_max: Final = 32
corrupt_segments_per_window_max: Final = 4
roots_entries_max: Final = 64
roots_known_entries_max: Final = 262_144  # segments whose root is remembered; beyond, all are looked for again
root_window_s: Final = 60.0
root_errors_entries_max: Final = 3  # one more, and no new segment is put there
root_quiet_s: Final = 30.0  # without an error, and with a probe that works: then it is back in service
root_look_s: Final = 5.0  # how often directories that are away, or fail, are looked at again

# --- audit ----------------------------------------------------------------------------------------------------
audit_checkpoint_s: Final = 1.0  # what was appended since is not signed yet
audit_checkpoint_records: Final = 10_000
audit_file_bytes: Final = 64 * MIB  # then it is closed, digested, and another one begun
trace_bytes_max: Final = 128  # of a caller's trace id; a traceparent has 55
audit_denials_records_max: Final = 100  # kinds of denials told one by one, per audit_checkpoint_s; then together
audit_reserve_bytes: Final = 1 * MIB  # disk space kept ahead of the log, so that a full disk shows before an operation

# --- keys -----------------------------------------------------------------------------------------------------
quota_lease_s: Final = 10.0  # what a process may write of a shared quota without asking again ends then
key_lease_s: Final = 300.0  # an unwrapped key is used so long without asking its key service again
key_service_s: Final = 5.0
key_retry_s: Final = 1.0  # a key service that did not answer is left alone so long
erase_settle_s: Final = 30.0  # calls that began before an erasure are waited for so long at a time

# --- governance -----------------------------------------------------------------------------------------------
policy_file_bytes_max: Final = 1 * MIB
policy_rules_entries_max: Final = 1000
holds_entries_max: Final = 1000
publications_entries_max: Final = 128  # of one store; a list of them fits a message
publication_readers_entries_max: Final = 64  # tenants named by one; or all
share_weight_ratio_max: Final = 1000
token_bytes_max: Final = 16 * KIB
token_leeway_s_max: Final = 120.0  # clocks that differ by more are wrong
token_ttl_s_max: Final = 86_400.0
capability_ttl_s_max: Final = 3600.0

# --- operation ------------------------------------------------------------------------------------------------
drain_s_max: Final = 3600.0
service_clients_entries_max: Final = 65_536
metrics_tenants_entries_max: Final = 200  # label values; later tenants are counted together as "other"
metrics_request_bytes_max: Final = 8 * KIB  # request line and headers of one scrape
metrics_request_s: Final = 5.0  # a client that is slower than this is dropped
metrics_threads_max: Final = 8
probe_period_s: Final = 10.0
probe_late_s: Final = 5.0  # a put and get that take longer than this are not ready
probe_ttl_s: Final = 60.0

# --- KV events ------------------------------------------------------------------------------------------------
events_known_entries_max: Final = 262_144  # blocks that were told and can be told as removed: 50 MB
events_replay_entries_max: Final = 10_000  # batches, as in vLLM
events_waiting_entries_max: Final = 10_000


def _check(condition: bool, relation: str) -> None:
    if not condition:  # survives python -O, unlike assert
        raise AssertionError(f"perdure.limits: {relation} does not hold")


_check(header_bytes <= page_bytes, "header_bytes <= page_bytes")
_check(block_bytes_max + page_bytes <= segment_bytes_max, "a largest block fits a segment")
_check(segment_bytes_min % page_bytes == 0 and segment_bytes_max % page_bytes == 0, "segments are whole pages")
_check(segment_records_max <= 1 << 20, "a segment's key has random nonces: few enough records that none comes twice")
_check(recency_flush_s < key_lease_s / 2, "keys are renewed while they are trusted")
_check(read_io_bytes_max <= segment_bytes_max and write_io_bytes_max <= segment_bytes_max, "an I/O fits a segment")
_check(capacity_bytes_min >= 2 * segment_bytes_min, "the smallest store holds an open and a sealed segment")
_check(lease_ttl_s_default <= lease_ttl_s_max, "lease_ttl_s_default <= lease_ttl_s_max")
_check(publish_batch_blocks_max <= batch_blocks_max, "publish_batch_blocks_max <= batch_blocks_max")
_check(block_bytes_max <= adapter_staging_bytes_max, "a largest block fits an adapter's staging")
_check(block_bytes_max <= pool_chunk_bytes, "a largest block fits a pool chunk")
_check(recency_tick_s < recency_flush_s, "recency is flushed less often than it ticks")
_check(message_keys_max * (key_bytes + 16) + 16 * KIB <= message_bytes_max, "keys and their extents fit a message")
_check(message_extents_max * 16 + message_keys_max // 2 * (key_bytes + 4) <= message_bytes_max, "extents fit a message")
_check(4 * message_tokens_max + 4 * KIB <= message_bytes_max, "tokens fit a message")
_check(admission_patience_s < admission_age_s_max, "patience ends within the ages told apart")
_check(service_data_threads_max < service_threads, "some threads are left for questions")
_check(2 * cluster_retry_s_max + cluster_read_s_default < 1.0, "a healed node is used again within a second")
_check(2 * cluster_beat_s <= cluster_lease_s_min, "a lease is renewed before it ends")
_check(2 * tenant_beat_s <= tenant_lease_s, "what was heard of tenants is heard again before it ends")
_check(cluster_wait_ratio < 1, "the answer of WAIT has time to come")
_check(0xFF % (256 // cluster_index_slots) == 256 // cluster_index_slots - 1, "a first byte belongs to one slot")
_check(beat_s <= 0.1, "touches are drained at least ten times a second")
_check(staging_bytes_max >= block_bytes_max, "a largest block fits the staging")
_check(probe_late_s < probe_period_s < probe_ttl_s, "a probe ends before the next, and outlives it")

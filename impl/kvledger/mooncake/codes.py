"""What Mooncake's result codes mean, and which of them prove that no byte can move any more.

What may live here: facts about codes. `exists`, `put` and `get` answer one number per key: put 0, get the bytes read,
exists 1 or 0; below zero a code of this table. Invariant: a code that this table does not know is indeterminate.
"""

from enum import IntEnum


class Code(IntEnum):
    """The codes that kvledger can meet (Mooncake 0.3.13), and one of its own."""

    OK = 0
    INTERNAL_ERROR = -1
    BUFFER_OVERFLOW = -10
    SEGMENT_NOT_FOUND = -101
    SEGMENT_ALREADY_EXISTS = -102
    CLIENT_NOT_FOUND = -103
    NO_AVAILABLE_HANDLE = -200
    INVALID_KEY = -400
    WRITE_FAIL = -500
    INVALID_PARAMS = -600
    ILLEGAL_CLIENT = -601
    INVALID_WRITE = -700
    INVALID_READ = -701
    INVALID_REPLICA = -702
    REPLICA_IS_NOT_READY = -703
    OBJECT_NOT_FOUND = -704
    OBJECT_ALREADY_EXISTS = -705
    OBJECT_HAS_LEASE = -706
    LEASE_EXPIRED = -707
    OBJECT_HAS_REPLICATION_TASK = -708
    REPLICA_IS_GONE = -712
    TRANSFER_FAIL = -800
    CHECKSUM_MISMATCH = -801
    RPC_FAIL = -900
    RPC_TIMEOUT = -901
    UNAVAILABLE_IN_CURRENT_STATUS = -1010
    UNAVAILABLE_IN_CURRENT_MODE = -1011
    TENANT_QUOTA_EXCEEDED = -1700
    TENANT_NOT_REGISTERED = -1701
    CLIENT_CLOSED = -10_001


MEANING: dict[Code, str] = {
    Code.OK: "done",
    Code.INTERNAL_ERROR: "internal error in the store client",
    Code.BUFFER_OVERFLOW: "the client's buffer is too small",
    Code.SEGMENT_NOT_FOUND: "no segment is mounted: the store has no memory",
    Code.SEGMENT_ALREADY_EXISTS: "the segment is mounted already",
    Code.CLIENT_NOT_FOUND: "the master does not know this client (any more)",
    Code.NO_AVAILABLE_HANDLE: "the store is full",
    Code.INVALID_KEY: "the key is not allowed",
    Code.WRITE_FAIL: "the write failed",
    Code.INVALID_PARAMS: "wrong arguments, or a buffer smaller than the object",
    Code.ILLEGAL_CLIENT: "another client owns this write",
    Code.INVALID_WRITE: "the write is not allowed now",
    Code.INVALID_READ: "the read is not allowed now",
    Code.INVALID_REPLICA: "the replica cannot be used",
    Code.REPLICA_IS_NOT_READY: "another client is still writing the object",
    Code.OBJECT_NOT_FOUND: "the object is not in the store",
    Code.OBJECT_ALREADY_EXISTS: "the object is in the store already",
    Code.OBJECT_HAS_LEASE: "a reader holds the object",
    Code.LEASE_EXPIRED: "the read took longer than the key lease; the bytes are not proven",
    Code.OBJECT_HAS_REPLICATION_TASK: "the object is being copied",
    Code.REPLICA_IS_GONE: "the segment that held the object is gone",
    Code.TRANSFER_FAIL: "the client stopped waiting for the transfer; bytes may still be moving",
    Code.CHECKSUM_MISMATCH: "the bytes read are not the bytes stored",
    Code.RPC_FAIL: "the master did not answer",
    Code.RPC_TIMEOUT: "the master did not answer in time",
    Code.UNAVAILABLE_IN_CURRENT_STATUS: "the master is not serving now",
    Code.UNAVAILABLE_IN_CURRENT_MODE: "the master does not offer this operation",
    Code.TENANT_QUOTA_EXCEEDED: "the tenant's quota is used up",
    Code.TENANT_NOT_REGISTERED: "the master does not know the tenant",
    Code.CLIENT_CLOSED: "kvledger's client is closed; nothing was sent",
}

# Decided before any transfer starts, or after it has ended for good: the master's own answers, argument checks, the
# lease check that follows a read. RPC_TIMEOUT is not here: an SSD read between two stores can answer it half way.
_FINAL = frozenset(
    {
        Code.SEGMENT_NOT_FOUND,
        Code.NO_AVAILABLE_HANDLE,
        Code.INVALID_PARAMS,
        Code.REPLICA_IS_NOT_READY,
        Code.OBJECT_NOT_FOUND,
        Code.OBJECT_ALREADY_EXISTS,
        Code.LEASE_EXPIRED,
        Code.RPC_FAIL,
        Code.TENANT_QUOTA_EXCEEDED,
        Code.TENANT_NOT_REGISTERED,
        Code.CLIENT_CLOSED,
    }
)
_NO_SPACE = frozenset({Code.NO_AVAILABLE_HANDLE, Code.TENANT_QUOTA_EXCEEDED})
_MISSING = frozenset({Code.OBJECT_NOT_FOUND, Code.REPLICA_IS_GONE, Code.REPLICA_IS_NOT_READY})
_STORE_DOWN = frozenset({Code.RPC_FAIL, Code.RPC_TIMEOUT, Code.UNAVAILABLE_IN_CURRENT_STATUS})


def is_final(code: int) -> bool:
    """Whether nothing moves any more: success, or a failure that was decided outside a transfer."""
    return code >= 0 or code in _FINAL


def is_indeterminate(code: int) -> bool:
    """Whether bytes may still be moving after the call: -800, and every code that is not known to be final."""
    return not is_final(code)


def is_no_space(code: int) -> bool:
    """Whether the store refused a put for want of room: try again later, under backoff."""
    return code in _NO_SPACE


def is_missing(code: int) -> bool:
    """Whether the object cannot be read because it is not (or not yet) there. For a cache: a miss."""
    return code in _MISSING


def is_store_down(code: int) -> bool:
    """Whether the master did not answer: what a circuit breaker counts."""
    return code in _STORE_DOWN


def describe(code: int) -> str:
    """Name, number and plain meaning, for messages and logs."""
    if code > 0:
        return f"{code} bytes"
    try:
        known = Code(code)
    except ValueError:
        return f"unknown code {code}"
    return f"{known.name} ({code}): {MEANING[known]}"

"""Known hashes: a bounded set that forgets what was noted longest ago."""

from kvledger.protocol.known import KnownHashes


def make_known(*hashes: bytes, capacity: int = 3) -> KnownHashes:
    known = KnownHashes(capacity)
    known.add(hashes)
    return known


def test_holds_as_many_hashes_as_its_capacity():
    known = make_known(b"a", b"b", b"c")
    assert all(h in known for h in (b"a", b"b", b"c"))
    assert len(known) == 3


def test_forgets_the_hash_noted_longest_ago():
    known = make_known(b"a", b"b", b"c")
    known.add([b"a", b"d"])

    assert b"b" not in known
    assert all(h in known for h in (b"a", b"c", b"d"))
    assert len(known) == 3


def test_a_discarded_hash_is_gone_and_an_unknown_one_is_no_error():
    known = make_known(b"a", b"b")
    known.discard([b"x", b"a"])

    assert b"a" not in known
    assert b"b" in known


def test_clear_forgets_everything():
    known = make_known(b"a", b"b")
    known.clear()

    assert b"a" not in known
    assert len(known) == 0

"""Keys: everything that decides the bytes is in the name, and names can be read back."""

import pytest

from kvledger.keys import KeySpace, fingerprint, parse_key


def test_fingerprint_depends_on_every_fact_and_not_on_their_order():
    facts = {"model": "m", "dtype": "bfloat16", "block_size": 16, "tp": 2}
    same = dict(reversed(facts.items()))
    changed = [{**facts, name: "other"} for name in facts]
    assert fingerprint(facts) == fingerprint(same)
    assert len({fingerprint(f) for f in [facts, *changed]}) == 1 + len(facts)


@pytest.mark.parametrize("prefix", ["", "team", "team@prod"])
@pytest.mark.parametrize("epoch", ["", "0a1b2c3d"])
def test_key_is_read_back(prefix, epoch):
    keys = KeySpace(namespace="0123456789abcdef", cache_prefix=prefix)
    key = keys.object_key(shard=3, group=0, block_hash=b"\x00\xff", epoch=epoch)
    parsed = parse_key(key)
    assert key.startswith(keys.prefix(epoch))
    assert (parsed.shard, parsed.group, parsed.block_hash, parsed.cache_prefix) == (3, 0, b"\x00\xff", prefix)
    assert parsed.namespace == (f"0123456789abcdef.{epoch}" if epoch else "0123456789abcdef")


def test_keys_of_shards_groups_epochs_and_prefixes_are_disjoint():
    plain, team = KeySpace(namespace="n"), KeySpace(namespace="n", cache_prefix="team")
    names = [
        plain.object_key(shard=0, group=0, block_hash=b"h"),
        plain.object_key(shard=1, group=0, block_hash=b"h"),
        plain.object_key(shard=0, group=1, block_hash=b"h"),
        plain.object_key(shard=0, group=0, block_hash=b"h", epoch="e"),
        team.object_key(shard=0, group=0, block_hash=b"h"),
    ]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("key", ["", "kvl1@ns", "kvl2@ns@r0@g0@00", "kvl1@ns@x0@g0@00", "model@tp_rank:0@00"])
def test_foreign_key_is_refused(key):
    with pytest.raises(ValueError, match="not a kvledger object key"):
        parse_key(key)

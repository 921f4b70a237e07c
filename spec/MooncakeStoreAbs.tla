-------------------------- MODULE MooncakeStoreAbs --------------------------
(***************************************************************************)
(* What a user of the cache may believe, and nothing about how it is done: *)
(* a map from keys to bytes per rank shard, and readers.  A read that      *)
(* counts returns the bytes last published under that key, and keeps them  *)
(* until it is over.  MCRefine.tla shows that MooncakeStore implements it. *)
(***************************************************************************)
CONSTANTS Shards, Keys, Readers,   \* rank shards; keys, which are named as their right bytes; names of reads
          Nothing                  \* no object
VARIABLES pub,                     \* pub[s][x]: the bytes under key x in shard s, or Nothing
          ans                      \* (shard, read, key, bytes): what has arrived for reads that are not over

AbsInit == pub = [s \in Shards |-> [x \in Keys |-> Nothing]] /\ ans = {}

Publish(s, x) == pub[s][x] = Nothing /\ pub' = [pub EXCEPT ![s][x] = x] /\ UNCHANGED ans   \* never replaces, never wrong
Lose(s, x) == pub[s][x] # Nothing /\ pub' = [pub EXCEPT ![s][x] = Nothing] /\ UNCHANGED ans
Read(s, c, x) == pub[s][x] # Nothing /\ ans' = ans \cup {<<s, c, x, pub[s][x]>>} /\ UNCHANGED pub
Over == ans' \subseteq ans /\ ans' # ans /\ UNCHANGED pub                                  \* reads end, or count as failed

AbsNext == \/ \E s \in Shards, x \in Keys : Publish(s, x) \/ Lose(s, x) \/ \E c \in Readers : Read(s, c, x)
           \/ Over
AbsSpec == AbsInit /\ [][AbsNext]_<<pub, ans>>
=============================================================================

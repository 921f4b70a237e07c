------------------------ MODULE MooncakeStoreLedger ------------------------
(* kvledger's scheduler side: what its functions decide.  These operators carry the names used in
   docs/protocol.md; the actions of MooncakeStore.tla apply them where vLLM calls the hook.
   Everything here is a pure function of the state: no primes.                                    *)
EXTENDS MooncakeStoreTypes

(* BeginGeneration: a fresh tracker.  vLLM hook: update_state_after_alloc at an admission from zero. *)
BeginGeneration(g, ld) == [gen |-> g, front |-> 0, retry |-> {}, load |-> ld, att |-> NoTries]

(* EndGeneration: a request listed as preempted loses its tracker t, unless t is of the generation g that the
   request has now (same-step resume).  vLLM hook: preempted_req_ids in build_connector_meta.                 *)
EndGeneration(x, t, g) == IF x \in preempted /\ t.gen # g THEN NoTrk ELSE t

(* Which blocks of a generation may be stored: t tracker, T block table, n full blocks after this step.
   Nothing while a load is pending, nothing on top of a sync load that some rank has not reported, nothing after a
   refused reset: what core still has in its prefix cache may be of other weights.                                *)
MayStore == ~mute
Storable(t, T, n) ==
  IF ~MayStore \/ t.gen = 0 \/ t.load \in {"pending", "tainted"} \/ Range(T) \cap SyncTargets # {} THEN 0 ELSE n

(* EmitStore: of the due blocks, those not stored nor on their way, as many as the pin budget takes.
   K: the hashes believed to be stored by now; a lookup of the same schedule() has already struck out what it missed. *)
Due(t, n) == {i \in 1..n : i > t.front \/ i \in t.retry}
Want(t, p, n, K) == {i \in Due(t, n) : p[i] \notin K /\ ~HashInFlight(p[i])}
WithinBudget(B) == Cardinality(Pinned \cup B) <= MaxPinned
Take(t, T, p, n, K) ==
  {i \in Want(t, p, n, K) : nextJob <= MaxJob /\ WithinBudget({T[x] : x \in {x \in Want(t, p, n, K) : x <= i}})}
Waits(t, T, p, n, K) == {i \in Want(t, p, n, K) \ Take(t, T, p, n, K) : i > t.front}
NewFront(t, T, p, n, K) == IF Waits(t, T, p, n, K) # {} THEN Min(Waits(t, T, p, n, K)) - 1 ELSE Max({t.front, n})
NewRetry(t, T, p, n, K) ==    \* still due: did not fit, or the same hash is in flight for another job
  {i \in 1..NewFront(t, T, p, n, K) : /\ i > t.front \/ i \in t.retry
                                      /\ i \notin Take(t, T, p, n, K)
                                      /\ i <= n => p[i] \notin K}
EmitStore(r, t, T, p, n, K) ==
  IF Take(t, T, p, n, K) = {} THEN NoJob
  ELSE [kind |-> "store", req |-> r, gen |-> t.gen, sync |-> FALSE, epoch |-> epoch,
        items |-> {<<i, T[i], p[i]>> : i \in Take(t, T, p, n, K)}]
AfterEmit(t, T, p, n, K) ==
  [t EXCEPT !.front = NewFront(t, T, p, n, K), !.retry = NewRetry(t, T, p, n, K)]

(* EmitLoad: one job on exactly the target blocks.  Their owner is the request; nothing is pinned. *)
EmitLoad(r, t, items, sync) ==
  IF t.load # "pending" THEN NoJob
  ELSE [kind |-> "load", req |-> r, gen |-> t.gen, sync |-> sync, epoch |-> epoch, items |-> items]

(* What a job holds: one block-pool reference on every block that a store reads. *)
Pins(J) == IF J.kind = "store" THEN BlocksOf(J.items) ELSE {}

(* ApplyReport: who has reported j once the output of the oldest step is in.  A report of a rank already heard,
   or for a job that is not live, changes nothing (in the code: ProtocolError).                                *)
Reporters(j) == {k \in Ranks : <<k, j>> \in pipe[1].rep}
Heard(j) == IF j \in Live THEN Reporters(j) \ led[j].rep ELSE {}
Count(j) == led[j].cnt + Cardinality(Heard(j))
BadOf(j) == led[j].bad \cup UNION {rk[k][j].bad : k \in Heard(j)}
Complete(j) == j \in Live /\ Count(j) = Cardinality(Ranks)
ApplyReport(j) ==
  IF Complete(j) THEN [st |-> "done", held |-> {}, rep |-> {}, cnt |-> 0, bad |-> {}]
  ELSE [led[j] EXCEPT !.rep = @ \cup Heard(j), !.cnt = Count(j), !.bad = BadOf(j)]

(* Retry: failed blocks go back to the tracker of the generation that issued them, if it still stands; each MaxAttempts times. *)
Current(j, t) == job[j].gen = t.gen
Failed(t) == UNION {BadOf(j) : j \in {j \in JobIds : Complete(j) /\ job[j].kind = "store" /\ Current(j, t)}}
Again(t) == {i \in Failed(t) : t.att[i] < MaxAttempts}
AfterReports(t) == [t EXCEPT !.retry = @ \cup Again(t), !.att = [i \in Idx |-> t.att[i] + Bit(i \in Again(t))]]

(* LoadFinished: the load job of generation t is over, g says whether all of it arrived. *)
LoadFinished(t, sync, g) ==
  IF g THEN [t EXCEPT !.load = "none"] ELSE [t EXCEPT !.load = IF sync THEN "tainted" ELSE "failed"]

(* The answers of has_pending_block_frees and has_pending_push_work. *)
PinsOn(b) == Cardinality({j \in Live : b \in led[j].held})
HasPendingBlockFrees == ~stalled /\ \E b \in Pinned : ref[b] = PinsOn(b)
HasPendingPushWork == Live # {}

(* get_num_new_matched_tokens: blocks beyond the local prefix l that every rank's shard of the store has. *)
LocalHit(p) == MaxOr({n \in 1..(Len(p) - 1) : \A i \in 1..n : \E b \in Blocks : cached[b] = p[i]}, 0)
InStore(h) == \A k \in Ranks : store[k][KeyOf(h, epoch)] # NoObj
LoadsAllowed == DeferFree \/ Depth = 1           \* W-03: a producer under async scheduling must not load
MayLoad(r) == ~nohit[r] /\ ~mute /\ LoadsAllowed
ExternalHit(r, p, l) ==
  IF ~MayLoad(r) \/ nextJob > MaxJob THEN 0
  ELSE MaxOr({n \in 1..(Len(p) - 1 - l) : \A i \in (l + 1)..(l + n) : InStore(p[i])}, 0)
Missed(p, l) ==                                  \* the hash at which the lookup stopped
  {p[i] : i \in {i \in (l + 1)..(Len(p) - 1) : ~InStore(p[i]) /\ \A x \in (l + 1)..(i - 1) : InStore(p[x])}}
Relearned(r, p, l) ==                            \* what a lookup found missing is not believed to be stored any more
  IF SyncLoads = {} \/ ~MayLoad(r) THEN known ELSE known \ Missed(p, l)

=============================================================================

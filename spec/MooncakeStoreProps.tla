------------------------- MODULE MooncakeStoreProps -------------------------
(***************************************************************************)
(* What must hold.  Safety first (a bad thing never happens), then sanity  *)
(* (the model's own bookkeeping), then liveness (a good thing happens).    *)
(***************************************************************************)
EXTENDS MooncakeStore

-----------------------------------------------------------------------------
(* SAFETY *)

(* No memory is given away while a transfer uses it: a block that is being read by a store, or written by a load,
   is neither free nor in the block table of a request to which it means something else, nor to be computed by one.
   One exception (finding F10): a request that a failed sync load has truncated still has the blocks behind its end, and
   computes them again in place; others may be storing them by then.                                                  *)
Shared(b, h) == \A r \in Reqs, i \in Idx : tbl[r][i] = b => rp[r][i] = h /\ (i <= full[r] \/ trk[r].load = "tainted")
PinnedNotFreed ==
  \A t \in dma : \A x \in job[t[2]].items : x[1] = t[3] =>
    /\ ref[x[2]] > 0
    /\ IF job[t[2]].kind = "load" /\ ~job[t[2]].sync
       THEN \A r \in Reqs : x[2] \in Range(tbl[r]) => r = job[t[2]].req
       ELSE Shared(x[2], x[3])

(* No forward that a rank has still to run writes into a block while a transfer of that rank uses it: not one that a load
   fills, and one that a store reads only with the same bytes (finding F10 again).                                    *)
NotOverwritten ==
  \A t \in dma : \A x \in job[t[2]].items : x[1] = t[3] =>
    \A s \in InFlight : s > fwd[t[1]] =>
      \A w \in pipe[s].wr : w[1] = x[2] => /\ job[t[2]].kind = "store" /\ w[2] = x[3]
                                          /\ trk[pipe[s].req].load = "tainted"

(* The store never holds wrong bytes: whatever lies under a key is what a correct computation gives for that hash with
   the weights of the key's epoch.                                                                                 *)
NoPoison == \A k \in Ranks, x \in Keys : store[k][x] \in {NoObj, x}

(* No request goes on with bytes that did not arrive: every block that counts as computed holds its right bytes on
   every rank, except where a step in flight is still to write it or a load has not been reported yet.  After a refused
   reset core itself goes on with bytes of before, until one succeeds.                                             *)
Unsettled(b) == \/ \E s \in InFlight : \E x \in pipe[s].wr : x[1] = b
                \/ \E j \in Live : job[j].kind = "load" /\ b \in BlocksOf(job[j].items)
NoWrongBytesUsed ==
  mute \/ \A r \in Reqs : \A i \in 1..full[r] : Unsettled(tbl[r][i]) \/ \A k \in Ranks : mem[k][tbl[r][i]] = Right(rp[r][i])

(* References are exact: a block has one reference per request that owns it and one per store job that reads it.
   Too few: it is given away too early.  Too many: it is lost for ever.                                       *)
RefsExact ==
  \A b \in Blocks : ref[b] = Cardinality({r \in Reqs : b \in Range(tbl[r])})
                             + Cardinality({j \in JobIds : \E x \in job[j].items : /\ x[2] = b
                                                                                   /\ job[j].kind = "store"
                                                                                   /\ led[j].st = "live"})

(* Each rank's report of a job is counted exactly once, and a job counts as over only when every rank has reported. *)
ReportedOnce ==
  \A j \in JobIds : /\ led[j].cnt = Cardinality(led[j].rep)
                    /\ j \in Live => led[j].rep = {k \in Ranks : rk[k][j].st = "gone"}
                    /\ led[j].st = "done" => \A k \in Ranks : rk[k][j].st = "gone"

(* No rank hands the same report in twice, and none comes for a job that is over: nothing is refused as a protocol error.
   (Not where the aggregator may replay a report: there it is refused, and ReportedOnce shows that this does no harm.)   *)
NoReportRefused ==
  \A s \in InFlight : \A x \in pipe[s].rep :
    /\ x[2] \in Live /\ x[1] \notin led[x[2]].rep
    /\ \A z \in InFlight \ {s} : x \notin pipe[z].rep

(* The budget of pinned blocks is kept, so that saving can never take the whole pool. *)
BudgetKept == Cardinality(Pinned) <= MaxPinned

(* Core is never told to wait for nothing: when has_pending_block_frees is true, reports still come in, and some block is
   held by pins alone, so that a report to come gives it back.                                                         *)
NeverWaitsInVain ==
  HasPendingBlockFrees => ~stalled /\ \E b \in Blocks : ref[b] > 0 /\ \A r \in Reqs : b \notin Range(tbl[r])

(* A report of an older generation changes nothing for the generation that follows it: retries grow only by a job
   that this very generation has issued.                                                                         *)
OldGenerationHarmless ==
  [][\A r \in Reqs : (trk[r].gen # 0 /\ trk'[r].gen = trk[r].gen /\ trk'[r].att # trk[r].att)
                     => \E j \in Live : job[j].gen = trk[r].gen /\ led'[j].st = "done"]_vars

(* After a successful reset nothing older is served: a hit is offered only on objects made with the weights in use. *)
ResetForgets == \A k \in Ranks, h \in Hashes : store[k][KeyOf(h, epoch)] \in {NoObj, Right(h)}

(* A request whose load failed is not offered a hit again. *)
FailedHitNotOffered ==
  [][\A r \in Reqs : nohit[r] /\ nohit'[r] => trk'[r].load # "pending" \/ trk[r].load = "pending"]_vars

(* What a lookup has found missing, or a load, is not believed to be stored any more: else nobody would store it again. *)
MissForgets ==
  [][/\ \A r \in Reqs : rst[r] = "waiting" /\ rst'[r] \in {"running", "loading"} /\ SyncLoads # {} /\ MayLoad(r)
                        => known' \cap Missed(rp[r], LocalHit(rp[r])) = {}
     /\ \A j \in Live : led'[j].st = "done" => known' \cap LostBy(j) = {}]_vars

(* The memory that a hit failed ends with the request: the next one under its id is offered hits again. *)
FailedHitEnds == \A r \in Reqs : nohit[r] => rst[r] \notin {"none", "zombie"}

-----------------------------------------------------------------------------
(* SANITY *)

(* An admitted request has the tracker of its own generation: none is lost, none is left over from before.  One that is not
   admitted has none, except until the next schedule tells of its preemption, or until it is admitted again after a load
   of which nothing arrived.  A refused reset ends generations under requests that run on.                           *)
TrackerCurrent ==
  \A r \in Reqs : IF rst[r] \in {"running", "loading"}
                  THEN rgen[r] # 0 /\ (trk[r].gen = rgen[r] \/ (mute /\ trk[r].gen = 0))
                  ELSE trk[r].gen # 0 => rst[r] = "waiting" /\ (r \in preempted \/ nohit[r])

(* A request that waits for a load has a load job that somebody will report. *)
LoadHasJob == \A r \in Reqs : rst[r] \in {"loading", "zombie"} =>
                Cardinality({j \in Live : job[j].kind = "load" /\ job[j].req = r}) = 1

(* What is to be retried was issued, or at least looked at, before. *)
RetryIssued == \A r \in Reqs : trk[r].retry \subseteq 1..trk[r].front

(* What is believed to be stored by every rank is: the way a failed or retried store ends is never taken for success.
   (Only where nothing is evicted: an object that has gone is believed in until a lookup misses it or a load of it fails.) *)
KnownIsStored == \A h \in known : InStore(h)

(* A job that some rank has not heard of is in a step on its way there, a report that a rank has handed in is in the output
   of one: nothing is lost between scheduler and ranks.                                                              *)
JobsDelivered ==
  \A j \in Live, k \in Ranks :
    /\ rk[k][j].st = "none" => \E s \in InFlight : s > hooked[k] /\ j \in pipe[s].jobs
    /\ rk[k][j].st = "sent" => \E s \in InFlight : s <= polled[k] /\ <<k, j>> \in pipe[s].rep

(* Whom core preempts others for is running and still wants a block that it does not have. *)
OwedNeeds == owed # 0 => /\ rst[owed] = "running" /\ full[owed] < Len(rp[owed])
                         /\ tbl[owed][full[owed] + 1] = 0

(* Only jobs that are running or in quarantine move bytes. *)
DmaHasJob == \A t \in dma : rk[t[1]][t[2]].st \in {"running", "quar"}

-----------------------------------------------------------------------------
(* LIVENESS, under the fairness of MC*.tla and after the environment has become calm *)

PinsReleased == []<>(Pinned = {})                                  \* every pin is given back
BlocksComeBack == []<>(\A b \in Blocks : ref[b] = 0)               \* every block comes back when nothing runs
RequestsFinish == []<>(\A r \in Reqs : rst[r] = "none")            \* every request ends
EngineIdles == <>[](InFlight = {})          \* the engine goes idle and stays so
=============================================================================

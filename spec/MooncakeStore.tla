---------------------------- MODULE MooncakeStore ----------------------------
(***************************************************************************)
(* kvledger: a Mooncake store connector inside vLLM.                       *)
(*                                                                         *)
(* Three parties and their world:                                          *)
(*   core       vLLM's scheduler and block pool (the environment)          *)
(*   scheduler  kvledger's scheduler side: trackers, jobs, pins, reports   *)
(*   ranks      one per worker process: a FIFO of jobs, a transfer thread, *)
(*              KV memory, a GPU stream that runs the forwards in order    *)
(*   store      one object per rank shard and block hash                   *)
(* A DMA is a process of its own: a transfer call may give up while its    *)
(* bytes still move (vllm-contract: Mooncake's -800).                      *)
(*                                                                         *)
(* What a block, a rank's memory cell or a stored object *contains* is     *)
(* part of the state, so wrong bytes are seen, not inferred.               *)
(*                                                                         *)
(* Block hashes chain, so a hash stands for a whole prefix: the right      *)
(* bytes of a block are named by its hash and the weights epoch.  A model  *)
(* step carries the work of one request; a vLLM step that batches n        *)
(* requests is n model steps with nothing between them.                    *)
(***************************************************************************)
EXTENDS MooncakeStoreLedger

-----------------------------------------------------------------------------
(* Core: schedule() with build_connector_meta at its end. *)

(* BuildMeta: the common end of every schedule() that gives request r something to do.  Nothing of another thread
   can come between schedule() and build_connector_meta, so both are one step of the model.
     t tracker of r, T block table, p prompt, n full blocks after the step, new blocks that gained an owner,
     wr/rd what the forward writes and reads, ld/sync a load to emit, K what is believed stored after the lookup. *)
Emitted(r, t, T, p, n, ld, sync, K) ==
  IF ld # {} THEN EmitLoad(r, t, ld, sync) ELSE EmitStore(r, t, T, p, Storable(t, T, n), K)
Send(J) ==
  /\ nextJob' = nextJob + Bit(J # NoJob)
  /\ job' = IF J = NoJob THEN job ELSE [job EXCEPT ![nextJob] = J]
  /\ led' = IF J = NoJob THEN led
            ELSE [led EXCEPT ![nextJob] = [st |-> "live", held |-> Pins(J), rep |-> {}, cnt |-> 0, bad |-> {}]]
  /\ stalled' = (stalled /\ ~(J.kind = "store" /\ Pinned = {}))     \* only the first pins of a busy period restart the clock
Push(r, wr, rd, J) ==
  pipe' = [pipe EXCEPT ![Cardinality(InFlight) + 1] =
            [on |-> TRUE, req |-> r, wr |-> wr, rd |-> rd, rep |-> {},
             jobs |-> IF J = NoJob THEN {} ELSE {nextJob}]]
BuildMeta(r, t, T, p, n, new, wr, rd, ld, sync, K) ==
  LET t1 == EndGeneration(r, t, t.gen)
      J == Emitted(r, t1, T, p, n, ld, sync, K)
      t2 == IF J.kind = "load" THEN t1 ELSE AfterEmit(t1, T, p, Storable(t1, T, n), K)
  IN /\ Send(J)
     /\ Push(r, wr, rd, J)
     /\ ref' = [b \in Blocks |-> ref[b] + Bit(b \in new) + Bit(b \in Pins(J))]
     /\ trk' = [x \in Reqs |-> IF x = r THEN t2 ELSE EndGeneration(x, trk[x], rgen[x])]
     /\ tbl' = [tbl EXCEPT ![r] = T]
     /\ full' = [full EXCEPT ![r] = n]
     /\ preempted' = {} /\ owed' = 0 /\ known' = K
     /\ UNCHANGED <<calm, epoch, mute, hooked, polled, fwd, rk, mem, dma, store, rp>>

Allocatable(B) == B                           \* narrow models: only the lowest free block, for blocks are alike

(* Forward work on one block: index i of r in block b, ending inside the block if part. *)
Indexed(h) == IF h \in Hittable THEN h ELSE NoHash         \* only what some admission can hit need be in the index
Index(b, h) == [cached EXCEPT ![b] = Indexed(h)]
Wr(b, h, part) == {<<b, IF part THEN Part ELSE h>>}
Rd(T, p, n) == {<<T[x], p[x]>> : x \in 1..n}

(* ACTION  Compute(r, b, part)            WHO core, then kvledger's scheduler side
   CODE    schedule(): a RUNNING request gets a chunk; build_connector_meta -> side.build_step
   The next block of r is computed: b is the block it has there, or a free one.  A full block enters the
   prefix cache at once (before it is computed, as in vLLM).
   SIMPLIFIED a chunk is one block, whole or in part; which free block is taken is not determined.   *)
Compute(r, b, part) ==
  /\ Room /\ owed \in {0, r}
  /\ rst[r] = "running" /\ full[r] < Len(rp[r])
  /\ LET i == full[r] + 1 IN
     /\ IF tbl[r][i] = 0 THEN b \in Allocatable(FreeBlocks) ELSE b = tbl[r][i] /\ ~part
     /\ BuildMeta(r, trk[r], [tbl[r] EXCEPT ![i] = b], rp[r], IF part THEN full[r] ELSE i, {b} \ {tbl[r][i]},
                  Wr(b, rp[r][i], part), Rd(tbl[r], rp[r], full[r]), {}, FALSE, known)
     /\ cached' = Index(b, IF part THEN NoHash ELSE rp[r][i])
  /\ UNCHANGED <<rst, rgen, nohit>>

(* Admission of a waiting request: the local prefix l, whose blocks become shared, then new blocks f. *)
HitBlock(h) == Min({b \in Blocks : cached[b] = h})
Hits(p, l) == {HitBlock(p[i]) : i \in 1..l}
NewTable(p, l, f) == [i \in Idx |-> IF i <= l THEN HitBlock(p[i]) ELSE IF i \in DOMAIN f THEN f[i] ELSE 0]
CanAdmit(r) == Room /\ owed = 0 /\ rst[r] = "waiting"
Admit(r, st) == rst' = [rst EXCEPT ![r] = st] /\ rgen' = [rgen EXCEPT ![r] = FreshGen]

(* ACTION  AdmitCompute(r, b, part)       WHO core, then kvledger's scheduler side
   CODE    schedule(): get_num_new_matched_tokens, allocate_slots, update_state_after_alloc(.., 0),
           build_connector_meta -> hits.match, side.admitted, ledger.begin_generation, side.build_step
   A waiting request runs, without a load: no external hit, or core did not accept it.
   SIMPLIFIED core may accept any number of the blocks offered: here none, or n in AdmitLoad.         *)
AdmitCompute(r, b, part) ==
  /\ CanAdmit(r)
  /\ LET p == rp[r]
         l == LocalHit(p)
         T == NewTable(p, l, [i \in {l + 1} |-> b])
     IN /\ b \in Allocatable(FreeBlocks \ Hits(p, l))
        /\ BuildMeta(r, BeginGeneration(FreshGen, "none"), T, p, IF part THEN l ELSE l + 1, Hits(p, l) \cup {b},
                     Wr(b, p[l + 1], part), Rd(T, p, l), {}, FALSE, Relearned(r, p, l))
        /\ cached' = Index(b, IF part THEN NoHash ELSE p[l + 1])
  /\ Admit(r, "running")
  /\ UNCHANGED nohit

(* ACTION  AdmitLoad(r, n)                WHO core, then kvledger's scheduler side
   CODE    schedule(): get_num_new_matched_tokens -> (n, async), update_state_after_alloc(.., n), build_connector_meta
           -> hits.match, ledger.begin_generation, ledger.emit_load
   Core accepts n of the blocks found in the store; r waits (WAITING_FOR_REMOTE_KVS) with free blocks f as targets.
   They are r's alone, not hashed, and r is not preemptible, until every rank has reported (G1).                   *)
AdmitLoad(r, n) ==
  /\ CanAdmit(r) /\ FALSE \in SyncLoads
  /\ LET p == rp[r]
         l == LocalHit(p)
     IN /\ n <= ExternalHit(r, p, l)
        /\ \E f \in Injections((l + 1)..(l + n), FreeBlocks \ Hits(p, l)) :
             /\ BuildMeta(r, BeginGeneration(FreshGen, "pending"), NewTable(p, l, f), p, l, Hits(p, l) \cup Vals(f),
                          {}, {}, {<<i, f[i], p[i]>> : i \in DOMAIN f}, FALSE, Relearned(r, p, l))
             /\ cached' = [b \in Blocks |-> IF b \in Vals(f) THEN NoHash ELSE cached[b]]
  /\ Admit(r, "loading")
  /\ UNCHANGED nohit

(* ACTION  AdmitSyncLoad(r, n)            WHO core, then kvledger's scheduler side
   CODE    as AdmitLoad, with (n, sync): r is RUNNING at once and computes its next block in the same step, behind the
           load; its blocks are in the prefix cache, and shareable, before their bytes have arrived.
   f gives the n target blocks and the computed one.                                                                *)
AdmitSyncLoad(r, n) ==
  /\ CanAdmit(r) /\ TRUE \in SyncLoads
  /\ LET p == rp[r]
         l == LocalHit(p)
         c == l + n + 1
     IN /\ n <= ExternalHit(r, p, l)
        /\ \E f \in Injections((l + 1)..c, FreeBlocks \ Hits(p, l)) :
             /\ BuildMeta(r, BeginGeneration(FreshGen, "pending"), NewTable(p, l, f), p, c, Hits(p, l) \cup Vals(f),
                          Wr(f[c], p[c], FALSE), Rd(NewTable(p, l, f), p, l + n),
                          {<<i, f[i], p[i]>> : i \in (l + 1)..(l + n)}, TRUE, Relearned(r, p, l))
             /\ cached' = [b \in Blocks |-> IF b \in Vals(f) THEN Indexed(p[CHOOSE i \in DOMAIN f : f[i] = b])
                                           ELSE cached[b]]
  /\ Admit(r, "running")
  /\ UNCHANGED nohit

MayIdle == TRUE          \* a waiting request may be held back for many reasons (liveness models: only if nothing else can be done)

(* ACTION  EmptyStep                      WHO core
   CODE    a schedule() that gives nobody anything; build_connector_meta is called all the same
   The engine steps as long as it has work (requests, or has_pending_push_work), and only steps carry reports.
   SIMPLIFIED only when no step is in flight: on top of others it would just poll earlier.                  *)
EmptyStep ==
  /\ InFlight = {} /\ owed = 0 /\ MayIdle
  /\ HasPendingPushWork \/ \E r \in Reqs : rst[r] # "none"
  /\ Push(0, {}, {}, NoJob)
  /\ trk' = [x \in Reqs |-> EndGeneration(x, trk[x], rgen[x])]
  /\ preempted' = {}
  /\ UNCHANGED <<rst, rp, rgen, full, tbl, ref, cached, owed, calm, epoch, nextJob, job, led, known, nohit, stalled,
                 mute, rankVars, store>>

-----------------------------------------------------------------------------
(* Core: the life of a request. *)

NoPrompt == CHOOSE p \in Prompts : TRUE       \* prompt of an id that is not in use
FreeableNow(r) == DeferFree => StepsOf(r) = {}            \* core's _request_blocks_can_be_freed / defer_block_free
CoreIdle == Depth = 1 => InFlight = {}                    \* without a pipeline, core waits for the step it has sent
StepOver == pipe[1].on /\ \A k \in Ranks : hooked[k] > 0 /\ polled[k] > 0 /\ fwd[k] > 0
Drop(R) == [b \in Blocks |-> ref[b] - Cardinality({r \in R : b \in Range(tbl[r])})]

(* ACTION  Arrive(r, p)                   WHO environment     CODE add_request -> on_new_request
   A new request under an id that is not in use: perhaps the id of an earlier one, with another prompt. *)
Arrive(r, p) ==
  /\ rst[r] = "none" /\ ~calm /\ CoreIdle
  /\ rst' = [rst EXCEPT ![r] = "waiting"] /\ rp' = [rp EXCEPT ![r] = p]
  /\ UNCHANGED <<rgen, full, tbl, ref, cached, preempted, owed, pipe, calm, epoch, schedVars, rankVars, store>>

Unadmit(r) ==
  /\ ref' = Drop({r})
  /\ rgen' = [rgen EXCEPT ![r] = 0] /\ full' = [full EXCEPT ![r] = 0] /\ tbl' = [tbl EXCEPT ![r] = NoTable]
ToWaiting(r) ==
  /\ rst[r] = "running" /\ FreeableNow(r)
  /\ rst' = [rst EXCEPT ![r] = "waiting"] /\ preempted' = preempted \cup {r}
  /\ Unadmit(r)
  /\ UNCHANGED <<rp, pipe, calm, epoch, schedVars, rankVars, store>>

(* ACTION  Preempt(r)                     WHO core            CODE reset_prefix_cache(reset_running_requests=True)
   r loses its blocks at once; the connector hears of it in the next schedule, which may already have re-admitted r.
   Nothing stops a transfer that reads the blocks.  The prefix cache is emptied if no block is held then, and stays as it
   is if pins hold one: core refuses (G12).                                                                         *)
Preempt(r) ==
  /\ owed = 0 /\ ~calm /\ CoreIdle
  /\ ToWaiting(r)
  /\ cached' = IF \A b \in Blocks : ref'[b] = 0 THEN [b \in Blocks |-> NoHash] ELSE cached
  /\ UNCHANGED owed

(* ACTION  PreemptForSpace(v, r)          WHO core            CODE schedule(), running loop -> _preempt_request
   r needs a block and none is free.  If has_pending_block_frees says so, core waits; else it preempts the running
   request of the lowest priority, perhaps r itself, and goes on for r in the same schedule (owed = r).            *)
Starved(r) == rst[r] = "running" /\ full[r] < Len(rp[r]) /\ tbl[r][full[r] + 1] = 0 /\ FreeBlocks = {}
PreemptForSpace(v, r) ==
  /\ Room /\ owed \in {0, r} /\ Starved(r) /\ ~HasPendingBlockFrees
  /\ v = Max({x \in Reqs : rst[x] = "running"})
  /\ ToWaiting(v)
  /\ owed' = IF v = r THEN 0 ELSE r
  /\ UNCHANGED cached

(* ACTION  Finish(r) / Abort(r)           WHO core            CODE _free_request -> request_finished[_all_groups]
   The request ends, with its generation (EndGeneration); its blocks are free at once, whatever is still queued for
   them.  An aborted request whose load is pending keeps its targets until every rank has reported (G3).  Core looks for
   aborts once more between the end of a step and its output.
   SIMPLIFIED under DeferFree the hook is called earlier than the blocks are freed; here both happen when they are. *)
Gone(r, s) ==
  /\ rst' = [rst EXCEPT ![r] = s] /\ trk' = [trk EXCEPT ![r] = NoTrk] /\ nohit' = [nohit EXCEPT ![r] = FALSE]
  /\ rp' = IF s = "none" THEN [rp EXCEPT ![r] = NoPrompt] ELSE rp
  /\ UNCHANGED <<cached, preempted, owed, pipe, calm, epoch, nextJob, job, led, known, stalled, mute, rankVars, store>>
Finish(r) ==
  /\ rst[r] = "running" /\ full[r] = Len(rp[r]) /\ StepsOf(r) = {} /\ owed = 0
  /\ Gone(r, "none") /\ Unadmit(r)
Abort(r) ==
  /\ ~calm /\ owed = 0
  /\ CoreIdle \/ StepOver
  /\ \/ rst[r] \in {"waiting", "running"} /\ FreeableNow(r) /\ Gone(r, "none") /\ Unadmit(r)
     \/ rst[r] = "loading" /\ Gone(r, "zombie") /\ UNCHANGED <<rgen, full, tbl, ref>>

Wiped(s) == s                                 \* old objects stay until the store evicts them

(* ACTION  Reset                          WHO core, then kvledger's scheduler side
   CODE    reset_prefix_cache(reset_connector=True) -> reset_cache -> ledger.reset
   New weights: whatever was computed before is wrong from now on.  Running requests were preempted before (Preempt); with
   a load pending the answer is False (no step here).  All generations end, nothing is believed stored, and from now on
   keys carry a new epoch: a job still in flight publishes under the old one, which nobody looks up any more.
   SIMPLIFIED core refuses while pins are held (G12); here it may go on, to show that the epoch alone is enough.           *)
Reset ==
  /\ epoch < MaxEpoch /\ ~calm /\ owed = 0 /\ InFlight = {}
  /\ \A r \in Reqs : rst[r] \in {"none", "waiting"}
  /\ epoch' = epoch + 1
  /\ cached' = [b \in Blocks |-> NoHash] /\ known' = {}
  /\ trk' = [r \in Reqs |-> NoTrk]
  /\ store' = Wiped(store) /\ mute' = FALSE
  /\ UNCHANGED <<rst, rp, rgen, full, tbl, ref, preempted, owed, pipe, calm, nextJob, job, led, nohit, stalled, rankVars>>

(* ACTION  ResetRefused                   WHO core, then kvledger's scheduler side
   CODE    reset_prefix_cache(reset_connector=True) -> False, reset_cache all the same -> ledger.reset(refused=True)
   New weights, but a block is in use, by a request or a pin: core keeps its prefix index and goes on with what it has.
   Nobody can tell which later generations rest on it, so nothing is stored or hit until a Reset, which draws another epoch.
   Generations end but for those whose load is out, which are tainted.                                                   *)
ResetRefused ==
  /\ epoch < MaxEpoch /\ ~calm /\ owed = 0 /\ InFlight = {}
  /\ \E b \in Blocks : ref[b] > 0
  /\ epoch' = epoch + 1 /\ mute' = TRUE /\ known' = {}
  /\ trk' = [r \in Reqs |-> IF trk[r].load = "pending" THEN [trk[r] EXCEPT !.load = "tainted"] ELSE NoTrk]
  /\ UNCHANGED <<rst, rp, rgen, full, tbl, ref, cached, preempted, owed, pipe, calm, nextJob, job, led, nohit, stalled,
                 rankVars, store>>

(* ACTION  UpdateFromOutput               WHO core, then kvledger's scheduler side
   CODE    update_from_output: invalid blocks, update_connector_output -> ledger.apply_report, finished_recving
   The oldest step is over on every rank.  All reports that its output carries are applied: a job that every rank has
   reported gives back its pins and returns failed blocks to its generation; a load that is over makes its request run
   with what arrived (its good prefix), or wait again if nothing did, or frees the blocks of an aborted one.  After a
   failed sync load core truncates every request that holds a bad block and takes the blocks out of the prefix cache.
   SIMPLIFIED policy "recompute" only; promotion to RUNNING happens here, not in the next schedule().                 *)
LoadsOf(r) == {j \in JobIds : Complete(j) /\ job[j].kind = "load" /\ job[j].gen = rgen[r]}  \* not of an aborted sync load's request
LastIdx(j) == Max(IdxOf(job[j].items))
GoodEnd(j) == IF BadOf(j) = {} THEN LastIdx(j) ELSE Min(BadOf(j)) - 1
BadSync == UNION {{x[2] : x \in {x \in job[j].items : x[1] \in BadOf(j)}} :
                  j \in {j \in JobIds : Complete(j) /\ job[j].sync}}
Spoilt(r) == {i \in Idx : rst[r] = "running" /\ \E x \in 1..i : tbl[r][x] \in BadSync}
Loaded(r) == rst[r] = "loading" /\ LoadsOf(r) # {}
Arrived(r) == CHOOSE n \in {0} \cup Idx : \E j \in LoadsOf(r) : n = GoodEnd(j)
Failing(r) == \E j \in LoadsOf(r) : BadOf(j) # {}
NewFull(r) == IF Loaded(r) THEN Arrived(r)
              ELSE IF Spoilt(r) # {} THEN Min({full[r], Min(Spoilt(r)) - 1}) ELSE full[r]
Restart(r) == Loaded(r) /\ Arrived(r) = 0                  \* nothing arrived and no local prefix: look up again
Released(r) == Restart(r) \/ (rst[r] = "zombie" /\ LoadsOf(r) # {})
StoredBy(j) == {x[3] : x \in {x \in job[j].items : x[1] \notin BadOf(j) /\ job[j].epoch = epoch}}
LostBy(j) == IF job[j].kind = "load" THEN {x[3] : x \in {x \in job[j].items : x[1] \in BadOf(j)}} ELSE {}
Completed == {j \in JobIds : Complete(j)}
Releases(j) == Complete(j)                     \* a job that is over gives its pins back, whatever its result
Told(k, j) == <<k, j>> \in pipe[1].rep
AllGone(j) == \A k \in Ranks : (rk[k][j].st = "gone" \/ Told(k, j)) /\ Moving(k, j) = {}
Shift(c) == [k \in Ranks |-> c[k] - 1]
UpdateFromOutput ==
  /\ StepOver /\ owed = 0
  /\ led' = [j \in JobIds |-> ApplyReport(j)]
  /\ job' = [j \in JobIds |-> IF AllGone(j) THEN NoJob ELSE job[j]]          \* a job that is over is forgotten
  /\ rk' = [k \in Ranks |-> [j \in JobIds |-> IF Told(k, j) THEN [st |-> "gone", bad |-> {}] ELSE rk[k][j]]]
  /\ ref' = [b \in Blocks |-> ref[b] - Cardinality({j \in JobIds : Releases(j) /\ b \in led[j].held})
                                     - Cardinality({r \in Reqs : Released(r) /\ b \in Range(tbl[r])})]
  /\ known' = (known \cup UNION {StoredBy(j) : j \in Completed}) \ UNION {LostBy(j) : j \in Completed}
  /\ trk' = [r \in Reqs |->
              IF LoadsOf(r) # {} /\ trk[r].load = "pending"
              THEN LoadFinished(trk[r], rst[r] = "running", ~Failing(r))
              ELSE IF Spoilt(r) # {} THEN LoadFinished(trk[r], TRUE, FALSE) ELSE AfterReports(trk[r])]
  /\ nohit' = [r \in Reqs |-> nohit[r] \/ (Failing(r) /\ rst[r] # "zombie")]
  /\ full' = [r \in Reqs |-> IF Released(r) THEN 0 ELSE NewFull(r)]
  /\ tbl' = [r \in Reqs |-> IF Released(r) THEN NoTable ELSE tbl[r]]
  /\ rgen' = [r \in Reqs |-> IF Released(r) THEN 0 ELSE rgen[r]]
  /\ rst' = [r \in Reqs |-> IF Restart(r) THEN "waiting" ELSE IF Released(r) THEN "none"
                            ELSE IF Loaded(r) THEN "running" ELSE rst[r]]
  /\ rp' = [r \in Reqs |-> IF Released(r) /\ ~Restart(r) THEN NoPrompt ELSE rp[r]]
  /\ cached' = [b \in Blocks |->
                 IF \E r \in Reqs : \E i \in Spoilt(r) : tbl[r][i] = b THEN NoHash
                 ELSE IF \E r \in Reqs : Loaded(r) /\ \E i \in 1..Arrived(r) : tbl[r][i] = b
                 THEN Indexed(CHOOSE h \in Hashes : \E r \in Reqs : Loaded(r) /\ \E i \in 1..Arrived(r) : tbl[r][i] = b /\ rp[r][i] = h)
                 ELSE cached[b]]
  /\ stalled' = (stalled /\ ~\E x \in pipe[1].rep : job[x[2]].kind = "store")
  /\ pipe' = [s \in Slots |-> IF s < Depth THEN pipe[s + 1] ELSE NoStep]
  /\ hooked' = Shift(hooked) /\ polled' = Shift(polled) /\ fwd' = Shift(fwd)
  /\ UNCHANGED <<preempted, owed, calm, epoch, mute, nextJob, mem, dma, store>>

-----------------------------------------------------------------------------
(* Ranks. *)

rankRest == <<coreVars, schedVars>>
pipeRest == <<rst, rp, rgen, full, tbl, ref, cached, preempted, owed, calm, epoch, schedVars>>
SyncDone(k, s) == \A j \in pipe[s].jobs : job[j].sync => rk[k][j].st \in {"ready", "sent", "gone"}
Queued(k, kind) == {j \in JobIds : rk[k][j].st = "queued" /\ job[j].kind = kind}
LaneFree(k, kind) == ~\E j \in JobIds : rk[k][j].st = "running" /\ job[j].kind = kind
FencePassed(k, j) == \A s \in Slots : j \in pipe[s].jobs => fwd[k] >= s
PollOrder(k, s) == TRUE                       \* narrow models: only after the forward
Refusals(k, j) == IF job[j].kind = "store" THEN SUBSET IdxOf(job[j].items) ELSE {{}}
Set(k, j, st, bad) == rk' = [rk EXCEPT ![k][j] = [st |-> st, bad |-> bad]]
ReportedBad(bad) == bad                       \* whatever did not provably arrive

(* ACTION  RankAccept(k)                  WHO rank k          CODE start_load_kv, wait_for_save -> rank.accept
   The rank takes the jobs of its next step into its queue; a store with the compute fence of that step.  The forward of
   the step is launched.  An empty step has no forward to wait for.                                                  *)
RankAccept(k) ==
  LET s == hooked[k] + 1 IN
  /\ s <= Depth /\ pipe[s].on /\ polled[k] >= hooked[k]
  /\ hooked' = [hooked EXCEPT ![k] = s]
  /\ fwd' = [fwd EXCEPT ![k] = IF pipe[s].wr = {} /\ pipe[s].jobs = {} /\ @ = s - 1 THEN s ELSE @]
  /\ rk' = [rk EXCEPT ![k] = [j \in JobIds |-> IF j \in pipe[s].jobs THEN [st |-> "queued", bad |-> {}] ELSE rk[k][j]]]
  /\ UNCHANGED <<rankRest, polled, mem, dma, store>>

(* ACTION  RankForward(k)                 WHO GPU of rank k   CODE the forward; for sync loads behind wait_for_layer_load
   The next launched forward finishes.  It turns right inputs into right bytes, wrong inputs or half a block into others. *)
RankForward(k) ==
  LET s == fwd[k] + 1 IN
  /\ s <= hooked[k] /\ SyncDone(k, s)
  /\ fwd' = [fwd EXCEPT ![k] = s]
  /\ LET good == \A x \in pipe[s].rd : mem[k][x[1]] = Right(x[2])
     IN mem' = [mem EXCEPT ![k] = [b \in Blocks |->
                 IF ~\E x \in pipe[s].wr : x[1] = b THEN mem[k][b]
                 ELSE IF good /\ \E x \in pipe[s].wr : x[1] = b /\ x[2] # Part
                 THEN Right((CHOOSE x \in pipe[s].wr : x[1] = b)[2]) ELSE Junk]]
  /\ UNCHANGED <<rankRest, hooked, polled, rk, dma, store>>

SyncReported(k, s) == \A j \in pipe[s].jobs : job[j].sync => rk[k][j].st = "ready"

(* ACTION  TakeReports(k)                 WHO rank k          CODE get_transfer_results, build_connector_worker_meta
                                                                   -> rank.take_reports
   Every report that is ready leaves with the output of the step, once.  It may happen before or after the saves of the
   same step are accepted; a sync load must have ended, for its report has to leave with its own step.                *)
TakeReports(k) ==
  LET s == polled[k] + 1
      Ready == {j \in JobIds : rk[k][j].st = "ready"}
  IN
  /\ s <= Depth /\ pipe[s].on /\ s <= hooked[k] + 1 /\ PollOrder(k, s)
  /\ SyncReported(k, s)
  /\ polled' = [polled EXCEPT ![k] = s]
  /\ pipe' = [pipe EXCEPT ![s].rep = @ \cup ({k} \X Ready)]
  /\ rk' = [rk EXCEPT ![k] = [j \in JobIds |-> IF j \in Ready THEN [rk[k][j] EXCEPT !.st = "sent"] ELSE rk[k][j]]]
  /\ UNCHANGED <<pipeRest, hooked, fwd, mem, dma, store>>

(* ACTION  RankStart(k, j, R)             WHO transfer thread CODE rank.start; batch_put/get is called
   The least queued job of its kind starts: a store behind its compute fence.  R is what the store refuses at once,
   with a final code (no space): for that no transfer begins.                                                       *)
RankStart(k, j, R) ==
  /\ rk[k][j].st = "queued" /\ LaneFree(k, job[j].kind) /\ j = Min(Queued(k, job[j].kind))
  /\ job[j].kind = "store" => FencePassed(k, j)
  /\ R \in Refusals(k, j)
  /\ Set(k, j, "running", R)
  /\ dma' = dma \cup ({k} \X {j} \X (IdxOf(job[j].items) \ R))
  /\ UNCHANGED <<rankRest, hooked, polled, fwd, mem, store>>

(* ACTION  RankDrop(k, j)                 WHO rank k          CODE rank.drop (forward raised, no KV layers, shutdown; a
                                                              queued load whose request was aborted)
   A job that never starts is reported all the same.                                                                *)
RankDrop(k, j) ==
  /\ rk[k][j].st = "queued"
  /\ Set(k, j, "ready", IdxOf(job[j].items))
  /\ UNCHANGED <<rankRest, hooked, polled, fwd, mem, dma, store>>

(* ACTION  RankFinish(k, j)               WHO transfer thread CODE rank.finish; the one exit of a job
   The transfer call returned and nothing of it moves any more: the report is ready.                   *)
RankFinish(k, j) ==
  /\ rk[k][j].st = "running" /\ Moving(k, j) = {}
  /\ Set(k, j, "ready", ReportedBad(rk[k][j].bad))
  /\ UNCHANGED <<rankRest, hooked, polled, fwd, mem, dma, store>>

(* ACTION  RankQuarantine(k, j)           WHO transfer thread CODE rank.quarantine (-800, exception; direct mode)
   The call gave up, its bytes may still move: no report yet.                                                 *)
RankQuarantine(k, j) ==
  /\ rk[k][j].st = "running" /\ Moving(k, j) # {}
  /\ Set(k, j, "quar", rk[k][j].bad \cup Moving(k, j))
  /\ UNCHANGED <<rankRest, hooked, polled, fwd, mem, dma, store>>

(* ACTION  RankExpire(k, j)               WHO clock of rank k CODE rank.expire: a quarantine is over, or a call never came back
   ASSUMPTION the bound is longer than any transfer outlives its call, or its limit: by then nothing moves.           *)
Outlived(k, j) == Moving(k, j) = {}
RankExpire(k, j) ==
  /\ rk[k][j].st \in {"running", "quar"} /\ Outlived(k, j)
  /\ Set(k, j, "ready", IF rk[k][j].st = "running" THEN IdxOf(job[j].items) ELSE ReportedBad(rk[k][j].bad))
  /\ UNCHANGED <<rankRest, hooked, polled, fwd, mem, dma, store>>

-----------------------------------------------------------------------------
(* The transfer engine and the store. *)

Key(j, x) == KeyOf(x[3], job[j].epoch)        \* the object that item x of job j is about

(* ACTION  DmaMove(k, j, i)               WHO transfer engine
   The bytes of one block move.  A put never replaces an object; a get finds what is there now.
   SIMPLIFIED one instant per block: a torn read is a read of wrong bytes, and those can be read here too. *)
DmaMove(k, j, i) ==
  /\ <<k, j, i>> \in dma
  /\ dma' = dma \ {<<k, j, i>>}
  /\ \E x \in job[j].items :
       /\ x[1] = i
       /\ IF job[j].kind = "store"
          THEN /\ store' = IF store[k][Key(j, x)] = NoObj THEN [store EXCEPT ![k][Key(j, x)] = mem[k][x[2]]] ELSE store
               /\ UNCHANGED <<mem, rk>>
          ELSE IF store[k][Key(j, x)] # NoObj
               THEN mem' = [mem EXCEPT ![k][x[2]] = store[k][Key(j, x)]] /\ UNCHANGED <<store, rk>>
               ELSE Set(k, j, rk[k][j].st, rk[k][j].bad \cup {i}) /\ UNCHANGED <<store, mem>>
  /\ UNCHANGED <<rankRest, hooked, polled, fwd>>

(* ACTION  DmaFail(k, j, i)               WHO transfer engine
   The transfer of one block ends without success.  A get may have written part of the target (short read). *)
DmaFail(k, j, i) ==
  /\ <<k, j, i>> \in dma
  /\ dma' = dma \ {<<k, j, i>>}
  /\ Set(k, j, rk[k][j].st, rk[k][j].bad \cup {i})
  /\ \E x \in job[j].items :
       x[1] = i /\ mem' = IF job[j].kind = "load" THEN [mem EXCEPT ![k][x[2]] = Junk] ELSE mem
  /\ UNCHANGED <<rankRest, hooked, polled, fwd, store>>

(* ACTION  Evict(k, x)                    WHO store: an object goes (eviction, lost segment). *)
Evict(k, x) ==
  /\ store[k][x] # NoObj /\ ~calm
  /\ store' = [store EXCEPT ![k][x] = NoObj]
  /\ UNCHANGED <<coreVars, schedVars, rankVars>>

(* ACTION  ForeignPut(k, x)               WHO another engine that shares the store: it puts right bytes. *)
ForeignPut(k, x) ==
  /\ store[k][x] = NoObj /\ ~calm /\ x[2] = epoch
  /\ store' = [store EXCEPT ![k][x] = x]
  /\ UNCHANGED <<coreVars, schedVars, rankVars>>

(* ACTION  ReplayReport(k, j)             WHO aggregator: a report that was applied comes once more with a later output
   (0.33 replays salvaged outputs of failed workers).                                                                *)
ReplayReport(k, j) ==
  /\ j \in Live /\ rk[k][j].st = "gone" /\ InFlight # {}
  /\ pipe' = [pipe EXCEPT ![1].rep = @ \cup {<<k, j>>}]
  /\ UNCHANGED <<pipeRest, rankVars, store>>

(* ACTION  StallTimeout                   WHO clock: no store was reported for stall_timeout_s (ledger.has_pending_frees). *)
StallTimeout ==
  /\ Live # {} /\ ~stalled
  /\ stalled' = TRUE
  /\ UNCHANGED <<coreVars, trk, nextJob, job, led, known, nohit, mute, rankVars, store>>

(* ACTION  BecomeCalm                     WHO environment: from now on no disturbance (liveness models only). *)
BecomeCalm ==
  /\ ~calm /\ calm' = TRUE
  /\ UNCHANGED <<rst, rp, rgen, full, tbl, ref, cached, preempted, owed, pipe, epoch, schedVars, rankVars, store>>

-----------------------------------------------------------------------------
SchedulerNext ==
  \/ \E r \in Reqs, b \in Blocks, part \in PartSteps : Compute(r, b, part) \/ AdmitCompute(r, b, part)
  \/ \E r \in Reqs, n \in Idx : AdmitLoad(r, n) \/ AdmitSyncLoad(r, n)
  \/ EmptyStep \/ UpdateFromOutput
  \/ \E v, r \in Reqs : PreemptForSpace(v, r)
  \/ \E r \in Reqs : Finish(r)
EnvironmentNext ==
  \/ \E r \in Reqs : Preempt(r) \/ Abort(r) \/ (\E p \in Prompts : Arrive(r, p))
  \/ \E k \in Ranks, x \in Keys : Evict(k, x) \/ ForeignPut(k, x)
  \/ \E k \in Ranks, j \in JobIds : ReplayReport(k, j)
  \/ Reset \/ ResetRefused \/ StallTimeout \/ BecomeCalm
RankNext(k) ==
  \/ RankAccept(k) \/ RankForward(k) \/ TakeReports(k)
  \/ \E j \in JobIds : \/ RankDrop(k, j) \/ RankFinish(k, j) \/ RankQuarantine(k, j) \/ RankExpire(k, j)
                       \/ \E R \in SUBSET Idx : RankStart(k, j, R)
DmaNext(k) == \E j \in JobIds, i \in Idx : DmaMove(k, j, i) \/ DmaFail(k, j, i)

Next == SchedulerNext \/ EnvironmentNext \/ \E k \in Ranks : RankNext(k) \/ DmaNext(k)
Spec == Init /\ [][Next]_vars
=============================================================================

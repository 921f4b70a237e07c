------------------------------ MODULE MCMutants ------------------------------
(* The wrong versions: each replaces one operator of the model (see mutants/registry.toml, which names the bug it stands
   for and the property that must fail).  Nothing in the model knows of them.                                          *)
EXTENDS MC

Yes == TRUE
Yes1(x) == TRUE
Yes2(x, y) == TRUE
No == FALSE

(* pins *)
PinNothing(J) == {}
PinAllButTail(J) == IF J.kind = "store" THEN {x[2] : x \in {x \in J.items : x[1] # Max(IdxOf(J.items))}} ELSE {}
ReleaseIfStored(j) == Complete(j) /\ BadOf(j) = {}

(* counting reports *)
HeardByRequest(j) == UNION {{<<i, k>> : k \in led[i].rep \cup Heard(i)} : i \in {i \in Live : job[i].req = job[j].req}}
CompletePerRequest(j) == j \in Live /\ Cardinality(HeardByRequest(j)) >= Cardinality(Ranks)
ReportersByRequest(j) ==    \* a report counts for the request's latest job
  {k \in Ranks : \E i \in JobIds : <<k, i>> \in pipe[1].rep /\ job[i].req = job[j].req /\
                                   j = Max({x \in Live : job[x].req = job[j].req})}
CompleteAtFirst(j) == j \in Live /\ Count(j) >= 1
BadOfLastToReport(j) == UNION {rk[k][j].bad : k \in Heard(j)}
StoredWhateverFailed(j) == {x[3] : x \in {x \in job[j].items : job[j].epoch = epoch}}
HeardAgain(j) == IF j \in Live THEN Reporters(j) ELSE {}
AnyOfRequest(j, t) == t.gen # 0 /\ \E r \in Reqs : trk[r] = t /\ job[j].req = r
ForgetTracker(x, t, g) == IF x \in preempted THEN NoTrk ELSE t

(* what is storable *)
StorableWithDrafts(t, T, n) ==
  IF t.gen = 0 THEN 0 ELSE IF n + 1 \in Idx /\ T[n + 1] # 0 THEN n + 1 ELSE n
StorableOnPendingLoad(t, T, n) ==
  IF t.gen = 0 \/ t.load = "tainted" \/ (t.load # "pending" /\ Range(T) \cap SyncTargets # {}) THEN 0 ELSE n
StorableOnSharedTarget(t, T, n) == IF t.gen = 0 \/ t.load \in {"pending", "tainted"} THEN 0 ELSE n

(* ranks *)
Unreported(k, j, bad) == Set(k, j, "gone", bad) /\ UNCHANGED <<rankRest, hooked, polled, fwd, mem, store>>
StartRaises(k, j, R) ==
  /\ rk[k][j].st = "queued" /\ LaneFree(k, job[j].kind) /\ j = Min(Queued(k, job[j].kind))
  /\ (job[j].kind = "store" => FencePassed(k, j)) /\ R = {}
  /\ Unreported(k, j, {}) /\ UNCHANGED dma
ReportSuccessOnly(k, j) ==
  /\ rk[k][j].st = "running" /\ Moving(k, j) = {}
  /\ IF rk[k][j].bad = {} THEN Set(k, j, "ready", {}) ELSE Set(k, j, "gone", {})
  /\ UNCHANGED <<rankRest, hooked, polled, fwd, mem, dma, store>>
FirstBadOnly(bad) == IF bad = {} THEN {} ELSE {Max(bad)}     \* rotated order: the batch that failed first is not the first block
TakeAndKeep(k) ==
  LET s == polled[k] + 1
      Ready == {j \in JobIds : rk[k][j].st = "ready"}
  IN
  /\ s <= Depth /\ pipe[s].on /\ s <= hooked[k] + 1
  /\ polled' = [polled EXCEPT ![k] = s]
  /\ pipe' = [pipe EXCEPT ![s].rep = @ \cup ({k} \X Ready)]
  /\ UNCHANGED <<pipeRest, hooked, fwd, rk, mem, dma, store>>

PushWithoutJobs(r, wr, rd, J) ==    \* only a step with tokens carries the connector's metadata
  pipe' = [pipe EXCEPT ![Cardinality(InFlight) + 1] =
            [on |-> TRUE, req |-> r, wr |-> wr, rd |-> rd, rep |-> {},
             jobs |-> IF J = NoJob \/ wr = {} THEN {} ELSE {nextJob}]]

(* loads *)
NeverForgets(r, p, l) == known
GoneButRemembered(r, s) ==
  /\ rst' = [rst EXCEPT ![r] = s] /\ trk' = [trk EXCEPT ![r] = NoTrk]
  /\ rp' = IF s = "none" THEN [rp EXCEPT ![r] = NoPrompt] ELSE rp
  /\ UNCHANGED <<cached, preempted, owed, pipe, calm, epoch, nextJob, job, led, known, nohit, stalled, mute, rankVars, store>>
SyncGivenUp(k, s) == \A j \in pipe[s].jobs : job[j].sync => rk[k][j].st \in {"quar", "ready", "sent", "gone"}
FailedButTrusted(t, sync, g) == [t EXCEPT !.load = IF g THEN "none" ELSE "failed"]
HitDespiteFailure(r, p, l) ==
  IF ~LoadsAllowed \/ nextJob > MaxJob THEN 0
  ELSE MaxOr({n \in 1..(Len(p) - 1 - l) : \A i \in (l + 1)..(l + n) : InStore(p[i])}, 0)
ReleasedOnRestart(r) == Restart(r)
AbortFreesTargets(r) ==
  /\ ~calm /\ owed = 0 /\ (CoreIdle \/ StepOver) /\ rst[r] # "none" /\ rst[r] # "zombie" /\ FreeableNow(r)
  /\ Gone(r, "none") /\ Unadmit(r)

(* core *)
MakesRoomForThePreempted(v, r) ==
  /\ Room /\ owed \in {0, r} /\ Starved(r) /\ ~HasPendingBlockFrees
  /\ v = Max({x \in Reqs : rst[x] = "running"})
  /\ ToWaiting(v) /\ owed' = r /\ UNCHANGED cached

(* reset, quiescence, budget *)
KeyWithoutEpoch(h, e) == <<h, 0>>
WipeAll(s) == [k \in Ranks |-> [x \in Keys |-> NoObj]]
FreesWhenever == Pinned # {}
=============================================================================

-------------------------------- MODULE Trace --------------------------------
(***************************************************************************)
(* Is a recording of a real engine a behaviour of the model's scheduler    *)
(* side?  TraceData (generated) holds the events of one or more            *)
(* recordings; each event is one step here, built from the operators of    *)
(* MooncakeStoreLedger, with vLLM's choices (block tables, what was        *)
(* computed) and the ranks' reports taken from the recording.  Each        *)
(* event's rules are named; where one is broken, the recording ends, and   *)
(* TLC prints which, and what the model would have allowed.                *)
(*                                                                         *)
(* Left out: timing (when a retry is due, backoff, the stall clock), the   *)
(* ranks' inside, DMA, contents.  The conformance tours cover those.       *)
(***************************************************************************)
EXTENDS MooncakeStoreLedger, TraceData, TLC

VARIABLES tr,         \* which recording
          l,          \* its next event
          lastGen,    \* generation numbers only grow
          owes        \* what must come next, in this order: [a |-> action, job, req, what (blocks, hashes)]

traceVars == <<tr, l, lastGen, owes>>
rest == <<rst, rgen, full, ref, cached, preempted, owed, pipe, calm, stalled, mute, rankVars, store>>

ReqSet == 1..NumReqs
BlockSet == 1..NumBlocks
RankSet == 1..NumRanks
OnePrompt == {[i \in 1..MaxIdx |-> NoHash]}
NoHashes == [i \in Idx |-> NoHash]

Ev == Events[Traces[tr][l]]
NumEvents == Cardinality(DOMAIN Traces[tr])
SeqSet(s) == {s[i] : i \in DOMAIN s}
Last(s) == Cardinality(DOMAIN s)
Padded(s, d) == [i \in Idx |-> IF i \in DOMAIN s THEN s[i] ELSE d]
Position(s, b) == CHOOSE i \in DOMAIN s : s[i] = b
OwedFirst == owes = <<>>
LoadsOf(gen) == {j \in JobIds : job[j].kind = "load" /\ job[j].gen = gen}
StillLoading == {r \in Reqs : trk[r].gen # 0 /\ LoadsOf(trk[r].gen) \cap Live # {}}

(* A block that a job reads or fills belongs to others only under the same hash; a target of an asynchronous load
   belongs to nobody else at all.                                                                               *)
PinnedNotFreed(T, P, gen) ==
  \A j \in Live : \A x \in job[j].items : \A i \in Idx : T[i] = x[2] =>
    IF job[j].kind = "store" \/ job[j].sync THEN P[i] = x[3] ELSE job[j].gen = gen

-----------------------------------------------------------------------------
(* The rules of each event. *)

BeginRules ==
  [OwedFirst |-> OwedFirst,
   GenerationIsNew |-> Ev.gen > lastGen,
   FailedHitNotOffered |-> Ev.external = 0 \/ ~nohit[Ev.req],
   PinnedNotFreed |-> PinnedNotFreed(Padded(Ev.table, 0), Padded(Ev.hashes, NoHash), Ev.gen)]
EndRules ==
  [OwedFirst |-> OwedFirst, GenerationIsCurrent |-> trk[Ev.req].gen = Ev.gen]

LoadRules ==
  LET t == trk[Ev.req]
      T == tbl[Ev.req]
      Targets == SeqSet(Ev.blocks)
      Holds(r, b, h) == \E i \in Idx : tbl[r][i] = b /\ ~(Ev.sync = 1 /\ rp[r][i] = h)
  IN
  [OwedFirst |-> OwedFirst,
   GenerationIsCurrent |-> t.gen = Ev.gen,
   JobIdIsNext |-> Ev.job = nextJob,
   LoadWasAccepted |-> t.load = "pending" /\ LoadsOf(Ev.gen) = {},
   TargetsInTable |-> \E a \in Idx : \A k \in DOMAIN Ev.blocks :
                        a + k - 1 \in Idx /\ T[a + k - 1] = Ev.blocks[k] /\ rp[Ev.req][a + k - 1] = Ev.names[k],
   TargetsNotPinned |-> Targets \cap Pinned = {},
   TargetsNotLoading |-> \A j \in Live : job[j].kind = "load" => BlocksOf(job[j].items) \cap Targets = {},
   TargetsNotShared |-> \A r \in Reqs \ {Ev.req} : trk[r].gen # 0 =>
                          \A k \in DOMAIN Ev.blocks : ~Holds(r, Ev.blocks[k], Ev.names[k])]

StoreRules ==
  LET t == trk[Ev.req]
      n == Ev.storable
      T == Padded(Ev.table, 0)
      P == Padded(Ev.hashes, NoHash)
      Chosen == SeqSet(Ev.blocks)
      Issued == {i \in 1..n : T[i] \in Chosen}
      Retry == SeqSet(Ev.retry)
  IN
  [OwedFirst |-> OwedFirst,
   GenerationIsCurrent |-> t.gen = Ev.gen,
   RequestIsAdmitted |-> tbl[Ev.req] # NoTable,
   JobIdIsNext |-> Ev.job \in {0, nextJob},
   StorableNow |-> Ev.job # 0 => Storable(t, T, n) = n,
   BlocksAreDue |-> Issued \subseteq Due(t, n),
   NotStoredTwice |-> Issued \subseteq Want(t, P, n, known),
   NamesBelongToBlocks |-> {<<Ev.blocks[i], Ev.names[i]>> : i \in DOMAIN Ev.blocks} = {<<T[i], P[i]>> : i \in Issued},
   WithinBudget |-> Ev.job # 0 => WithinBudget(Chosen),
   PinnedNotFreed |-> PinnedNotFreed(T, P, Ev.gen),
   FrontierGrows |-> t.front <= Ev.frontier,
   FrontierWithinStorable |-> Ev.frontier \in {t.front} \cup 0..n,
   NothingSkipped |-> \A i \in (t.front + 1)..Ev.frontier : i \in Issued \/ P[i] \in known \/ i \in Retry,
   RetryHasReason |-> \A i \in Retry : i \in t.retry \/ (i <= n /\ HashInFlight(P[i])),
   RetryNotLost |-> \A i \in t.retry : i \in Issued \/ i \in Retry \/ (i <= n /\ P[i] \in known),
   IssuedIsNotRetried |-> Retry \cap Issued = {}]

(* What one report changes: j its job, k its rank. *)
Rep(j, k) == led[j].rep \cup {k}
Bad(j) == led[j].bad \cup SeqSet(Ev.bad)
Over(j, k) == Rep(j, k) = Ranks
IsCurrent(j) == job[j].gen # 0 /\ trk[job[j].req].gen = job[j].gen
BadItems(j) == {x \in job[j].items : x[4] \in Bad(j)}
ComesBack(j) ==      \* a failed block is stored again, as long as it has attempts left
  IF ~IsCurrent(j) \/ job[j].kind = "load" THEN {}
  ELSE {i \in IdxOf(BadItems(j)) : trk[job[j].req].att[i] < MaxAttempts}
SyncFailed(j, k) == Over(j, k) /\ job[j].sync /\ Bad(j) # {}
OwnerOf(j) == IF IsCurrent(j) THEN {job[j].req} ELSE {}
SharersOf(j, B) == OwnerOf(j) \cup {r \in Reqs : trk[r].gen # 0 /\ Range(tbl[r]) \cap B # {}}
ReportRules ==
  LET j == Ev.job
      k == Ev.rank + 1
      open == j \in Live
      over == open /\ k \in Ranks /\ Over(j, k)
      Tainted == SeqSet(Ev.tainted)
      before == IF open THEN trk[job[j].req].retry ELSE {}
  IN
  [OwedFirst |-> OwedFirst,
   JobIsLive |-> open,
   RankIsKnown |-> k \in Ranks,
   FirstReportOfThisRank |-> open => k \notin led[j].rep,
   GoodIffDone |-> (Ev.result = "DONE") = (Ev.bad = <<>>),
   BadIsInJob |-> open => \A p \in SeqSet(Ev.bad) : \E x \in job[j].items : x[4] = p,
   OldGenerationHarmless |-> (over /\ ~IsCurrent(j)) => SeqSet(Ev.retry) = before,
   FailedComeBack |-> (over /\ IsCurrent(j)) => SeqSet(Ev.retry) = before \cup ComesBack(j),
   TaintedAreThoseWhoShare |-> over =>
     IF SyncFailed(j, k)
     THEN SharersOf(j, BlocksOf(BadItems(j))) \subseteq Tainted /\ Tainted \subseteq SharersOf(j, BlocksOf(job[j].items))
     ELSE Tainted = {}]

IsOwed(a) == owes # <<>> /\ owes[1].a = a
ReleaseRules ==
  [OwedByThisJob |-> IsOwed("Release") /\ owes[1].job = Ev.job,
   TheBlocksPinned |-> IsOwed("Release") => SeqSet(Ev.blocks) = owes[1].what]
ForgetRules ==      \* a lookup may miss at any time; a failed load owes it
  [OwedFirst |-> owes = <<>> \/ IsOwed("Forget"),
   TheHashesLost |-> IsOwed("Forget") => SeqSet(Ev.names) = owes[1].what]
EvictRules ==
  LET T == tbl[Ev.req]
      at == Min({i \in Idx : T[i] \in owes[1].what} \cup {Max(Idx)})
      owed1 == IsOwed("EvictTainted") /\ owes[1].job = Ev.job /\ owes[1].req = Ev.req
  IN
  [OwedByThisJob |-> owed1,
   EvictsWhatRestsOnIt |-> owed1 => {T[i] : i \in {i \in Idx : i >= at}} \ {0} \subseteq SeqSet(Ev.blocks),
   EvictsNothingElse |-> owed1 => SeqSet(Ev.blocks) \cap {T[i] : i \in 1..(at - 1)} = {}]
ResetRules ==
  [OwedFirst |-> OwedFirst,
   OpenLoadsStay |-> SeqSet(Ev.loading) = StillLoading]

Rules == CASE Ev.action = "BeginGeneration" -> BeginRules
           [] Ev.action = "EndGeneration" -> EndRules
           [] Ev.action = "EndRequest" -> [OwedFirst |-> OwedFirst, NoGeneration |-> trk[Ev.req].gen = 0]
           [] Ev.action = "EmitLoad" -> LoadRules
           [] Ev.action = "EmitStore" -> StoreRules
           [] Ev.action = "ApplyReport" -> ReportRules
           [] Ev.action = "Release" -> ReleaseRules
           [] Ev.action = "Forget" -> ForgetRules
           [] Ev.action = "EvictTainted" -> EvictRules
           [] Ev.action = "Reset" -> ResetRules
           [] OTHER -> [KnownEvent |-> FALSE]

-----------------------------------------------------------------------------
(* The effects. *)

Jobs == <<nextJob, job, led>>
Gone(r) == tbl' = [tbl EXCEPT ![r] = NoTable] /\ rp' = [rp EXCEPT ![r] = NoHashes]

Begin == /\ lastGen' = Ev.gen
         /\ trk' = [trk EXCEPT ![Ev.req] = BeginGeneration(Ev.gen, IF Ev.external = 0 THEN "none" ELSE "pending")]
         /\ tbl' = [tbl EXCEPT ![Ev.req] = Padded(Ev.table, 0)]
         /\ rp' = [rp EXCEPT ![Ev.req] = Padded(Ev.hashes, NoHash)]
         /\ UNCHANGED <<Jobs, known, epoch, nohit, owes>>
End == /\ trk' = [trk EXCEPT ![Ev.req] = NoTrk]
       /\ nohit' = [nohit EXCEPT ![Ev.req] = @ /\ Ev.why # "finished"]
       /\ Gone(Ev.req)
       /\ UNCHANGED <<Jobs, known, epoch, lastGen, owes>>
EndRequest == /\ nohit' = [nohit EXCEPT ![Ev.req] = FALSE]
              /\ UNCHANGED <<Jobs, trk, tbl, rp, known, epoch, lastGen, owes>>

Issue(J) == /\ nextJob' = nextJob + 1
            /\ job' = [job EXCEPT ![nextJob] = J]
            /\ led' = [led EXCEPT ![nextJob] = [st |-> "live", held |-> Pins(J), rep |-> {}, cnt |-> 0, bad |-> {}]]
Load == LET Items == {<<Position(tbl[Ev.req], Ev.blocks[k]), Ev.blocks[k], Ev.names[k], k>> : k \in DOMAIN Ev.blocks}
        IN /\ Issue(EmitLoad(Ev.req, trk[Ev.req], Items, Ev.sync = 1))
           /\ UNCHANGED <<trk, tbl, rp, known, epoch, nohit, lastGen, owes>>
Store == LET T == Padded(Ev.table, 0)
             P == Padded(Ev.hashes, NoHash)
             Items == {<<i, T[i], P[i], Position(Ev.blocks, T[i])>> : i \in {i \in 1..Ev.storable : T[i] \in SeqSet(Ev.blocks)}}
         IN /\ IF Ev.job = 0 THEN UNCHANGED Jobs
               ELSE Issue([kind |-> "store", req |-> Ev.req, gen |-> Ev.gen, sync |-> FALSE, epoch |-> epoch, items |-> Items])
            /\ trk' = [trk EXCEPT ![Ev.req].front = Ev.frontier, ![Ev.req].retry = SeqSet(Ev.retry)]
            /\ tbl' = [tbl EXCEPT ![Ev.req] = T] /\ rp' = [rp EXCEPT ![Ev.req] = P]
            /\ UNCHANGED <<known, epoch, nohit, lastGen, owes>>

Owed(j) ==
  IF job[j].kind = "store" THEN <<[a |-> "Release", job |-> j, req |-> 0, what |-> led[j].held]>>
  ELSE IF Bad(j) = {} THEN <<>>
  ELSE LET lost == [a |-> "Forget", job |-> j, req |-> 0, what |-> {x[3] : x \in BadItems(j)}]
           gone(r) == [a |-> "EvictTainted", job |-> j, req |-> r, what |-> BlocksOf(BadItems(j))]
       IN [i \in 1..(1 + Last(Ev.tainted)) |-> IF i = 1 THEN lost ELSE gone(Ev.tainted[i - 1])]
After(j, r) ==       \* the tracker of r when job j is over
  IF r \in SeqSet(Ev.tainted) THEN LoadFinished(trk[r], TRUE, FALSE)
  ELSE IF ~IsCurrent(j) \/ r # job[j].req THEN trk[r]
  ELSE IF job[j].kind = "store"
  THEN [trk[r] EXCEPT !.retry = @ \cup ComesBack(j), !.att = [i \in Idx |-> @[i] + Bit(i \in ComesBack(j))]]
  ELSE IF trk[r].load = "tainted" THEN trk[r] ELSE LoadFinished(trk[r], job[j].sync, Bad(j) = {})
Restarts(j, k) ==    \* nothing of an asynchronous load arrived, nothing stood before it: core frees the table (Restart)
  /\ Over(j, k) /\ IsCurrent(j) /\ job[j].kind = "load" /\ ~job[j].sync
  /\ 1 \in IdxOf(BadItems(j))
Apply ==
  LET j == Ev.job
      k == Ev.rank + 1
      over == Over(j, k)
  IN
  /\ led' = [led EXCEPT ![j] = IF over THEN [NoLed EXCEPT !.st = "done"]
                               ELSE [@ EXCEPT !.rep = Rep(j, k), !.cnt = @ + 1, !.bad = Bad(j)]]
  /\ trk' = IF over THEN [r \in Reqs |-> After(j, r)] ELSE trk
  /\ known' = IF over /\ job[j].epoch = epoch THEN known \cup {x[3] : x \in job[j].items \ BadItems(j)} ELSE known
  /\ nohit' = IF over /\ job[j].kind = "load" /\ Bad(j) # {} /\ IsCurrent(j) THEN [nohit EXCEPT ![job[j].req] = TRUE] ELSE nohit
  /\ owes' = IF over THEN Owed(j) ELSE owes
  /\ IF Restarts(j, k) THEN Gone(job[j].req) ELSE UNCHANGED <<tbl, rp>>
  /\ UNCHANGED <<nextJob, job, epoch, lastGen>>

Paid == owes' = [i \in 1..(Last(owes) - 1) |-> owes[i + 1]]
Release == Paid /\ UNCHANGED <<Jobs, trk, tbl, rp, known, epoch, nohit, lastGen>>
Forget == /\ known' = known \ SeqSet(Ev.names)
          /\ IF owes = <<>> THEN UNCHANGED owes ELSE Paid
          /\ UNCHANGED <<Jobs, trk, tbl, rp, epoch, nohit, lastGen>>
Reset == /\ epoch' = epoch + 1 /\ known' = {}
         /\ trk' = [r \in Reqs |-> IF r \in StillLoading THEN [trk[r] EXCEPT !.load = "tainted"] ELSE NoTrk]
         /\ tbl' = [r \in Reqs |-> IF r \in StillLoading THEN tbl[r] ELSE NoTable]
         /\ rp' = [r \in Reqs |-> IF r \in StillLoading THEN rp[r] ELSE NoHashes]
         /\ UNCHANGED <<Jobs, nohit, owes, lastGen>>

Step == CASE Ev.action = "BeginGeneration" -> Begin
          [] Ev.action = "EndGeneration" -> End
          [] Ev.action = "EndRequest" -> EndRequest
          [] Ev.action = "EmitLoad" -> Load
          [] Ev.action = "EmitStore" -> Store
          [] Ev.action = "ApplyReport" -> Apply
          [] Ev.action \in {"Release", "EvictTainted"} -> Release
          [] Ev.action = "Forget" -> Forget
          [] Ev.action = "Reset" -> Reset

-----------------------------------------------------------------------------
(* What the model would have allowed where a recording is rejected, for the runner to tell. *)
HasReq == "req" \in DOMAIN Ev
Allowed ==
  [owes |-> owes,
   reports |-> {<<j, k>> \in Live \X Ranks : k \notin led[j].rep},
   nextJob |-> nextJob,
   lastGen |-> lastGen,
   room |-> MaxPinned - Cardinality(Pinned),
   pinned |-> Pinned,
   tracker |-> IF HasReq THEN trk[Ev.req] ELSE NoTrk,
   nohit |-> HasReq /\ nohit[Ev.req],
   due |-> IF Ev.action # "EmitStore" THEN {}
           ELSE Want(trk[Ev.req], Padded(Ev.hashes, NoHash), Storable(trk[Ev.req], Padded(Ev.table, 0), Ev.storable), known)]

TInit == Init /\ tr \in DOMAIN Traces /\ l = 1 /\ lastGen = 0 /\ owes = <<>>
TNext ==
  /\ l <= NumEvents
  /\ LET verdict == Rules
         broken == {g \in DOMAIN verdict : ~verdict[g]}
     IN IF broken = {} THEN Step
        ELSE PrintT(ToString(<<"REJECTED", tr, l, broken, Allowed>>)) /\ FALSE
  /\ l' = l + 1 /\ tr' = tr
  /\ l = NumEvents => PrintT(ToString(<<"ACCEPTED", tr, Live>>))
  /\ UNCHANGED rest
TSpec == TInit /\ [][TNext]_<<vars, traceVars>>
=============================================================================

-------------------------------- MODULE Trace --------------------------------
(***************************************************************************)
(* Is a recording of a real engine a behaviour of the model's scheduler    *)
(* side?  TraceData (generated) holds the events; each is one step here,   *)
(* built from the operators of MooncakeStoreLedger, with vLLM's choices     *)
(* (block tables, what was computed) and the ranks' reports taken from the  *)
(* recording.  Each event's rules are named; on rejection the runner says   *)
(* which one failed, and what the model's state was.                       *)
(*                                                                         *)
(* Left out: timing (when a retry is due, backoff), the ranks' inside, DMA, *)
(* contents, synchronous loads.  The conformance tours cover those.        *)
(***************************************************************************)
EXTENDS MooncakeStoreLedger, TraceData, TLC

VARIABLES l,          \* the next event
          lastGen,    \* generation numbers only grow
          owes        \* blocks that the next event must release, with their job, or <<0, {}>>

traceVars == <<l, lastGen, owes>>
rest == <<rst, rp, rgen, full, tbl, ref, cached, preempted, owed, pipe, calm, nohit, stalled, rankVars, store>>

ReqSet == 1..NumReqs
BlockSet == 1..NumBlocks
RankSet == 1..NumRanks
OnePrompt == {[i \in 1..MaxIdx |-> NoHash]}

Ev == Trace[l]
SeqSet(s) == {s[i] : i \in DOMAIN s}
Padded(s, d) == [i \in 1..MaxIdx |-> IF i <= Len(s) THEN s[i] ELSE d]
Pairs(b, n) == {<<b[i], n[i]>> : i \in DOMAIN b}
All(guards) == \A g \in DOMAIN guards : guards[g]
Nothing == <<0, {}>>

(* The rules of each event. *)
BeginRules ==
  [ReleaseFirst |-> owes = Nothing, GenerationIsNew |-> Ev.gen > lastGen]
EndRules ==
  [ReleaseFirst |-> owes = Nothing, GenerationIsCurrent |-> trk[Ev.req].gen = Ev.gen]
LoadRules ==
  [ReleaseFirst |-> owes = Nothing, GenerationIsCurrent |-> trk[Ev.req].gen = Ev.gen, JobIdIsNext |-> Ev.job = nextJob,
   NoLoadYet |-> trk[Ev.req].load \in {"none", "failed"},
   TargetsNotPinned |-> SeqSet(Ev.blocks) \cap Pinned = {}]

T == Padded(Ev.table, 0)
P == Padded(Ev.hashes, NoHash)
Chosen == IF Ev.job = 0 THEN {} ELSE SeqSet(Ev.blocks)
Items == {<<i, T[i], P[i]>> : i \in {i \in 1..Ev.storable : T[i] \in Chosen}}
Retry == SeqSet(Ev.retry)
Before == trk[Ev.req]
NobodyElse(j) ==      \* a block that a job reads, or that a load of another request fills, is not in this table
  \A x \in job[j].items : \A i \in 1..Ev.storable : T[i] = x[2] =>
    IF job[j].kind = "store" THEN P[i] = x[3] ELSE job[j].req = Ev.req
StoreRules ==
  [ReleaseFirst |-> owes = Nothing,
   GenerationIsCurrent |-> Before.gen = Ev.gen,
   JobIdIsNext |-> Ev.job \in {0, nextJob},
   StorableNow |-> Chosen # {} => Storable(Before, T, Ev.storable) = Ev.storable,
   BlocksAreDue |-> {x[1] : x \in Items} \subseteq Due(Before, Ev.storable),
   NotStoredTwice |-> {x[1] : x \in Items} \subseteq Want(Before, P, Ev.storable),
   NamesBelongToBlocks |-> Ev.job # 0 => Pairs(Ev.blocks, Ev.names) = {<<x[2], x[3]>> : x \in Items},
   WithinBudget |-> Chosen # {} => WithinBudget(Chosen),
   PinnedNotFreed |-> \A j \in Live : NobodyElse(j),
   FrontierGrows |-> Ev.frontier >= Before.front,
   NothingSkipped |-> \A i \in (Before.front + 1)..Ev.frontier :
                        i \in {x[1] : x \in Items} \/ P[i] \in known \/ i \in Retry,
   RetryHasReason |-> \A i \in Retry : i \in Before.retry \/ (i <= Ev.storable /\ HashInFlight(P[i])),
   IssuedIsNotRetried |-> Retry \cap {x[1] : x \in Items} = {}]

J == Ev.job
K == Ev.rank + 1
RepAfter == led[J].rep \cup {K}
BadAfter == led[J].bad \cup SeqSet(Ev.bad)
Over == RepAfter = Ranks
IsCurrent == trk[job[J].req].gen = job[J].gen /\ job[J].gen # 0
BadIdx == {x[1] : x \in {x \in job[J].items : x[4] \in BadAfter}}
RetryAfter == SeqSet(Ev.retry)
ReportRules ==
  [ReleaseFirst |-> owes = Nothing,
   JobIsLive |-> J \in Live,
   RankIsKnown |-> K \in Ranks,
   FirstReportOfThisRank |-> J \in Live => K \notin led[J].rep,
   GoodIffDone |-> (Ev.result = "DONE") = (Ev.bad = <<>>),
   OldGenerationHarmless |-> (J \in Live /\ Over /\ job[J].kind = "store" /\ trk[job[J].req].gen # 0) =>
      IF IsCurrent THEN RetryAfter \ trk[job[J].req].retry \subseteq BadIdx /\ trk[job[J].req].retry \subseteq RetryAfter
      ELSE RetryAfter = trk[job[J].req].retry]
ReleaseRules ==
  [OwedByThisJob |-> owes[1] = Ev.job, TheBlocksPinned |-> SeqSet(Ev.blocks) = owes[2]]
OtherRules == [ReleaseFirst |-> owes = Nothing]

(* The effects. *)
Keep == UNCHANGED <<nextJob, job, led, known, epoch>>
Begin == /\ All(BeginRules) /\ lastGen' = Ev.gen
         /\ trk' = [trk EXCEPT ![Ev.req] = BeginGeneration(Ev.gen, "none")]
         /\ Keep /\ UNCHANGED owes
End == /\ All(EndRules) /\ trk' = [trk EXCEPT ![Ev.req] = NoTrk] /\ Keep /\ UNCHANGED <<owes, lastGen>>

Issue(kind, items) ==
  /\ nextJob' = nextJob + 1
  /\ job' = [job EXCEPT ![nextJob] = [kind |-> kind, req |-> Ev.req, gen |-> Ev.gen, sync |-> FALSE, epoch |-> epoch,
                                      items |-> items]]
  /\ led' = [led EXCEPT ![nextJob] = [st |-> "live", held |-> IF kind = "store" THEN BlocksOf(items) ELSE {},
                                      rep |-> {}, cnt |-> 0, bad |-> {}]]
Position(b) == CHOOSE i \in DOMAIN Ev.blocks : Ev.blocks[i] = b
Numbered(items) == {<<x[1], x[2], x[3], Position(x[2])>> : x \in items}
Load == /\ All(LoadRules)
        /\ Issue("load", {<<i, Ev.blocks[i], Ev.names[i], i>> : i \in DOMAIN Ev.blocks})
        /\ trk' = [trk EXCEPT ![Ev.req].load = "pending"]
        /\ UNCHANGED <<known, epoch, owes, lastGen>>
Store == /\ All(StoreRules)
         /\ IF Ev.job = 0 THEN UNCHANGED <<nextJob, job, led>> ELSE Issue("store", Numbered(Items))
         /\ trk' = [trk EXCEPT ![Ev.req].front = Ev.frontier, ![Ev.req].retry = Retry]
         /\ UNCHANGED <<known, epoch, owes, lastGen>>

Good == {x[3] : x \in {x \in job[J].items : x[4] \notin BadAfter}}
Learnt == IF job[J].epoch # epoch \/ (job[J].kind = "load" /\ BadAfter # {}) THEN {} ELSE Good
TrackerAfter(t) ==
  IF ~IsCurrent THEN t
  ELSE IF job[J].kind = "store" THEN [t EXCEPT !.retry = RetryAfter]
  ELSE IF t.load = "tainted" THEN t ELSE LoadFinished(t, FALSE, BadAfter = {})
Apply ==
  /\ All(ReportRules)
  /\ led' = [led EXCEPT ![J] = IF Over THEN [NoLed EXCEPT !.st = "done"]
                               ELSE [@ EXCEPT !.rep = RepAfter, !.cnt = @ + 1, !.bad = BadAfter]]
  /\ trk' = IF Over THEN [trk EXCEPT ![job[J].req] = TrackerAfter(@)] ELSE trk
  /\ known' = IF Over THEN known \cup Learnt ELSE known
  /\ owes' = IF Over /\ job[J].kind = "store" THEN <<J, led[J].held>> ELSE owes
  /\ UNCHANGED <<nextJob, job, epoch, lastGen>>
Release == /\ All(ReleaseRules) /\ owes' = Nothing /\ UNCHANGED <<trk, nextJob, job, led, known, epoch, lastGen>>
Forget == /\ All(OtherRules) /\ known' = known \ SeqSet(Ev.names)
          /\ UNCHANGED <<trk, nextJob, job, led, epoch, owes, lastGen>>
Reset == /\ All(OtherRules) /\ epoch' = epoch + 1 /\ known' = {}
         /\ trk' = [r \in Reqs |-> IF trk[r].load = "pending" THEN [trk[r] EXCEPT !.load = "tainted"] ELSE NoTrk]
         /\ UNCHANGED <<nextJob, job, led, owes, lastGen>>

TNext ==
  /\ l <= NumEvents /\ l' = l + 1
  /\ CASE Ev.action = "BeginGeneration" -> Begin
       [] Ev.action = "EndGeneration" -> End
       [] Ev.action = "EmitLoad" -> Load
       [] Ev.action = "EmitStore" -> Store
       [] Ev.action = "ApplyReport" -> Apply
       [] Ev.action = "Release" -> Release
       [] Ev.action = "Forget" -> Forget
       [] Ev.action = "Reset" -> Reset
  /\ UNCHANGED rest
TInit == Init /\ l = 1 /\ lastGen = 0 /\ owes = Nothing
TSpec == TInit /\ [][TNext]_<<vars, traceVars>>

(* Accepted = this "invariant" is violated: the whole recording has been explained. *)
NotAccepted == l <= NumEvents

(* Where a recording was rejected: the rules of event l, for the runner to print. *)
Rules == CASE Ev.action = "BeginGeneration" -> BeginRules
           [] Ev.action = "EndGeneration" -> EndRules
           [] Ev.action = "EmitLoad" -> LoadRules
           [] Ev.action = "EmitStore" -> StoreRules
           [] Ev.action = "ApplyReport" -> ReportRules
           [] Ev.action = "Release" -> ReleaseRules
           [] OTHER -> OtherRules
Report == l <= NumEvents =>
            PrintT(ToString(<<"AT", l, {g \in DOMAIN Rules : ~Rules[g]}, Pinned, {j \in Live : TRUE}>>))
=============================================================================

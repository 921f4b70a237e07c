--------------------------------- MODULE MC ---------------------------------
(***************************************************************************)
(* Everything that is about checking and not about the protocol: small     *)
(* constants, what a narrow model leaves out, fairness.  MC.cfg and its    *)
(* sisters choose from here.                                               *)
(***************************************************************************)
EXTENDS MooncakeStoreProps

(* Prompts.  Hashes chain, so two prompts share exactly their common prefix.  The last block of a prompt is never a hit. *)
ShortPrompts == {<<"a">>, <<"c">>}               \* one block each, nothing shared, nothing to hit
ShortPrompt == {<<"a">>}
SharedPrompts == {<<"a", "b">>, <<"a", "c">>}    \* share their first block
OnePrompt == {<<"a", "b">>}
TwoPrompts == {<<"a", "b">>, <<"c", "d">>}       \* two blocks each, nothing shared
LongPrompt == {<<"a", "b", "c">>}                \* two blocks may be loaded

NoLoads == {}
Async == {FALSE}
Sync == {TRUE}
FullSteps == {FALSE}
AnySteps == {TRUE, FALSE}

(* Dimensions that a narrow model switches off, each with what it costs.  An action is switched off by `Action <- FALSE`. *)
LowestFree(B) == IF B = {} THEN {} ELSE {Min(B)}   \* blocks are alike: core takes the lowest free one
PollLate(k, s) == fwd[k] >= s                      \* results are collected after the forward, never before the saves
NoRefusal(k, j) == {{}}                            \* the store has room
ForeignPutHit(k, x) ==                             \* other engines put only what some admission can hit
  /\ x[1] \in Hittable /\ store[k][x] = NoObj /\ ~calm /\ x[2] = epoch
  /\ store' = [store EXCEPT ![k][x] = x]
  /\ UNCHANGED <<coreVars, schedVars, rankVars>>
NothingToDo ==                                     \* an empty step only if nobody can be given work
  \A r \in Reqs : /\ rst[r] = "waiting" => FreeBlocks \ Hits(rp[r], LocalHit(rp[r])) = {}
                  /\ rst[r] = "running" /\ full[r] < Len(rp[r]) => tbl[r][full[r] + 1] = 0 /\ FreeBlocks = {}

-----------------------------------------------------------------------------
(* Fairness: what keeps moving.  Weak: if it can go on for ever, it does.  Strong, for a request's turn: if it can be
   given work again and again, it is.                                                                               *)
Turn(r) == \/ \E b \in Blocks, part \in PartSteps : Compute(r, b, part) \/ AdmitCompute(r, b, part)
           \/ \E n \in Idx : AdmitLoad(r, n) \/ AdmitSyncLoad(r, n)
           \/ Finish(r)
CoreFair == /\ WF_vars(BecomeCalm) /\ WF_vars(EmptyStep) /\ WF_vars(UpdateFromOutput)
            /\ WF_vars(\E v, r \in Reqs : PreemptForSpace(v, r))
            /\ \A r \in Reqs : SF_vars(Turn(r))
            /\ \A k \in Ranks : WF_vars(RankAccept(k) \/ RankForward(k) \/ TakeReports(k))
TransferFair ==
  \A k \in Ranks : /\ WF_vars(\E j \in JobIds : RankFinish(k, j) \/ RankExpire(k, j) \/ \E R \in SUBSET Idx : RankStart(k, j, R))
                   /\ WF_vars(DmaNext(k))
LiveSpec == Spec /\ CoreFair /\ TransferFair
StallSpec == Spec /\ CoreFair /\ WF_vars(StallTimeout)   \* the store may stop answering for ever

-----------------------------------------------------------------------------
(* Reachability: each is *expected to be violated*, so that no model passes because nothing happens. *)
StoreOf(j) == job[j].kind = "store"
Never_PreemptWhileDma == \A t \in dma : StoreOf(t[2]) => rgen[job[t[2]].req] = job[t[2]].gen
Never_ReuseWhileQueued ==
  \A k \in Ranks, j \in JobIds : rk[k][j].st = "queued" /\ StoreOf(j) /\ rst[job[j].req] = "running" =>
    \A x \in job[j].items : rp[job[j].req][x[1]] = x[3]
Never_RanksTwoJobsApart ==
  ~\E k1, k2 \in Ranks, j1, j2 \in JobIds : j1 < j2 /\ rk[k1][j2].st = "sent" /\ rk[k2][j1].st = "queued"
Never_Quarantine == \A k \in Ranks, j \in JobIds : rk[k][j].st # "quar"
Never_LateBytesArrive ==        \* quarantine left: reported bad, though the bytes came in the end
  \A k \in Ranks, j \in JobIds : rk[k][j].st = "ready" /\ StoreOf(j) =>
    \A x \in job[j].items : x[1] \in rk[k][j].bad => store[k][Key(j, x)] = NoObj
Never_NextJobBesideQuarantine ==
  ~\E k \in Ranks, i, j \in JobIds : rk[k][i].st = "quar" /\ rk[k][j].st = "running"
Never_HitOnPinnedBlock ==       \* a block held by pins alone is taken as a prefix hit
  \A b \in Pinned : \A r \in Reqs : b \in Range(tbl[r]) => \E j \in Live : b \in led[j].held /\ job[j].req = r
Never_SharedPinned == \A b \in Pinned : ref[b] - PinsOn(b) < 2
Never_SameStepResume == [][\A r \in Reqs : r \in preempted => rst'[r] # "running"]_vars
Never_AbortedAtStepEnd == [][\A r \in Reqs : rst[r] = "running" /\ StepsOf(r) # {} => rst'[r] # "none"]_vars
Never_Retried == \A j \in Live, r \in Reqs : trk[r].att # NoTries /\ StoreOf(j) => trk[r].gen # job[j].gen
Never_BudgetWaits == \A r \in Reqs : rst[r] = "running" => trk[r].front >= full[r]
Never_SkippedInFlight == \A r \in Reqs : trk[r].att # NoTries \/ trk[r].retry = {}
Never_ReportReplayed == \A s \in InFlight : \A x \in pipe[s].rep : rk[x[1]][x[2]].st # "gone"
Never_TwoStepsInFlight == Cardinality({s \in InFlight : pipe[s].wr # {}}) < 2
Never_FreedWhileInFlight == \A s \in InFlight : \A x \in pipe[s].wr : ref[x[1]] > 0
Never_PolledBeforeAccepted == \A k \in Ranks : polled[k] <= hooked[k]
Never_LoadPartlyFailed == \A r \in Reqs : ~(rst[r] = "running" /\ nohit[r] /\ full[r] = 1 /\ trk[r].load = "failed")
Never_LoadRestarted == \A r \in Reqs : ~(rst[r] = "waiting" /\ nohit[r])
Never_AbortedWhileLoading == \A r \in Reqs : rst[r] # "zombie"
Never_LoadFailsOnOneRank ==
  ~\E j \in Live, k1, k2 \in Ranks : ~StoreOf(j) /\ rk[k1][j].st = "ready" /\ rk[k1][j].bad # {}
                                     /\ rk[k2][j].st = "ready" /\ rk[k2][j].bad = {}
Never_LateBytesOnOneRank == ~\E j \in Live, k1, k2 \in Ranks : ~StoreOf(j) /\ rk[k1][j].st = "gone" /\ rk[k2][j].st = "quar"
Never_HalfHit ==
  [][\A r \in Reqs, k1, k2 \in Ranks : rst[r] = "waiting" /\ rst'[r] = "running" /\ ~nohit[r] /\ InFlight = {} =>
       ~(store[k1][KeyOf(rp[r][1], epoch)] # NoObj /\ store[k2][KeyOf(rp[r][1], epoch)] = NoObj)]_vars
Never_MadeRoom == owed = 0
Never_RecomputedInPlace ==
  \A t \in dma : \A x \in job[t[2]].items : x[1] = t[3] /\ StoreOf(t[2]) =>
    ~\E s \in InFlight : s > fwd[t[1]] /\ \E w \in pipe[s].wr : w[1] = x[2]
Never_EvictedUnderLoad ==
  \A t \in dma : \A x \in job[t[2]].items : ~StoreOf(t[2]) /\ x[1] = t[3] => store[t[1]][Key(t[2], x)] # NoObj
Never_SyncTargetShared == \A b \in SyncTargets : ref[b] < 2
Never_Tainted == \A r \in Reqs : trk[r].load # "tainted"
Never_OldPutAfterReset == \A t \in dma : job[t[2]].epoch = epoch
Never_ResetRefused == ~mute
Never_Starved == \A r \in Reqs : ~Starved(r)
Never_WaitsForPins == ~(HasPendingBlockFrees /\ \E r \in Reqs : Starved(r))
Never_Stalled == ~stalled
=============================================================================

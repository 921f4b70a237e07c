------------------------------- MODULE Export -------------------------------
(* Slices of the model small enough to walk every edge of.  Each slice-*.cfg says what it leaves out. *)
EXTENDS MC
OneShort == {<<"a">>}                  \* one block, nothing to hit

(* What happens around the first job is the slice; before it the scene is set, after it nobody new comes. *)
ArriveFirst(r, p) ==
  /\ rst[r] = "none" /\ nextJob = 1 /\ r = Min({x \in Reqs : rst[x] = "none"}) /\ CoreIdle
  /\ rst' = [rst EXCEPT ![r] = "waiting"] /\ rp' = [rp EXCEPT ![r] = p]
  /\ UNCHANGED <<rgen, full, tbl, ref, cached, preempted, owed, pipe, calm, epoch, schedVars, rankVars, store>>
ArriveTwice(r, p) ==                    \* an id that is used for one prompt, then for another
  /\ rst[r] = "none" /\ CoreIdle
  /\ (nextJob = 1 /\ p = <<"a">>) \/ (nextJob = 2 /\ p = <<"c">>)
  /\ rst' = [rst EXCEPT ![r] = "waiting"] /\ rp' = [rp EXCEPT ![r] = p]
  /\ UNCHANGED <<rgen, full, tbl, ref, cached, preempted, owed, pipe, calm, epoch, schedVars, rankVars, store>>
AbortLoading(r) ==
  /\ CoreIdle /\ rst[r] = "loading" /\ Gone(r, "zombie") /\ UNCHANGED <<rgen, full, tbl, ref>>
ForeignPutFirst(k, x) ==
  /\ x[1] \in Hittable /\ store[k][x] = NoObj /\ nextJob = 1 /\ x[2] = epoch
  /\ store' = [store EXCEPT ![k][x] = x]
  /\ UNCHANGED <<coreVars, schedVars, rankVars>>
=============================================================================

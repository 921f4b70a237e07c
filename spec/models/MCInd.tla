-------------------------------- MODULE MCInd --------------------------------
(***************************************************************************)
(* All states that satisfy IndInv, constructed: choose owners, jobs and    *)
(* how far each rank is, define reference counts from them, then choose    *)
(* what is due and what is right within what the invariant allows.  TLC    *)
(* takes each of them as an initial state, so one step of INext from       *)
(* everywhere is checked.  (`stale` of a job that does not exist is set by *)
(* Emit before anything reads it: FALSE stands for both values.)           *)
(*                                                                         *)
(* Request ids, job ids and ranks are mere names here: INext and IndInv    *)
(* mention none of them.  So a state is as good as the one with two names  *)
(* of a kind swapped, and Ordered takes one of the two: MCIndStep.  The    *)
(* long model MCIndAll takes both.                                         *)
(***************************************************************************)
EXTENDS MooncakeStoreInd

Lives == {"queued", "moving", "running", "ready", "told"}       \* "moving": running, and in dma
Progress(b) == IF b = 0 THEN {[k \in Ranks |-> "none"]} ELSE {f \in [Ranks -> Lives] : \E k \in Ranks : f[k] # "told"}
AnyProgress == UNION {Progress(b) : b \in {0} \cup Blocks}

Ordered ==
  /\ \A x, y \in Reqs : x < y => own[x] <= own[y]
  /\ \A x, y \in JobIds : x < y => blk[x] <= blk[y]
  /\ \A x, y \in Ranks : x < y => Cardinality(due[x]) <= Cardinality(due[y])

IndInit ==
  \E f \in [JobIds -> AnyProgress] :
    /\ own \in [Reqs -> {0} \cup Blocks]
    /\ blk \in [JobIds -> {0} \cup Blocks]
    /\ due \in [Ranks -> SUBSET Blocks]
    /\ Ordered
    /\ \A j \in JobIds : f[j] \in Progress(blk[j])
    /\ ref = [b \in Blocks |-> Cardinality(Owners(b)) + Cardinality(PinsOn(b))]
    /\ stale = [j \in JobIds |-> FALSE] /\ poison = FALSE
    /\ life = [k \in Ranks |-> [j \in JobIds |-> IF f[j][k] = "moving" THEN "running" ELSE f[j][k]]]
    /\ dma = {t \in Ranks \X JobIds : f[t[2]][t[1]] = "moving"}
    /\ \A t \in dma : blk[t[2]] \notin due[t[1]]
    /\ right \in [Ranks -> SUBSET {b \in Blocks : ref[b] > 0}]
    /\ \A k \in Ranks, b \in Blocks : ref[b] > 0 => b \in due[k] \cup right[k]

Stop == FALSE /\ UNCHANGED ivars

(* Wrong versions: the induction must fail for each. *)
NoPin(b) == [ref EXCEPT ![b] = @]
Any2(k, j) == TRUE
Any == TRUE
=============================================================================

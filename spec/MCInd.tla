-------------------------------- MODULE MCInd --------------------------------
(***************************************************************************)
(* All states that satisfy IndInv, constructed: choose owners, jobs and    *)
(* how far each rank is, define reference counts from them, then choose    *)
(* what is due and what is right within what IndBytes and IndFence allow.  *)
(* The module is symmetric in requests, blocks and jobs, so Canonical      *)
(* keeps only one of the owner and job patterns that are alike (MCIndAll   *)
(* keeps all of them).  `stale` of a job that does not exist is set by     *)
(* Emit before it is read: FALSE stands for both.                          *)
(***************************************************************************)
EXTENDS MooncakeStoreInd

Canonical(o, j) == /\ \A r \in Reqs : o[r] <= 1 + Cardinality({o[q] : q \in {q \in Reqs : q < r}} \ {0})
                   /\ \A r, q \in Reqs : r < q /\ o[q] = 0 => TRUE
                   /\ \A x, y \in JobIds : x < y => j[x] <= j[y]
Everything(o, j) == TRUE

Lives == {"queued", "moving", "running", "movingQ", "quar", "ready", "told"}    \* with "is moving" folded in
Progress(j) == IF j = 0 THEN {[k \in Ranks |-> "none"]}
               ELSE {f \in [Ranks -> Lives] : \E k \in Ranks : f[k] # "told"}
LifeOf(s) == IF s = "moving" THEN "running" ELSE IF s = "movingQ" THEN "quar" ELSE s
Jobs2 == JobIds
Patterns == {p \in [Reqs -> {0} \cup Blocks] \X [JobIds -> {0} \cup Blocks] : Canonical(p[1], p[2])}
Moves(f) == {t \in Ranks \X JobIds : f[t[2]][t[1]] \in {"moving", "movingQ"}}

IndInit ==
  \E p \in Patterns : \E f \in [JobIds -> UNION {Progress(x) : x \in {0} \cup Blocks}] :
    /\ \A j \in JobIds : f[j] \in Progress(p[2][j])
    /\ own = p[1] /\ blk = p[2]
    /\ ref = [b \in Blocks |-> Cardinality({r \in Reqs : p[1][r] = b}) + Cardinality({j \in JobIds : p[2][j] = b})]
    /\ stale = [j \in JobIds |-> FALSE] /\ poison = FALSE
    /\ life = [k \in Ranks |-> [j \in JobIds |-> LifeOf(f[j][k])]]
    /\ dma = Moves(f)
    /\ due \in [Ranks -> SUBSET Blocks]
    /\ \A t \in dma : blk[t[2]] \notin due[t[1]]
    /\ right \in [Ranks -> SUBSET {b \in Blocks : ref[b] > 0}]
    /\ \A k \in Ranks, b \in Blocks : ref[b] > 0 => b \in due[k] \cup right[k]
IndSpec == IndInit /\ [][FALSE]_ivars
=============================================================================

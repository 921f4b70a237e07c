-------------------------- MODULE MooncakeStoreInd --------------------------
(***************************************************************************)
(* The store path alone (pins, ranks, DMA, reuse of blocks), small enough  *)
(* to prove by induction: IndInv holds at the start, every step from *any* *)
(* state that satisfies IndInv leads to one that does, and IndInv implies  *)
(* PinnedNotFreed and NoPoison.  So, for these bounds, they hold after any *)
(* number of steps, requests, generations and jobs.                        *)
(*                                                                         *)
(* Against MooncakeStore.tla it leaves out: loads, the budget, retry, the  *)
(* tracker, the order of jobs, steps and outputs (a report is applied when *)
(* it is ready), reset, the prefix index.  A request holds one block, a    *)
(* job reads one block.  A quarantined job is a running one here: neither  *)
(* is reported while its bytes move.  What a block means is  *)
(* not named by a hash: `right` says whether it holds the bytes it should, *)
(* `stale` whether a job's block was given away since it was emitted.      *)
(***************************************************************************)
EXTENDS Naturals, FiniteSets

CONSTANTS Reqs, Blocks, JobIds, Ranks
ASSUME IsFiniteSet(Reqs) /\ IsFiniteSet(JobIds) /\ Ranks # {} /\ 0 \notin Blocks
VARIABLES own,      \* own[r]: block of request r, or 0
          ref,      \* ref[b]: reference count in the block pool
          blk,      \* blk[j]: block that job j reads, 0: the job does not exist (ids are used again when nothing refers to them)
          stale,    \* stale[j]: blk[j] was given to somebody else after j was emitted
          life,     \* life[k][j]: none, queued, running, ready, told
          dma,      \* (rank, job): the block's bytes are moving
          due,      \* due[k]: blocks that a forward already sent to rank k is still to write
          right,    \* right[k]: blocks that hold the bytes they should on rank k
          poison    \* some object holds wrong bytes
ivars == <<own, ref, blk, stale, life, dma, due, right, poison>>

Live == {j \in JobIds : blk[j] # 0}
Owners(b) == {r \in Reqs : own[r] = b}
PinsOn(b) == {j \in Live : blk[j] = b}

IInit ==
  /\ own = [r \in Reqs |-> 0] /\ ref = [b \in Blocks |-> 0] /\ blk = [j \in JobIds |-> 0]
  /\ stale = [j \in JobIds |-> FALSE] /\ life = [k \in Ranks |-> [j \in JobIds |-> "none"]]
  /\ dma = {} /\ due = [k \in Ranks |-> {}] /\ right = [k \in Ranks |-> {}] /\ poison = FALSE

(* A free block is given to r and a forward that fills it is sent to every rank (AdmitCompute, Compute). *)
Give(r, b) ==
  /\ own[r] = 0 /\ ref[b] = 0
  /\ own' = [own EXCEPT ![r] = b] /\ ref' = [ref EXCEPT ![b] = 1]
  /\ stale' = [j \in JobIds |-> stale[j] \/ (blk[j] = b)]
  /\ due' = [k \in Ranks |-> due[k] \cup {b}] /\ right' = [k \in Ranks |-> right[k] \ {b}]
  /\ UNCHANGED <<blk, life, dma, poison>>

(* r takes a block that somebody else holds as a prefix hit (AdmitCompute). *)
Hit(r, b) ==
  /\ own[r] = 0 /\ ref[b] > 0
  /\ own' = [own EXCEPT ![r] = b] /\ ref' = [ref EXCEPT ![b] = @ + 1]
  /\ UNCHANGED <<blk, stale, life, dma, due, right, poison>>

(* r loses its block: Preempt, Finish, Abort.  The bytes of a free block mean nothing any more. *)
Lose(r) ==
  /\ own[r] # 0
  /\ own' = [own EXCEPT ![r] = 0] /\ ref' = [ref EXCEPT ![own[r]] = @ - 1]
  /\ right' = [k \in Ranks |-> IF ref[own[r]] = 1 THEN right[k] \ {own[r]} ELSE right[k]]
  /\ UNCHANGED <<blk, stale, life, dma, due, poison>>

(* EmitStore: a job on r's block, with its pin. *)
Pin(b) == [ref EXCEPT ![b] = @ + 1]
Emit(r, j) ==
  /\ own[r] # 0 /\ j \notin Live /\ \A k \in Ranks : <<k, j>> \notin dma
  /\ blk' = [blk EXCEPT ![j] = own[r]] /\ ref' = Pin(own[r])
  /\ stale' = [stale EXCEPT ![j] = FALSE]
  /\ life' = [k \in Ranks |-> [life[k] EXCEPT ![j] = "queued"]]
  /\ UNCHANGED <<own, dma, due, right, poison>>

(* RankForward: the forward fills its block. *)
Forward(k, b) ==
  /\ b \in due[k]
  /\ due' = [due EXCEPT ![k] = @ \ {b}]
  /\ right' = [right EXCEPT ![k] = IF ref[b] > 0 THEN @ \cup {b} ELSE @]
  /\ UNCHANGED <<own, ref, blk, stale, life, dma, poison>>

Step(k, j, from, to) == life[k][j] = from /\ life' = [life EXCEPT ![k][j] = to]
FencePassed(k, j) == blk[j] \notin due[k]
Start(k, j) ==
  /\ Step(k, j, "queued", "running") /\ FencePassed(k, j) /\ dma' = dma \cup {<<k, j>>}
  /\ UNCHANGED <<own, ref, blk, stale, due, right, poison>>
Refuse(k, j) == \/ Step(k, j, "queued", "ready")               \* RankDrop
                \/ Step(k, j, "queued", "running")             \* RankStart, all refused
Move(k, j) ==
  /\ <<k, j>> \in dma /\ dma' = dma \ {<<k, j>>}
  /\ poison' = (poison \/ stale[j] \/ blk[j] \notin right[k])
  /\ UNCHANGED <<own, ref, blk, stale, life, due, right>>
Fail(k, j) == <<k, j>> \in dma /\ dma' = dma \ {<<k, j>>} /\ UNCHANGED <<own, ref, blk, stale, life, due, right, poison>>
NothingMoves(k, j) == <<k, j>> \notin dma
Finish(k, j) == Step(k, j, "running", "ready") /\ NothingMoves(k, j)       \* RankFinish, RankExpire

(* ApplyReport: when the last rank has reported, the pin goes and the job is forgotten. *)
AllTold(k, j) == \A q \in Ranks \ {k} : life[q][j] = "told"
Report(k, j) ==
  /\ life[k][j] = "ready"
  /\ IF AllTold(k, j)
     THEN /\ blk' = [blk EXCEPT ![j] = 0] /\ ref' = [ref EXCEPT ![blk[j]] = @ - 1]
          /\ right' = [q \in Ranks |-> IF ref[blk[j]] = 1 THEN right[q] \ {blk[j]} ELSE right[q]]
          /\ life' = [q \in Ranks |-> [life[q] EXCEPT ![j] = "none"]]
     ELSE life' = [life EXCEPT ![k][j] = "told"] /\ UNCHANGED <<blk, ref, right>>
  /\ UNCHANGED <<own, stale, dma, due, poison>>

INext ==
  \/ \E r \in Reqs : Lose(r) \/ (\E b \in Blocks : Give(r, b) \/ Hit(r, b)) \/ (\E j \in JobIds : Emit(r, j))
  \/ \E k \in Ranks : \/ \E b \in Blocks : Forward(k, b)
                      \/ \E j \in JobIds : Start(k, j) \/ Move(k, j) \/ Fail(k, j) \/ Report(k, j)
  \/ \E k \in Ranks, j \in JobIds : /\ Refuse(k, j) \/ Finish(k, j)
                                    /\ UNCHANGED <<own, ref, blk, stale, dma, due, right, poison>>

-----------------------------------------------------------------------------
(* The two properties, as in MooncakeStoreProps. *)
PinnedNotFreed == \A t \in dma : blk[t[2]] # 0 /\ ref[blk[t[2]]] > 0 /\ ~stale[t[2]]
NoPoison == ~poison

(* The inductive invariant, conjunct by conjunct. *)
IndTypes ==                                                        \* TLC finds types by itself, `./dev prove` is told
  /\ own \in [Reqs -> {0} \cup Blocks] /\ ref \in [Blocks -> Nat] /\ blk \in [JobIds -> {0} \cup Blocks]
  /\ stale \in [JobIds -> BOOLEAN] /\ poison \in BOOLEAN
  /\ life \in [Ranks -> [JobIds -> {"none", "queued", "running", "ready", "told"}]]
  /\ dma \subseteq Ranks \X JobIds
  /\ due \in [Ranks -> SUBSET Blocks] /\ right \in [Ranks -> SUBSET Blocks]
IndRefs == \A b \in Blocks : ref[b] = Cardinality(Owners(b)) + Cardinality(PinsOn(b))
IndPinned == \A j \in Live : ~stale[j]                                 \* a live job's block is still what it was
IndLife == \A k \in Ranks, j \in JobIds : (life[k][j] = "none") <=> (j \notin Live)
IndOpen == \A j \in Live : \E k \in Ranks : life[k][j] # "told"        \* a job is live until all have reported
IndDma == \A t \in dma : life[t[1]][t[2]] = "running"
IndBytes == \A k \in Ranks, b \in Blocks : ref[b] > 0 => b \in due[k] \cup right[k]   \* right, or about to be
IndFence == \A t \in dma : blk[t[2]] \notin due[t[1]]                  \* what moves has been computed
IndFree == \A k \in Ranks : \A b \in right[k] : ref[b] > 0             \* a free block's bytes mean nothing
IndClean == ~poison
IndInv == IndTypes /\ IndRefs /\ IndPinned /\ IndLife /\ IndOpen /\ IndDma /\ IndBytes /\ IndFence /\ IndFree /\ IndClean
=============================================================================

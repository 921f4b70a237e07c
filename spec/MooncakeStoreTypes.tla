------------------------- MODULE MooncakeStoreTypes -------------------------
(* Constants, variables, values and types of MooncakeStore.tla, and the notions that all parts share. *)
EXTENDS Naturals, FiniteSets, Util

CONSTANTS
  Reqs,        \* request ids, 1..n; a smaller number is the higher priority
  Prompts,     \* the token sequences a request may have, each as a function 1..len -> block hash
  Blocks,      \* KV blocks of the pool, 1..n (vLLM's null block is not among them)
  Ranks,       \* worker ranks
  Depth,       \* pipeline depth: schedule() may run this many steps ahead of update_from_output()
  DeferFree,   \* TRUE: core keeps blocks until no step in flight uses them (kv_role consumer/both)
  SyncLoads,   \* subset of BOOLEAN: which kinds of load the connector offers (TRUE = sync)
  PartSteps,   \* subset of BOOLEAN: TRUE = a step may end inside a block or carry unverified drafts
  MaxPinned,   \* the connector's budget of distinct pinned blocks
  MaxAttempts, \* how often a generation may put one failed block back into `retry`
  MaxJob,      \* jobs in one behaviour (a bound of the model, not of the protocol)
  MaxEpoch     \* resets with new weights in one behaviour

VARIABLES
  \* ---- core: vLLM's scheduler, block pool and step pipeline
  rst, rp, rgen, full, tbl,    \* per request: status, prompt, generation, full blocks, block table
  ref, cached,                 \* per block: reference count, hash in the prefix-cache index
  preempted,                   \* ids that the next scheduler output lists as preempted
  owed,                        \* the running request that schedule() is preempting others for, or 0
  pipe,                        \* steps in flight, slot 1 is the oldest
  calm,                        \* TRUE: no more arrivals, aborts, evictions, resets (liveness models)
  epoch,                       \* weights version
  \* ---- kvledger, scheduler side
  trk,                         \* per request: its tracker
  nextJob, job, led,           \* job ids; per job: the message as sent; the ledger entry
  known,                       \* hashes believed to be stored by every rank
  nohit,                       \* per request: a load of it failed, so no hit is offered again
  stalled,                     \* no report and no new job for stall_timeout_s
  mute,                        \* core has refused a reset since the last one that succeeded
  \* ---- ranks
  hooked, polled, fwd,         \* per rank: slots of pipe told / whose reports were collected / computed
  rk,                          \* per rank and job: life of the job
  mem, dma,                    \* per rank and block: content; transfers of single blocks in flight
  \* ---- Mooncake
  store                        \* per rank shard and key: content of the object, or NoObj

coreVars == <<rst, rp, rgen, full, tbl, ref, cached, preempted, owed, pipe, calm, epoch>>
schedVars == <<trk, nextJob, job, led, known, nohit, stalled, mute>>
rankVars == <<hooked, polled, fwd, rk, mem, dma>>
vars == <<coreVars, schedVars, rankVars, store>>

-----------------------------------------------------------------------------
(* Values and types.  A type predicate stands beside each variable's meaning. *)

Hashes == UNION {{p[i] : i \in DOMAIN p} : p \in Prompts}
Hittable == UNION {{p[i] : i \in {i \in DOMAIN p : i < Cardinality(DOMAIN p)}} : p \in Prompts}
Len(p) == Cardinality(DOMAIN p)
Idx == 1..Max({Len(p) : p \in Prompts})
JobIds == 1..MaxJob
Gens == 1..(2 * Cardinality(Reqs) + MaxJob + 1)       \* more than can be in use at one time
Slots == 1..Depth
NoHash == "none"
Part == "part"                              \* "hash" of a block that is not full, or holds draft tokens
Right(h) == <<h, epoch>>                    \* the bytes that belong under h
Junk == <<"junk", 0>>                       \* any other bytes
NoObj == <<"none", 0>>                      \* no object
Bytes == (Hashes \X (0..MaxEpoch)) \cup {Junk}

KeyOf(h, e) == <<h, e>>                     \* the key of an object: block hash and key epoch (fingerprint, group left out)
Keys == Hashes \X (0..MaxEpoch)

NoTable == [i \in Idx |-> 0]
NoTries == [i \in Idx |-> 0]
NoTrk == [gen |-> 0, front |-> 0, retry |-> {}, load |-> "none", att |-> NoTries]
NoJob == [kind |-> "none", req |-> 0, gen |-> 0, sync |-> FALSE, epoch |-> 0, items |-> {}]
NoLed == [st |-> "none", held |-> {}, rep |-> {}, cnt |-> 0, bad |-> {}]
NoRk == [st |-> "none", bad |-> {}]
NoStep == [on |-> FALSE, req |-> 0, wr |-> {}, rd |-> {}, jobs |-> {}, rep |-> {}]

CoreTypes ==
  /\ rst \in [Reqs -> {"none", "waiting", "loading", "running", "zombie"}]   \* zombie: aborted while loading
  /\ rp \in [Reqs -> Prompts]
  /\ rgen \in [Reqs -> {0} \cup Gens]                        \* 0: not admitted
  /\ full \in [Reqs -> {0} \cup Idx]                         \* num_computed_tokens in full blocks
  /\ tbl \in [Reqs -> [Idx -> {0} \cup Blocks]]              \* 0: no block at this index
  /\ ref \in [Blocks -> 0..(Cardinality(Reqs) + MaxJob)]
  /\ cached \in [Blocks -> {NoHash} \cup Hashes]
  /\ preempted \subseteq Reqs
  /\ owed \in {0} \cup Reqs
  /\ \A s \in Slots : /\ pipe[s].on \in BOOLEAN
                      /\ pipe[s].req \in {0} \cup Reqs
                      /\ pipe[s].wr \subseteq Blocks \X (Hashes \cup {Part})   \* blocks the forward writes
                      /\ pipe[s].rd \subseteq Blocks \X Hashes                 \* blocks it reads
                      /\ pipe[s].jobs \subseteq JobIds                         \* the connector metadata
                      /\ pipe[s].rep \subseteq Ranks \X JobIds                 \* reports its output carries
  /\ calm \in BOOLEAN
  /\ epoch \in 0..MaxEpoch
SchedTypes ==
  /\ trk \in [Reqs -> [gen : {0} \cup Gens, front : {0} \cup Idx, retry : SUBSET Idx,
                       load : {"none", "pending", "failed", "tainted"}, att : [Idx -> 0..MaxAttempts]]]
  /\ nextJob \in 1..(MaxJob + 1)
  /\ \A j \in JobIds : /\ job[j].kind \in {"none", "store", "load"}
                       /\ job[j].req \in {0} \cup Reqs /\ job[j].gen \in {0} \cup Gens
                       /\ job[j].sync \in BOOLEAN /\ job[j].epoch \in 0..MaxEpoch
                       /\ job[j].items \subseteq Idx \X Blocks \X Hashes       \* (index, block, hash)
  /\ \A j \in JobIds : /\ led[j].st \in {"none", "live", "done"}
                       /\ led[j].held \subseteq Blocks                         \* blocks pinned for this job
                       /\ led[j].rep \subseteq Ranks /\ led[j].cnt \in 0..(2 * Cardinality(Ranks))
                       /\ led[j].bad \subseteq Idx
  /\ known \subseteq Hashes
  /\ nohit \in [Reqs -> BOOLEAN]
  /\ stalled \in BOOLEAN
  /\ mute \in BOOLEAN
RankTypes ==
  /\ hooked \in [Ranks -> 0..Depth] /\ polled \in [Ranks -> 0..Depth] /\ fwd \in [Ranks -> 0..Depth]
  /\ rk \in [Ranks -> [JobIds -> [st : {"none", "queued", "running", "quar", "ready", "sent", "gone"},
                                  bad : SUBSET Idx]]]
  /\ mem \in [Ranks -> [Blocks -> Bytes]]
  /\ dma \subseteq Ranks \X JobIds \X Idx
  /\ store \in [Ranks -> [Keys -> Bytes \cup {NoObj}]]
TypeOK == CoreTypes /\ SchedTypes /\ RankTypes

Init ==
  /\ rst = [r \in Reqs |-> "none"] /\ rp \in {[r \in Reqs |-> p] : p \in {CHOOSE p \in Prompts : TRUE}}
  /\ rgen = [r \in Reqs |-> 0] /\ full = [r \in Reqs |-> 0] /\ tbl = [r \in Reqs |-> NoTable]
  /\ ref = [b \in Blocks |-> 0] /\ cached = [b \in Blocks |-> NoHash]
  /\ preempted = {} /\ owed = 0 /\ pipe = [s \in Slots |-> NoStep] /\ calm = FALSE /\ epoch = 0
  /\ trk = [r \in Reqs |-> NoTrk] /\ nextJob = 1
  /\ job = [j \in JobIds |-> NoJob] /\ led = [j \in JobIds |-> NoLed]
  /\ known = {} /\ nohit = [r \in Reqs |-> FALSE] /\ stalled = FALSE /\ mute = FALSE
  /\ hooked = [k \in Ranks |-> 0] /\ polled = [k \in Ranks |-> 0] /\ fwd = [k \in Ranks |-> 0]
  /\ rk = [k \in Ranks |-> [j \in JobIds |-> NoRk]]
  /\ mem = [k \in Ranks |-> [b \in Blocks |-> Junk]] /\ dma = {}
  /\ store = [k \in Ranks |-> [x \in Keys |-> NoObj]]

-----------------------------------------------------------------------------
(* Derived notions. *)

Range(T) == {T[i] : i \in Idx} \ {0}                      \* blocks in a block table
Vals(f) == {f[i] : i \in DOMAIN f}
BlocksOf(items) == {x[2] : x \in items}
IdxOf(items) == {x[1] : x \in items}
FreeBlocks == {b \in Blocks : ref[b] = 0}
Live == {j \in JobIds : led[j].st = "live"}               \* some rank's report is still outstanding
Pinned == UNION {led[j].held : j \in Live}
InFlight == {s \in Slots : pipe[s].on}
Moving(k, j) == {i \in Idx : <<k, j, i>> \in dma}         \* indices of job j whose bytes may move on rank k
Room == Cardinality(InFlight) < Depth
StepsOf(r) == {s \in InFlight : pipe[s].req = r}
HashInFlight(h) == \E j \in Live : job[j].kind = "store" /\ \E x \in job[j].items : x[3] = h
SyncTargets == UNION {BlocksOf(job[j].items) : j \in {j \in Live : job[j].kind = "load" /\ job[j].sync}}
FreshGen ==        \* a new generation number: one that nothing refers to any more is as good as a never used one
  Min(Gens \ ({rgen[r] : r \in Reqs} \cup {trk[r].gen : r \in Reqs} \cup {job[j].gen : j \in JobIds}))

=============================================================================

------------------------------- MODULE MCRefine -------------------------------
(* MooncakeStore implements the abstract map: the refinement mapping.  A read is a load job on a rank; an index of it has
   arrived when its bytes no longer move and it is not listed as bad.                                                  *)
EXTENDS MCMutants

Arrivals ==
  UNION {{<<k, j, Key(j, x), mem[k][x[2]]>> :
            x \in {x \in job[j].items : <<k, j, x[1]>> \notin dma /\ x[1] \notin rk[k][j].bad}} :
         <<k, j>> \in {t \in Ranks \X JobIds : /\ job[t[2]].kind = "load"
                                                /\ rk[t[1]][t[2]].st \in {"running", "quar", "ready", "sent"}}}
Abs == INSTANCE MooncakeStoreAbs WITH Shards <- Ranks, Readers <- JobIds, Nothing <- NoObj, pub <- store, ans <- Arrivals

(* Every hit returns the bytes last published under its key, on every rank, whatever else goes on. *)
Refines == Abs!AbsSpec
=============================================================================

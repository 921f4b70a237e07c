------------------------------- MODULE Canary -------------------------------
(***************************************************************************)
(* Not about kvledger: about the TLC in use.  A checker that silently      *)
(* checks nothing looks like a correct model.  Here everything is known    *)
(* beforehand: 64 states, and for each kind of property one that holds and *)
(* one that fails after a known number of steps.                           *)
(*                                                                         *)
(* ReadsException is what an old TLC gets wrong (tlaplus issue 1145): a    *)
(* function literal with an exception, handed to an operator, is read      *)
(* without it.  The runner only says which it is: no module of ours has    *)
(* such an expression.                                                     *)
(***************************************************************************)
EXTENDS Naturals, Sequences

CONSTANT Sum                   \* of two and two; TLC must refuse another than 4
VARIABLES a, b                 \* two dials of eight positions

Init == a = 0 /\ b = 0
TurnA == a' = (a + 1) % 8 /\ UNCHANGED b
TurnB == b' = (b + 1) % 8 /\ UNCHANGED a
Next == TurnA \/ TurnB
Spec == Init /\ [][Next]_<<a, b>> /\ WF_<<a, b>>(TurnA)
ASSUME 2 + 2 = Sum

InRange == a \in 0..7 /\ b \in 0..7
NeverSame == [][<<a', b'>> # <<a, b>>]_<<a, b>>
AMoves == []<>(a = 7)

Low == a + b < 5                                   \* fails in the 6th state
BStays == [][b < 2 => b' = b]_<<a, b>>             \* fails in the 2nd
BMoves == []<>(b = 7)                              \* fails: only TurnA is fair

Second(s) == SubSeq(s, 2, 2)[1]
ReadsException == Second([[i \in 1..4 |-> 0] EXCEPT ![2] = a + 1]) = a + 1
=============================================================================

-------------------------------- MODULE Util --------------------------------
(* Helper operators that the 2020 TLC lacks a library for.  UtilTest.tla holds one ASSUME per operator. *)
EXTENDS Naturals, FiniteSets

Min(S) == CHOOSE x \in S : \A y \in S : x <= y      \* least element of a non-empty set of numbers
Max(S) == CHOOSE x \in S : \A y \in S : x >= y      \* greatest element of a non-empty set of numbers
MaxOr(S, d) == IF S = {} THEN d ELSE Max(S)
Bit(p) == IF p THEN 1 ELSE 0                        \* a truth value as a number, to add up references

(* Longest n with P true of every number in 1..n, and n <= top. *)
Prefix(top, P(_)) == MaxOr({n \in 1..top : \A i \in 1..n : P(i)}, 0)

(* All injective functions from S into T: how S's members can be given distinct members of T. *)
Injections(S, T) == {f \in [S -> T] : \A x, y \in S : f[x] = f[y] => x = y}
=============================================================================

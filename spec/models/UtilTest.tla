------------------------------ MODULE UtilTest ------------------------------
(* Unit tests of Util.tla: checked as assumptions (TLC exits with 10 when one is false). *)
EXTENDS Util
VARIABLE x
Init == x = 0
Next == x' = x

Even(i) == i % 2 = 0
Small(i) == i < 3

ASSUME Min({3, 1, 2}) = 1 /\ Max({3, 1, 2}) = 3
ASSUME MaxOr({}, 7) = 7 /\ MaxOr({2, 5}, 7) = 5
ASSUME Bit(TRUE) = 1 /\ Bit(FALSE) = 0
ASSUME Prefix(5, Small) = 2 /\ Prefix(1, Small) = 1 /\ Prefix(5, Even) = 0 /\ Prefix(0, Small) = 0
ASSUME Cardinality(Injections({1, 2}, {5, 6, 7})) = 6
ASSUME Injections({1, 2}, {5}) = {} /\ Injections({}, {5}) = {<<>>}
=============================================================================

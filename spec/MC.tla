--------------------------------- MODULE MC ---------------------------------
(* Small constants for MC.cfg and its sisters. *)
EXTENDS MooncakeStoreProps

TwoPrompts == {<<"a", "b">>, <<"a", "c">>}       \* share their first block
OnePrompt == {<<"a", "b">>}
ShortPrompts == {<<"a">>, <<"c">>}               \* share nothing
OneShort == {<<"a">>}
None == {}
OnlyFull == {FALSE}
AnyPart == {TRUE, FALSE}
Async == {FALSE}
Sync == {TRUE}
LowestFree(B) == IF B = {} THEN {} ELSE {Min(B)}
PollLate(k, s) == fwd[k] >= s
NoRefusal(k, j) == {{}}
=============================================================================

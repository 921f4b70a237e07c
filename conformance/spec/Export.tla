------------------------------- MODULE Export -------------------------------
(* Slices of the model small enough to walk every edge of.  Each slice-*.cfg says what it leaves out. *)
EXTENDS MC
OneShort == {<<"a">>}                  \* one block, nothing to hit
=============================================================================

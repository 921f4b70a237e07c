"""Observers: what the protocol did, for people and for TLC. They cost nothing when off and cannot hurt when on."""

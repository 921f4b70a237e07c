"""Is kvledger its model? Tours over TLC's graph, refusals, counterexamples, twins."""

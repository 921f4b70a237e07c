"""The proof without bounds: a TLA+ module as obligations for SMT solvers, and what a failed one means."""

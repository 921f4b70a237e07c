"""Side-by-side benchmarks against vLLM's in-tree Mooncake store connector; see README.md here."""

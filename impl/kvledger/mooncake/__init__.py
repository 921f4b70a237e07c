"""The only place that talks to Mooncake. `mooncake.store` itself is imported when a client connects, not before."""

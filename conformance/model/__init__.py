"""Runner of the TLA+ model: standard library only, so that it runs wherever a JVM and a `tla2tools.jar` are."""

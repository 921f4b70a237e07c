"""What is done to a connector: verbs, scenarios, machines, properties, targets and reports."""

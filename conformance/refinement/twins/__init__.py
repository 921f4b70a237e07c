"""Historic bugs, put into kvledger for the length of a block."""

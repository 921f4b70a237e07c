"""A stand-in for Mooncake's client that copies real bytes and does as told."""

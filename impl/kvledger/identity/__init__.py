"""Identity of bytes: which weights, configuration and adapters stand behind a key. Knows files and vLLM's settings."""

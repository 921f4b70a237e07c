"""The demo: the main job of kvledger, run on real parts and checked.

Real vLLM serves a batch of real text prompts out of a KV pool that is too small for them, with kvledger and a real
Mooncake store; a second engine with an empty local cache serves the same prompts from the store; a third engine
without any connector says what every output and every stored object should have been.

``python -m demo --help`` lists the options. The package is not part of the wheel.
"""

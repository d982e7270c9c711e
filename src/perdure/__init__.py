"""Perdure: KV cache blocks of LLM inference that survive the process that computed them."""

"""The reference engine's model: a compact decoder of the Llama family with a paged KV cache.

Law: nothing here is imported unless a torch engine is made.
"""
